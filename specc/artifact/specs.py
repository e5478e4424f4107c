"""Dtypes and tensor specs as text."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from specc.artifact.fields import Fields
from specc.contracts import TensorSpec

# safetensors' names; a package's weights, state and graphs hold no other dtype.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
})  # fmt: skip
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def write_spec(spec: TensorSpec) -> dict[str, Any]:
    return {"dtype": NAMES[spec.dtype], "shape": list(spec.shape)}


def read_spec(fields: Fields) -> TensorSpec:
    """Read a spec, and nothing else."""
    spec = TensorSpec(fields.shape("shape"), DTYPES[fields.text("dtype", *DTYPES)])
    fields.done()
    return spec


def spec_of(value: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(value.shape), value.dtype)


def spec_text(spec: TensorSpec) -> str:
    return f"{NAMES[spec.dtype]}{list(spec.shape)}"
