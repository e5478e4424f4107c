"""What lies in a model folder: which weight files, whole or not, and in which dtype. Reads headers only."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.errors import ArtifactError, UnsupportedError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER = 100 << 20  # the format's own limit
_CONVERSION = (
    "convert it once, where you trust the file: "
    "AutoModelForCausalLM.from_pretrained(FOLDER, use_safetensors=False).save_pretrained(NEW_FOLDER)"
)


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a folder, in order, and the dtype name ("BF16") most of their bytes have."""

    paths: tuple[Path, ...]
    dtype: str
    tensors: tuple[str, ...]


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file; ArtifactError when it is missing, broken or no object."""
    if not path.is_file():
        raise ArtifactError(path.parent, path.name, "no such file", "a checkpoint's folder has one")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # JSON's own error and Unicode's are ValueErrors
        raise ArtifactError(path, "content", str(error), "JSON") from error
    if not isinstance(values, dict):
        raise ArtifactError(path, "content", type(values).__name__, "a JSON object")
    return values


def read_header(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the tensors a safetensors file names, after checking that the file is whole.

    Raises:
        ArtifactError: Truncated, oversized, or not a safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise ArtifactError(
                path, "header length", length, f"2 to {max(0, size - 8)} (is it safetensors, whole?)"
            )
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ArtifactError(path, "header", str(error), "JSON") from error
    if not isinstance(header, dict):
        raise ArtifactError(path, "header", type(header).__name__, "a JSON object")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 0
    for name, entry in tensors.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(x, int) for x in offsets)):
            raise ArtifactError(path, f"header of {name}", entry, "dtype, shape and data_offsets")
        end = max(end, offsets[1])
    if 8 + length + end != size:
        raise ArtifactError(path, "size", f"{size} bytes", f"{8 + length + end} bytes, as its header says")
    return tensors


def find_weights(folder: Path) -> WeightFiles:
    """Return the safetensors weights of a model folder, each file checked to be whole.

    Raises:
        UnsupportedError: The weights are pickles; the message says how to convert them.
        ArtifactError: There are none, one that the index names is missing, or one is broken.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        paths = [single]
    elif index.is_file():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ArtifactError(index, "weight_map", where, "tensor names to file names")
        names = sorted({str(name) for name in where.values()})
        bad = [name for name in names if Path(name).name != name]
        if bad:
            raise ArtifactError(index, "weight_map", bad[0], "names of files in the same folder")
        paths = [folder / name for name in names]
        for path in paths:
            if not path.is_file():
                raise ArtifactError(index, "weight_map", f"no file {path.name}", "every file it names")
    else:
        _refuse_other_weights(folder)
    return _summarise(tuple(paths))


def _refuse_other_weights(folder: Path) -> None:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UnsupportedError(
            f"the weights in {folder} are not read",
            [f"{name} is a pickle, which can run code" for name in pickles],
            _CONVERSION,
        )
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    what = f"only {', '.join(found)}" if found else "no weights"
    raise ArtifactError(folder, "weights", what, "model.safetensors or model.safetensors.index.json")


def _summarise(paths: tuple[Path, ...]) -> WeightFiles:
    sizes: Counter[str] = Counter()
    names: list[str] = []
    for path in paths:
        for name, entry in read_header(path).items():
            begin, end = entry["data_offsets"]
            sizes[str(entry.get("dtype"))] += end - begin
            names.append(name)
    if not names:
        raise ArtifactError(paths[0], "tensors", "none", "a model's weights")
    return WeightFiles(paths, sizes.most_common(1)[0][0], tuple(names))
