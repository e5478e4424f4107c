"""How a transformers model attends over rows: its attention calls become ``specc.ops.attend``.

The function is registered with transformers under the name ``specc`` the first time it is needed. While a
`rows_context` is open, each attention layer writes and reads the caches of its own ``layer_idx``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specc.errors import InvariantError, UnsupportedError
from specc.ops import attend

NAME = "specc"


@dataclass(frozen=True)
class CacheShape:
    """K/V of one layer: heads, the size of a key and of a value, and the sliding window if it has one."""

    heads: int
    key_size: int
    value_size: int
    window: int | None


@dataclass(frozen=True)
class _Rows:
    slot: Tensor
    cache_row: Tensor
    position: Tensor
    reach: Tensor
    key_caches: Mapping[int, Tensor]
    value_caches: Mapping[int, Tensor]
    first: Tensor | None


@dataclass
class _Probe:
    layers: dict[int, CacheShape] = field(default_factory=dict)


_OPEN: ContextVar[_Rows | _Probe | None] = ContextVar("specc_rows", default=None)


@contextlib.contextmanager
def rows_context(
    *,
    slot: Tensor,
    cache_row: Tensor,
    key_caches: Mapping[int, Tensor],
    value_caches: Mapping[int, Tensor],
    position: Tensor | None = None,
    first: Tensor | None = None,
    reach: Tensor | None = None,
) -> Iterator[None]:
    """Let attention layers run on rows.

    Args:
        slot, cache_row: int64 [rows].
        position: int64 [rows], by which a sliding window is measured; None = the cache row.
        key_caches, value_caches: [slots, heads, cache rows, size] by layer index.
        first: int64 [rows], the oldest cache row that each row may see, beside the layers' own windows.
        reach: int64 [rows], the sequence length that chooses a row's rotary frequencies (longrope).
    """
    reach = cache_row + 1 if reach is None else reach
    position = cache_row if position is None else position
    token = _OPEN.set(_Rows(slot, cache_row, position, reach, key_caches, value_caches, first))
    try:
        yield
    finally:
        _OPEN.reset(token)


@contextlib.contextmanager
def probe_context() -> Iterator[dict[int, CacheShape]]:
    """Record the K/V shapes of every attention layer that runs; outputs are zeros."""
    probe = _Probe()
    token = _OPEN.set(probe)
    try:
        yield probe.layers
    finally:
        _OPEN.reset(token)


@contextlib.contextmanager
def attention_on_rows(module: nn.Module) -> Iterator[None]:
    """Switch ``module`` to what rows need, and back, so that the caller's model is left as it was.

    Attention becomes ours, experts the grouped form (the others branch on the routing), and a rotary embedding that
    picks its frequencies by the length of the whole call picks them by each row's own length.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values()
    wanted = {"_attn_implementation_internal": NAME, "_experts_implementation_internal": "grouped_mm"}
    before = [(c, {k: getattr(c, k, None) for k in wanted}) for c in configs]
    longrope = [m for m in module.modules() if getattr(m, "rope_type", None) == "longrope"]
    for config in configs:
        for key, value in wanted.items():
            setattr(config, key, value)
    for rotary in longrope:
        rotary.forward = functools.partial(_longrope_on_rows, rotary)
    try:
        yield
    finally:
        for config, old in before:
            for key, previous in old.items():
                setattr(config, key, previous)
        for rotary in longrope:
            del rotary.forward


def _longrope_on_rows(rotary: Any, x: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1, rows, size]: long frequencies where the row's sequence passed the original range.

    transformers decides for the whole call by its largest position: the prompt's length in a prefill, the token's own
    position when decoding. ``reach`` is that length for each row, so rows of several sequences can share a call.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = rotary.config.rope_parameters["original_max_position_embeddings"]
    long = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, x.device, seq_len=original + 1)[0]
    current = _OPEN.get()
    reach = current.reach[None] if isinstance(current, _Rows) else position_ids + 1
    inverse = torch.where((reach > original)[..., None], long, rotary.original_inv_freq)
    angle = position_ids[..., None].float() * inverse.float()
    turned = torch.cat([angle, angle], dim=-1)
    scale = rotary.attention_scaling
    return (turned.cos() * scale).to(x.dtype), (turned.sin() * scale).to(x.dtype)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend [1, heads, rows, size] queries; returns [1, rows, heads, size] as transformers expects."""
    if attention_mask is not None:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be traced over rows",
            ["it builds its own attention mask, which rows do not have"],
        )
    if more.get("is_causal", True) is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be traced over rows", ["its attention is not causal"]
        )
    if not hasattr(module, "layer_idx"):
        raise UnsupportedError(
            f"{type(module).__name__} cannot be traced over rows", ["it has no layer index"]
        )
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    rows_query, rows_key, rows_value = (t[0].transpose(0, 1) for t in (query, key, value))
    current = _OPEN.get()
    layer = int(str(module.layer_idx))
    if isinstance(current, _Probe):
        shape = CacheShape(rows_key.shape[1], rows_key.shape[2], rows_value.shape[2], sliding_window)
        if current.layers.setdefault(layer, shape) != shape:
            raise UnsupportedError("this model cannot be traced over rows", [f"layer {layer} attends twice"])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    if current is None:
        raise InvariantError("attention ran outside of a rows context", type(module).__name__)
    cache_row = current.cache_row
    first = torch.zeros_like(cache_row)
    if sliding_window is not None:
        first = (current.position - (sliding_window - 1)).clamp(min=0)
    if current.first is not None:
        first = torch.maximum(first, current.first)
    out = attend(
        rows_query,
        rows_key,
        rows_value,
        current.key_caches[layer],
        current.value_caches[layer],
        current.slot,
        cache_row,
        first,
        cache_row,
        scale,
        softcap,
        s_aux,
    )
    return out[None], None
