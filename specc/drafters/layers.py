"""The pieces drafters are built of: norms, rotary embeddings, projections and a SwiGLU block.

Every module works on flat rows ([rows, hidden]); attention is left to the caller, because inference
goes through ``specc.ops.attend`` over caches and training through a mask over a sequence. Both use the
same projections, so a training block's numbers equal what inference computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters, by the keys of Hugging Face ``rope_parameters``."""

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    partial: float = 1.0  # share of the head that turns
    interleaved: bool = False  # pairs (0,1),(2,3).. instead of halves

    def inverse_frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """Return the inverse frequencies [turned / 2] and the factor on cos and sin."""
        turned = int(head_dim * self.partial)
        inverse = 1.0 / (
            self.theta ** (torch.arange(0, turned, 2, dtype=torch.float32, device="cpu") / turned)
        )
        if self.type == "linear":
            return inverse / self.factor, 1.0
        if self.type == "llama3":
            wavelength = 2 * math.pi / inverse
            low, high = (
                self.original_max_position / f for f in (self.low_freq_factor, self.high_freq_factor)
            )
            smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            mixed = (1 - smooth) * inverse / self.factor + smooth * inverse
            scaled = torch.where(wavelength > low, inverse / self.factor, inverse)
            return torch.where((wavelength <= low) & (wavelength >= high), mixed, scaled), 1.0
        if self.type == "yarn":
            return self._yarn(inverse, turned)
        return inverse, 1.0

    def _yarn(self, inverse: Tensor, turned: int) -> tuple[Tensor, float]:
        def dimension(rotations: float) -> float:
            ratio = self.original_max_position / (rotations * 2 * math.pi)
            return turned * math.log(ratio) / (2 * math.log(self.theta))

        low = max(math.floor(dimension(self.beta_fast)), 0)
        high = min(math.ceil(dimension(self.beta_slow)), turned - 1)
        ramp = (
            (torch.arange(turned // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
        ).clamp(0, 1)
        mixed = inverse / self.factor * ramp + inverse * (1 - ramp)
        scale = self.attention_factor
        if scale is None:
            scale = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return mixed, scale


@dataclass(frozen=True)
class LayerConfig:
    """Shape and options of one drafter decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    input_width: int | None = None  # width q/k/v read; None = hidden (EAGLE-3 layer 0 reads 2 * hidden)
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Rotary(nn.Module):
    """Turn [.., heads, head_dim] by positions [..]."""

    inverse: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        inverse, self.factor = rope.inverse_frequencies(head_dim)
        self.register_buffer("inverse", inverse, persistent=False)
        self.interleaved = rope.interleaved

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        angle = position[..., None].float() * self.inverse.float()
        cos = (angle.cos() * self.factor).to(x.dtype)[..., None, :]
        sin = (angle.sin() * self.factor).to(x.dtype)[..., None, :]
        turned = 2 * self.inverse.shape[0]
        head, rest = x[..., :turned], x[..., turned:]
        if self.interleaved:
            even, odd = head[..., 0::2], head[..., 1::2]
            head = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
        else:
            left, right = head.chunk(2, dim=-1)
            head = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        return torch.cat([head, rest], dim=-1) if rest.shape[-1] else head


class Attention(nn.Module):
    """The projections of an attention layer, without the attention itself."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        width, bias = config.input_width or config.hidden, config.attention_bias
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.eps)
            self.k_norm = RMSNorm(config.head_dim, config.eps)
        self.rotary = Rotary(config.rope, config.head_dim)

    def query(self, x: Tensor, position: Tensor) -> Tensor:
        """Return turned queries [.., heads, head_dim] of x [.., width]."""
        query = self.q_proj(x).unflatten(-1, (self.config.heads, self.config.head_dim))
        if self.config.qk_norm:
            query = self.q_norm(query)
        out: Tensor = self.rotary(query, position)
        return out

    def key_value(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return turned keys and values, each [.., kv_heads, head_dim]."""
        shape = (self.config.kv_heads, self.config.head_dim)
        key, value = self.k_proj(x).unflatten(-1, shape), self.v_proj(x).unflatten(-1, shape)
        if self.config.qk_norm:
            key = self.k_norm(key)
        return self.rotary(key, position), value

    def output(self, attended: Tensor) -> Tensor:
        """Return [.., hidden] of attended values [.., heads, head_dim]."""
        out: Tensor = self.o_proj(attended.flatten(-2))
        return out


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=config.mlp_bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gated = (
            nn.functional.silu(gate)
            if self.activation == "silu"
            else nn.functional.gelu(gate, approximate="tanh")
        )
        out: Tensor = self.down_proj(gated * self.up_proj(x))
        return out
