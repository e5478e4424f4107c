"""Open a drafter's folder and account for every tensor in it.

A `Folder` hands out tensors by name and shape, remembers what was taken, and refuses what is missing,
misshapen, not finite, or left over without a reason. Layout readers are written on top of it, so that
none of them can forget a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specc.errors import ArtifactError
from specc.models.files import read_json

_WEIGHTS = ("F32", "F16", "BF16", "F64")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


class Folder:
    """A checkpoint folder: its config.json and its safetensors, read lazily and accounted for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_config(path)
        self._where = _index(path)
        self._taken: dict[str, str] = {}  # name -> why it is not an oversight

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        with safe_open(self._where[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a weight; ArtifactError if it is missing, of another shape, no float, or not finite."""
        tensor = self._read(
            name, shape, _WEIGHTS, "float weights; quantised ones have to be dequantised first"
        )
        if not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(self.path, name, "NaN or infinite values", "finite values")
        return tensor

    def take_integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of integers or flags; ArtifactError if it is missing, misshapen or of another kind."""
        return self._read(name, shape, _INTEGERS, "integers")

    def _read(
        self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...], expected: str
    ) -> Tensor:
        if name not in self._where:
            raise ArtifactError(
                self.path, name, "no such tensor", f"a tensor {list(shape) if shape else ''}".strip()
            )
        found = self.shape(name)
        if shape is not None and found != shape:
            raise ArtifactError(self.path, name, f"shape {list(found)}", f"shape {list(shape)}")
        with safe_open(self._where[name], framework="pt") as file:
            dtype = file.get_slice(name).get_dtype()
            if dtype not in dtypes:
                raise ArtifactError(self.path, name, f"dtype {dtype}", expected)
            tensor: Tensor = file.get_tensor(name)
        self._taken[name] = "read"
        return tensor

    def leave(self, name: str, why: str) -> None:
        """Note that a tensor is deliberately not read."""
        if name in self._where:
            self._taken[name] = why

    def finish(self) -> tuple[str, ...]:
        """Refuse tensors nobody read or named; return "name: why" of those left on purpose."""
        for name in sorted(self._where.keys() - self._taken.keys()):
            raise ArtifactError(
                self.path,
                name,
                f"a tensor {list(self.shape(name))} that this layout does not have",
                "every tensor to be read: ignoring it could change the numbers",
            )
        return tuple(f"{name}: {why}" for name, why in sorted(self._taken.items()) if why != "read")

    def refuse(self, field: str, found: object, expected: object) -> ArtifactError:
        """Return the error that refuses this folder for ``field``."""
        return ArtifactError(self.path, field, found, expected)


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_dir():
        raise ArtifactError(
            path, "folder", "nothing" if not path.exists() else "a file", "a checkpoint folder"
        )
    config = read_json(path / "config.json")
    names = config.get("architectures")  # by which layouts are recognised
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ArtifactError(path, "config.json architectures", repr(names), "a list of strings")
    return config


def _index(path: Path) -> dict[str, Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        found = f"only pickle files ({', '.join(pickles)})" if pickles else "no weights"
        raise ArtifactError(
            path,
            "weights",
            found,
            "*.safetensors; a pickle can run code, so convert it first: "
            "safetensors.torch.save_file(tensors, 'model.safetensors')",
        )
    where: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ArtifactError(file, "safetensors", str(error), "a whole safetensors file") from error
        for name in names:
            if name in where:
                raise ArtifactError(file, name, f"also in {where[name].name}", "each tensor once")
            where[name] = file
    _check_index(path, where)
    return where


def _check_index(path: Path, where: Mapping[str, Path]) -> None:
    """Refuse files that are not those of the index beside them: a lost shard may hold an optional tensor."""
    for file in sorted(path.glob("*.safetensors.index.json")):
        listed = read_json(file).get("weight_map")
        if not isinstance(listed, dict):
            raise ArtifactError(
                file, "weight_map", type(listed).__name__, "an object: tensor name to file name"
            )
        for name, shard in sorted(listed.items()):
            if name not in where:
                raise ArtifactError(path, name, "no such tensor", f"it in {shard}, where {file.name} has it")
            if where[name].name != shard:
                raise ArtifactError(
                    path, name, f"it in {where[name].name}", f"it in {shard}, as {file.name} says"
                )
