"""A slow, obvious forward of a block drafter, and small random drafters to compare with it.

It shares no code with the drafter but the weights: the whole context at once, one query row at a time,
visibility asked of a plain function of two positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from specc.drafters.block import BlockConfig, BlockDrafter
from specc.drafters.convolution import ConvolutionConfig
from specc.drafters.layers import LayerConfig
from specc.drafters.markov import ConfidenceConfig, MarkovConfig
from specc.drafters.selector import SelectorConfig
from tests.tiny import VOCAB

HIDDEN = 32  # tests.tiny's
MASK = VOCAB - 1


def block_config(kind: str, **changes: Any) -> BlockConfig:
    """Return a small configuration of "dflash", "dspark" (anchor-aligned, vanilla head) or "dflash2"."""
    layer = LayerConfig(hidden=HIDDEN, intermediate=40, heads=4, kv_heads=2, head_dim=8, qk_norm=True)
    values: dict[str, Any] = {
        "layer": layer,
        "layers": 2,
        "target_hidden": HIDDEN,
        "taps": (1, 2),
        "vocab": VOCAB,
        "draft_vocab": VOCAB,
        "mask_token": MASK,
        "block": 6,
        "causal": (False, False),
        "windows": (None, None),
    }
    if kind == "dspark":
        values |= {
            "sample_from_anchor": True,
            "markov": MarkovConfig("vanilla", 8),
            "confidence": ConfidenceConfig(True),
        }
    if kind == "dflash2":
        values |= {"convolution": ConvolutionConfig(8, 2), "selector": SelectorConfig(8, 5)}
    return BlockConfig(**{**values, **changes})


def random_drafter(config: BlockConfig, seed: int = 0) -> BlockDrafter:
    """Return a drafter whose every weight matters."""
    generator = torch.Generator().manual_seed(seed)
    drafter = BlockDrafter(config)
    with torch.no_grad():
        for name, value in drafter.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name or "base_kernel" in name:
                value.add_(0.3 * noise)
            else:
                value.copy_(noise * 1.5 / math.sqrt(value.shape[-1]))
    return drafter.eval().requires_grad_(False)


def visible(
    config: BlockConfig, layer: int, query: int, key: int, anchor: int, window: int | None = None
) -> bool:
    """Return whether the block row at position ``query`` sees position ``key``, at most the block's end."""
    if key < anchor and window is not None and key < anchor - window:
        return False
    if key >= anchor and config.causal[layer] and key > query:
        return False
    size = config.windows[layer]
    if size is None:
        return True
    if config.window_rule == "speculators":
        return key >= anchor - size
    return abs(query - key) < size if config.window_rule == "zlab" else abs(query - key) <= size


def naive_forward(
    drafter: BlockDrafter, features: Tensor, ids: list[int], embed: nn.Module, window: int | None = None
) -> Tensor:
    """Return the outputs [rows, hidden] of a block whose anchor comes after ``features`` [anchor, ..]."""
    config, anchor = drafter.config, features.shape[0]
    hidden = embed(torch.tensor(ids))
    context = _norm(features @ drafter.fc.weight.T, drafter.hidden_norm)
    for index, layer in enumerate(drafter.layers):
        s = _norm(hidden, layer.input_layernorm)
        before = s
        if config.convolution is not None:
            s = convolve(layer.attention_conv, s, before, 0)
        output = _attention(drafter, index, s, context, anchor, window) @ layer.o_proj.weight.T
        hidden = hidden + (
            convolve(layer.attention_conv, output, before, 1) if config.convolution else output
        )
        s = before = _norm(hidden, layer.post_attention_layernorm)
        if config.convolution is not None:
            s = convolve(layer.mlp_conv, s, before, 0)
        mlp = layer.mlp
        output = (
            nn.functional.silu(s @ mlp.gate_proj.weight.T) * (s @ mlp.up_proj.weight.T)
        ) @ mlp.down_proj.weight.T
        hidden = hidden + (convolve(layer.mlp_conv, output, before, 1) if config.convolution else output)
    return _norm(hidden, drafter.norm)


def _norm(x: Tensor, norm: Any) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def _turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Turn heads [rows, heads, head_dim] by the rows' positions, a head's first half against its second."""
    half = x.shape[-1] // 2
    angle = (positions[:, None] / theta ** (torch.arange(half) * 2 / x.shape[-1]))[:, None]
    left, right = x[..., :half], x[..., half:]
    return torch.cat(
        [left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1
    )


def _attention(
    drafter: BlockDrafter, index: int, s: Tensor, context: Tensor, anchor: int, window: int | None
) -> Tensor:
    config, layer, shape = drafter.config, drafter.layers[index], drafter.config.layer
    width, group = shape.kv_heads * shape.head_dim, shape.heads // shape.kv_heads
    fused = drafter.key_value.weight[2 * width * index : 2 * width * (index + 1)]
    rows = torch.cat([context, s])  # position p is row p
    positions = torch.arange(len(rows))
    keys = (rows @ fused[:width].T).view(len(rows), shape.kv_heads, -1)
    keys = _turn(_norm(keys, layer.k_norm), positions, shape.rope.theta).repeat_interleave(group, dim=1)
    values = (rows @ fused[width:].T).view(len(rows), shape.kv_heads, -1).repeat_interleave(group, dim=1)
    queries = (s @ layer.q_proj.weight.T).view(len(s), shape.heads, -1)
    queries = _turn(_norm(queries, layer.q_norm), positions[anchor:], shape.rope.theta)
    out = torch.zeros_like(queries)
    for row in range(len(s)):
        seen = [key for key in range(len(rows)) if visible(config, index, anchor + row, key, anchor, window)]
        scores = torch.einsum("hd,khd->hk", queries[row], keys[seen]) / math.sqrt(shape.head_dim)
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen])
    return out.flatten(1)


def convolve(convolution: Any, x: Tensor, predicted_from: Tensor, side: int) -> Tensor:
    """Mix the rows [rows, hidden] of one block, one row and one tap at a time."""
    taps, group = convolution.taps, convolution.group
    dynamic = (predicted_from @ convolution.kernel_projection.weight.T).view(len(x), 2, taps, -1)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(taps):
            if row - tap >= 0:
                kernel = convolution.base_kernel[side, tap] + dynamic[row, side, tap].repeat_interleave(group)
                out[row] += kernel * x[row - tap]
    return out
