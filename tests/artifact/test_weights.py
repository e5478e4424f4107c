"""The weights file: safetensors, read in place, and nothing but what the manifest says."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specc.artifact import weights as module
from specc.artifact.specs import DTYPES, spec_of
from specc.artifact.weights import read_weights, write_weights
from specc.contracts import TensorSpec
from specc.errors import ArtifactError


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        name.lower(): (torch.rand(3, 5, generator=generator) * 9).to(dtype) for name, dtype in DTYPES.items()
    }
    return made | {
        "turned": torch.arange(12.0).view(3, 4).t(),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(2.5),
    }


def written(path: Path, given: dict[str, Tensor]) -> Path:
    path.write_bytes(b"".join(bytes(p) for p in write_weights(given)))
    return path


def read(path: Path, expected: dict[str, TensorSpec], offset: int = 0) -> dict[str, Tensor]:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return read_weights(path, mapped, offset, len(mapped) - offset, expected)


def test_round_trip_and_the_safetensors_library(tmp_path: Path) -> None:
    given = tensors()
    path = written(tmp_path / "w.safetensors", given)
    found = read(path, {n: spec_of(t) for n, t in given.items()})
    other = load_file(path)
    for name, tensor in given.items():
        for made in (found[name], other[name]):
            assert made.dtype == tensor.dtype
            assert torch.equal(
                made.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
            )


def test_offsets_far_into_a_large_file(tmp_path: Path) -> None:
    given = {
        "a": torch.zeros(9_000_000, dtype=torch.float64),
        "b": torch.arange(4.0),
    }  # 72 MB before b begins
    path = written(tmp_path / "w.safetensors", given)
    assert read(path, {n: spec_of(t) for n, t in given.items()})["b"].tolist() == [0, 1, 2, 3]


def test_tensors_are_mapped_and_the_file_is_never_written(tmp_path: Path) -> None:
    given = {"a": torch.arange(6.0), "b": torch.arange(4)}
    path = written(tmp_path / "w.safetensors", given)
    before = path.read_bytes()
    found = read(path, {n: spec_of(t) for n, t in given.items()})
    assert found["b"].data_ptr() + 4 * 8 == found["a"].data_ptr()  # one mapping, widest dtype first
    found["a"].zero_()
    assert path.read_bytes() == before


Change = Callable[[dict[str, Any]], None]


def _set(name: str, key: str, value: Any) -> Change:
    return lambda header: header[name].update({key: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("a", "dtype", "I32"), "a: found I32[6], expected F32[6]"),
        (_set("a", "dtype", "U64"), "dtype: found 'U64'"),
        (_set("a", "shape", [2, 3]), "found F32[2, 3], expected F32[6]"),
        (_set("a", "shape", [-6]), "whole numbers from 0"),
        (_set("a", "data_offsets", [0, 24]), "overlap or leave gaps"),
        (_set("a", "data_offsets", [32, 57]), "whole numbers from 0 to 56"),
        (_set("a", "data_offsets", [32]), "24 aligned bytes"),
        (_set("b", "more", 1), "a field this version does not know"),
        (lambda header: header.pop("b"), "b: found nothing"),
        (lambda header: header.update(c=header["a"]), "c: found a field this version does not know"),
        (lambda header: header.update(a=3), "a: found int, expected an object"),
    ],
)
def test_header_faults(tmp_path: Path, change: Change, says: str) -> None:
    given = {"a": torch.arange(6.0), "b": torch.arange(4)}
    content = written(tmp_path / "w.safetensors", given).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path = tmp_path / "changed.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(ArtifactError) as caught:
        read(path, {n: spec_of(t) for n, t in given.items()})
    assert says in str(caught.value)


@pytest.mark.parametrize("length", [0, 1 << 40, (1 << 63) + 5])
def test_an_oversized_header(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "w.safetensors", {"a": torch.arange(6.0)})
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(ArtifactError, match="header: found"):
        read(path, {"a": TensorSpec((6,))})


def test_a_header_longer_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "w.safetensors", {"a": torch.arange(6.0)})
    monkeypatch.setattr(module, "MAX_HEADER", 16)
    with pytest.raises(ArtifactError, match="expected 1 to 16"):
        read(path, {"a": TensorSpec((6,))})


def test_cut_short(tmp_path: Path) -> None:
    path = written(tmp_path / "w.safetensors", {"a": torch.arange(6.0)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match="data_offsets"):
        read(path, {"a": TensorSpec((6,))})
