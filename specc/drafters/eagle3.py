"""The EAGLE-3 drafter: taps fused into one feature, a layer that reads [embedding, feature], a small head.

One set of functions serves inference (flat rows, attention over caches) and training (sequences,
attention through a mask): the caller gives the attention, everything else is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from specc.drafters.layers import Attention, GatedMLP, LayerConfig, RMSNorm

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, query, key, value) -> attended; each [.., heads, head_dim], query and key turned by rope."""


@dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 drafter is made of, after the names and numberings of its layout are normalised.

    ``layer`` describes a plain layer; the first one reads 2 * hidden, which the module sets itself.
    """

    layer: LayerConfig
    target_hidden: int
    taps: int  # how many target states are concatenated
    vocab: int  # target ids it can embed
    draft_vocab: int  # rows of its head
    layers: int = 1
    uses_fc: bool = True  # explicit: a width does not tell, because taps * target_hidden may equal hidden
    fc_bias: bool = False
    norm_before_residual: bool = False  # the residual starts from hidden_norm(feature), not from the feature
    norm_before_fc: bool = False  # one norm over the concatenated taps
    fc_norm: bool = False  # one norm per tap; never together with norm_before_fc
    carry: Literal["pre", "post"] = "pre"  # what the next draft step reads: before or after ``norm``
    own_embed: bool = False
    own_head: bool = True
    maps_ids: bool = False  # the buffer ``target_ids`` names candidates, else c is target id c
    max_position: int | None = None

    @property
    def hidden(self) -> int:
        return self.layer.hidden


class Eagle3Layer(nn.Module):
    """One decoder layer; the first of a drafter reads the embedding beside the feature."""

    def __init__(self, config: Eagle3Config, is_first: bool) -> None:
        super().__init__()
        layer = config.layer
        self.is_first, self.norm_before_residual = is_first, config.norm_before_residual
        width = 2 * layer.hidden if is_first else layer.hidden
        self.input_layernorm = RMSNorm(layer.hidden, layer.eps)
        if is_first:
            self.hidden_norm = RMSNorm(layer.hidden, layer.eps)
        self.self_attn = Attention(replace(layer, input_width=width))
        self.post_attention_layernorm = RMSNorm(layer.hidden, layer.eps)
        self.mlp = GatedMLP(layer)

    def forward(
        self, feature: Tensor, embedding: Tensor, position: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        residual = feature
        if self.is_first:
            normed = self.hidden_norm(feature)
            residual = normed if self.norm_before_residual else feature
            mixed = torch.cat([self.input_layernorm(embedding), normed], dim=-1)  # embedding first
        else:
            mixed = self.input_layernorm(feature)
        key, value = self.self_attn.key_value(mixed, position)
        attended = attend(self.self_attn.query(mixed, position), key, value)
        residual = residual + self.self_attn.output(attended)
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


class Eagle3Drafter(nn.Module):
    """An EAGLE-3 drafter under normalised parameter names."""

    target_ids: Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden, config.layer.eps
        wide = config.taps * config.target_hidden
        if config.norm_before_fc:
            self.input_norm = RMSNorm(wide, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden, eps) for _ in range(config.taps))
        if config.uses_fc:
            self.fc = nn.Linear(wide, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(Eagle3Layer(config, index == 0) for index in range(config.layers))
        self.norm = RMSNorm(hidden, eps)
        if config.own_embed:
            self.embed_tokens = nn.Embedding(config.vocab, hidden)
        if config.own_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab, bias=False)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab) if config.maps_ids else None)

    def embed(self, ids: Tensor, target_embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [.., hidden] of target ids; ids nobody reads may be anything, so they are clamped."""
        ids = ids.clamp(0, self.config.vocab - 1)
        return (
            self.embed_tokens(ids) if self.config.own_embed else target_embed(ids).to(self.norm.weight.dtype)
        )

    def fuse(self, features: Tensor) -> Tensor:
        """Return the feature [.., hidden] of concatenated taps [.., taps * target_hidden]."""
        features = features.to(self.norm.weight.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = torch.split(features, self.config.target_hidden, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features) if self.config.uses_fc else features

    def step(self, feature: Tensor, embedding: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Return the output [.., hidden], before ``norm``, of rows (feature t, embedding of token t + 1).

        Args:
            feature: [.., hidden], from `fuse`, or from `carried` in a chained step.
            embedding: [.., hidden] of the token after the feature's position.
            position: int64 [..], the feature's position.
            attend: Attention of one layer; see `Attend`.
        """
        for index, layer in enumerate(self.layers):
            feature = layer(feature, embedding, position, lambda q, k, v, index=index: attend(index, q, k, v))
        return feature

    def carried(self, output: Tensor) -> Tensor:
        """Return what the next chained step reads in place of a true feature."""
        return self.norm(output) if self.config.carry == "post" else output

    def head(self, output: Tensor, target_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return logits over the draft vocabulary [.., draft_vocab] of outputs of `step`."""
        normed = self.norm(output)
        if self.config.own_head:
            logits: Tensor = self.lm_head(normed)
            return logits
        assert target_head is not None, "a drafter without a head needs the target's"
        return target_head(normed)
