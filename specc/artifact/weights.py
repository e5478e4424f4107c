"""The weights of a package: one safetensors file, written tensor by tensor and read in place.

The safetensors library opens files, not parts of one, so the few lines of its format that matter are here: an
8-byte header length, a JSON header, then the tensors without gaps.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from specc.artifact.fields import read_json, write_json
from specc.artifact.specs import DTYPES, NAMES, spec_of, spec_text
from specc.contracts import TensorSpec
from specc.errors import ArtifactError

NAME = "weights.safetensors"
MAX_HEADER = 16 << 20
_ALIGNMENT = 64
_PIECE = 1 << 24  # bytes copied at a time


def write_weights(weights: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: widest dtypes first, so that every tensor is aligned."""
    names = sorted(weights, key=lambda n: (-weights[n].element_size(), n))
    header: dict[str, object] = {}
    position = 0
    for name in names:
        tensor = weights[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, position +
            size],
        }  # fmt: skip
        position += size
    text = write_json(header).rstrip()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = weights[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), _PIECE):
            yield flat[begin : begin + _PIECE].numpy().data


def read_weights(
    path: Path, mapped: mmap.mmap, offset: int, size: int, expected: Mapping[str, TensorSpec]
) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file that lies in a mapped one, without copying them.

    Args:
        path: for messages.
        mapped: the file; tensors keep it open.
        offset: where in it the weights begin.
        size: their bytes, header included.
        expected: what they must be.

    Raises:
        ArtifactError: the header is too large or not one, or tensors are not the expected ones.
    """
    length = int.from_bytes(mapped[offset : offset + 8], "little") if size >= 8 else -1
    if not 0 < length <= min(MAX_HEADER, size - 8):
        raise ArtifactError(path, f"{NAME} header", f"{length} bytes", f"1 to {min(MAX_HEADER, size - 8)}")
    header = read_json(path, NAME, memoryview(mapped)[offset + 8 : offset + 8 + length])
    begin, room = offset + 8 + length, size - 8 - length
    spans: list[tuple[int, int]] = []
    found: dict[str, Tensor] = {}
    for name, spec in expected.items():
        item = header.inner(name)
        actual = TensorSpec(item.shape("shape"), DTYPES[item.text("dtype", *DTYPES)])
        span = item.wholes("data_offsets", 0, room)
        item.done()
        if actual != spec:
            raise ArtifactError(path, f"{NAME}: {name}", spec_text(actual), spec_text(spec))
        if len(span) != 2 or span[1] - span[0] != spec.size_bytes or (begin + span[0]) % spec.dtype.itemsize:
            raise ArtifactError(
                path, f"{NAME}: {name}.data_offsets", list(span), f"{spec.size_bytes} aligned bytes"
            )
        spans.append((span[0], span[1]))
        count = math.prod(spec.shape)
        flat = (
            torch.frombuffer(mapped, dtype=spec.dtype, count=count, offset=begin + span[0]) if count else None
        )
        found[name] = torch.empty(spec.shape, dtype=spec.dtype) if flat is None else flat.view(spec.shape)
    header.done()
    position = 0
    for first, last in sorted(spans):
        if first != position:
            raise ArtifactError(path, NAME, f"tensors that overlap or leave gaps at byte {first}", position)
        position = last
    if position != room:
        raise ArtifactError(path, NAME, f"{room} bytes of tensors", position)
    assert all(spec_of(t) == expected[n] for n, t in found.items())
    return found
