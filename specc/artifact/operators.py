"""The operators that a graph in a package may call: pure functions on tensors, and specc's own.

A list of names, not of namespaces: ``aten`` also holds operators that open files or resize memory. To allow
one more, add its name here; it must be free of side effects, and its result's shape must not depend on
values.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch

_POINTWISE = """
abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
bitwise_or bitwise_right_shift bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__ ceil celu clamp
clamp_max clamp_min clip copysign cos cosh div divide elu eq erf erfc exp exp2 expm1 floor floor_divide fmax
fmin fmod frac ge gelu glu greater greater_equal gt hardsigmoid hardswish hardtanh heaviside isfinite isinf
isnan isneginf isposinf ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid
logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul
multiply nan_to_num ne neg negative not_equal pow prelu reciprocal relu relu6 remainder round rsqrt rsub
selu sgn sigmoid sign silu sin sinc sinh softplus sqrt square sub subtract tan tanh threshold tril triu
true_divide trunc where xlogy
"""
_REDUCE = """
all amax amin any argmax argmin argsort cummax cummin cumprod cumsum histc logcumsumexp log_softmax logsumexp
max mean median min mode norm prod softmax _softmax _log_softmax _safe_softmax sort std sum topk var var_mean
linalg_vector_norm searchsorted bucketize
"""
_SHAPE = """
alias arange atleast_1d atleast_2d broadcast_tensors broadcast_to cat chunk clone concat constant_pad_nd
contiguous detach diagonal diff embedding empty empty_like expand expand_as eye flatten flip full full_like
gather hstack index index_add index_copy index_fill index_put index_select lift_fresh lift_fresh_copy
linspace masked_scatter meshgrid movedim moveaxis narrow new_empty new_full new_ones new_zeros one_hot ones
ones_like numpy_T outer pad permute repeat repeat_interleave reshape roll rot90 scalar_tensor scatter
scatter_add scatter_reduce select select_scatter
slice slice_scatter split split_with_sizes squeeze stack swapaxes t
take_along_dim tensor_split tile to transpose type_as unbind unflatten unfold unsqueeze view view_as vstack
zeros zeros_like _to_copy _unsafe_view
"""
_PRODUCT = """
addmm addmv baddbmm bilinear bmm conv1d conv2d convolution dot einsum linear matmul mm mv vdot _grouped_mm
scaled_dot_product_attention
"""
_NORM = "batch_norm dropout group_norm layer_norm native_layer_norm rms_norm native_dropout"

ATEN = frozenset(
    f"aten.{name}" for text in (_POINTWISE, _REDUCE, _SHAPE, _PRODUCT, _NORM) for name in text.split()
)
SPECC = frozenset(
    f"specc.{name}"
    for name in (
        "attend", "grouped_mm", "kth_largest", "move_rows", "nucleus_cut", "put", "store", "typical_cut", "write_rows",
    )
)  # fmt: skip
GETITEM = "getitem"
_NAME = re.compile(r"(aten|specc)\.(\w+)\.(\w+)")


def name_of(target: Any) -> str | None:
    """Return what a package calls an operator, or None if it may not hold it."""
    if target is operator.getitem:
        return GETITEM
    name = str(target) if isinstance(target, torch._ops.OpOverload) else ""
    return name if find(name) is target else None


def find(name: str) -> Any:
    """Return the operator of that name, or None: not allowed, not known, or it writes where it must not."""
    if name == GETITEM:
        return operator.getitem
    match = _NAME.fullmatch(name)
    if match is None or f"{match[1]}.{match[2]}" not in ATEN | SPECC:
        return None
    packet = getattr(getattr(torch.ops, match[1]), match[2], None)
    found = getattr(packet, match[3], None)
    if not isinstance(found, torch._ops.OpOverload) or (match[1] == "aten" and found._schema.is_mutable):
        return None
    return found
