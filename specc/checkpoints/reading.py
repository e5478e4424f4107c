"""Open a drafter's folder and account for every tensor in it.

A `Folder` hands out tensors by name and shape, remembers what was taken, and refuses what is missing,
misshapen, not finite, or left over without a reason. Layout readers are written on top of it, so that
none of them can forget a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specc.errors import ArtifactError

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
        """Return a tensor; ArtifactError if it is missing, of another shape, or not finite."""
        if name not in self._where:
            raise ArtifactError(
                self.path, name, "no such tensor", f"a tensor {list(shape) if shape else ''}".strip()
            )
        found = self.shape(name)
        if shape is not None and found != shape:
            raise ArtifactError(self.path, name, f"shape {list(found)}", f"shape {list(shape)}")
        with safe_open(self._where[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(self.path, name, "NaN or infinite values", "finite values")
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
    file = path / "config.json"
    if not file.is_file():
        raise ArtifactError(path, "config.json", "no such file", "the drafter's config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(file, "content", str(error), "JSON") from error
    if not isinstance(config, dict):
        raise ArtifactError(file, "content", type(config).__name__, "a JSON object")
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
    return where
