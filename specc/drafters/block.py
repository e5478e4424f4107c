"""The drafter of the DFlash family: one pass over [anchor, mask, ...], target features as extra keys.

Target features enter every layer as keys and values only (methods.md 4.1), so a layer's context K/V depend on
nothing but ``context(features)`` and that layer's weights. They are therefore kept as ONE parameter of all
layers, ``key_value.weight`` [layers * 2 * kv width, hidden]: new rows cost one matrix product, a layer reads
its own slice of it as a view, and the weights exist once.

The same functions serve inference (attention over caches) and training (attention through a mask): the caller
gives the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from specc.drafters.convolution import ConvolutionConfig, GroupedConvolution
from specc.drafters.layers import GatedMLP, LayerConfig, RMSNorm, Rotary
from specc.drafters.markov import ConfidenceConfig, ConfidenceHead, MarkovConfig, make_markov
from specc.drafters.selector import CandidateSelector, SelectorConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, query, key, value) -> attended; each [.., heads, head_dim], query and key turned by rope."""

WindowRule = Literal["speculators", "zlab", "transformers"]


@dataclass(frozen=True)
class BlockConfig:
    """What a block drafter is made of, after the names and numberings of its layout are normalised.

    Attributes:
        block: Rows of the block it was trained with, the anchor included.
        sample_from_anchor: Whether row r predicts the token after its position, so that the anchor's row
            drafts too (DSpark); otherwise row r predicts its own position and the anchor's row drafts nothing
            (DFlash).
        causal: Per layer, whether a block row sees only itself and earlier block rows.
        windows: Per layer, the sliding window or None.
        window_rule: Whose reading of a window: they differ (see `BlockConfig.visible`).
        mask_embedding: Whether a tensor of its own replaces the embedding of the mask token.
    """

    layer: LayerConfig
    layers: int
    target_hidden: int
    taps: tuple[int, ...]  # each "after j layers", in concatenation order
    vocab: int  # target ids it can embed
    draft_vocab: int  # width of its logits
    mask_token: int
    block: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    window_rule: WindowRule = "zlab"
    sample_from_anchor: bool = False
    own_embed: bool = False
    own_head: bool = False
    maps_ids: bool = (
        False  # candidates are named by the buffer ``target_ids``, else candidate c is target id c
    )
    mask_embedding: bool = False
    embedding_scale: float = 1.0
    markov: MarkovConfig | None = None
    confidence: ConfidenceConfig | None = None
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None
    max_position: int | None = None

    @property
    def hidden(self) -> int:
        return self.layer.hidden

    @property
    def drafts(self) -> int:
        """Return the draft tokens of a whole block."""
        return self.block if self.sample_from_anchor else self.block - 1

    def rows(self, drafts: int) -> int:
        """Return the block rows it takes to draft that many tokens."""
        return drafts if self.sample_from_anchor else drafts + 1

    def visible(self, index: int, position: Tensor, anchor: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and last position that block rows see in layer ``index``.

        Args:
            index: The layer.
            position: int64 [..], the rows' positions.
            anchor: int64 [..], the position of each row's anchor; context is everything before it.
            end: int64 [..], the last position of each row's block.

        With a window W, speculators shows every row the context positions anchor - W .. anchor - 1 and does
        not limit the block; z-lab shows row q the positions k with |q - k| < W, transformers with |q - k| <=
        W.
        """
        window = self.windows[index]
        last = position if self.causal[index] else end
        if window is None:
            return torch.zeros_like(position), last
        if self.window_rule == "speculators":
            return (anchor - window).clamp(min=0), last
        reach = window if self.window_rule == "transformers" else window - 1
        return (position - reach).clamp(min=0), torch.minimum(last, position + reach)


class BlockLayer(nn.Module):
    """One decoder layer, without its key and value projections (see the module's docstring)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        layer = config.layer
        width = layer.heads * layer.head_dim
        self.layer = layer
        self.input_layernorm = RMSNorm(layer.hidden, layer.eps)
        self.q_proj = nn.Linear(layer.hidden, width, bias=layer.attention_bias)
        self.o_proj = nn.Linear(width, layer.hidden, bias=layer.attention_bias)
        if layer.qk_norm:
            self.q_norm = RMSNorm(layer.head_dim, layer.eps)
            self.k_norm = RMSNorm(layer.head_dim, layer.eps)
        self.post_attention_layernorm = RMSNorm(layer.hidden, layer.eps)
        self.mlp = GatedMLP(layer)
        if config.convolution is not None:
            self.attention_conv = GroupedConvolution(layer.hidden, config.convolution)
            self.mlp_conv = GroupedConvolution(layer.hidden, config.convolution)

    def key_value(self, projected: Tensor, position: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Return turned keys and values [.., kv_heads, head_dim] of projected rows [.., 2 * kv width]."""
        key, value = (
            torch.unflatten(half, -1, (self.layer.kv_heads, -1)) for half in projected.chunk(2, dim=-1)
        )
        if self.layer.qk_norm:
            key = self.k_norm(key)
        return rotary(key, position), value

    def query(self, x: Tensor, position: Tensor, rotary: Rotary) -> Tensor:
        """Return turned queries [.., heads, head_dim] of x [.., hidden]."""
        query = self.q_proj(x).unflatten(-1, (self.layer.heads, self.layer.head_dim))
        turned: Tensor = rotary(self.q_norm(query) if self.layer.qk_norm else query, position)
        return turned


class BlockDrafter(nn.Module):
    """A DFlash, DSpark or DFlash 2 drafter under normalised parameter names."""

    target_ids: Tensor | None

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        self.fc = nn.Linear(len(config.taps) * config.target_hidden, layer.hidden, bias=False)
        self.hidden_norm = RMSNorm(layer.hidden, layer.eps)
        width = config.layers * 2 * layer.kv_heads * layer.head_dim
        self.key_value = nn.Linear(layer.hidden, width, bias=layer.attention_bias)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(layer.hidden, layer.eps)
        self.rotary = Rotary(layer.rope, layer.head_dim)
        if config.own_embed:
            self.embed_tokens = nn.Embedding(config.vocab, layer.hidden)
        if config.mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(layer.hidden))
        if config.own_head:
            self.lm_head = nn.Linear(layer.hidden, config.draft_vocab, bias=False)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab) if config.maps_ids else None)
        if config.markov is not None:
            self.markov_head = make_markov(config.markov, config.vocab, config.draft_vocab, layer.hidden)
        if config.confidence is not None:
            rank = config.markov.rank if config.markov is not None else 0
            self.confidence_head = ConfidenceHead(config.confidence, layer.hidden, rank)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(config.selector, config.vocab, layer.hidden)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def blocks(self) -> list[BlockLayer]:
        """Return the layers under their own type."""
        return [cast(BlockLayer, layer) for layer in self.layers]

    def context(self, features: Tensor) -> Tensor:
        """Return the context rows [.., hidden] of concatenated taps [.., taps * target_hidden]."""
        rows: Tensor = self.hidden_norm(self.fc(features.to(self.dtype)))
        return rows

    def context_key_value(self, context: Tensor, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values [.., kv_heads, head_dim] of context rows, in one product."""
        projected = self.key_value(context).chunk(self.config.layers, dim=-1)
        return [
            layer.key_value(part, position, self.rotary)
            for layer, part in zip(self.blocks, projected, strict=True)
        ]

    def embed(self, ids: Tensor, target_embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [.., hidden] of target ids; ids nobody reads may be anything, so they are clamped."""
        ids = ids.clamp(0, self.config.vocab - 1)
        embedded = self.embed_tokens(ids) if self.config.own_embed else target_embed(ids).to(self.dtype)
        if self.config.embedding_scale != 1.0:
            embedded = embedded * self.config.embedding_scale
        if self.config.mask_embedding:
            embedded = torch.where((ids == self.config.mask_token)[..., None], self.mask_embedding, embedded)
        return embedded

    def forward(self, embedded: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Return the outputs, after the final norm, of whole blocks.

        Args:
            embedded: [.., rows, hidden] of block ids, row 0 the anchor.
            position: int64 [.., rows].
            attend: Attention of one layer over context and block; see `Attend`.
        """
        hidden = embedded
        for index, layer in enumerate(self.blocks):
            hidden = self._layer(index, layer, hidden, position, attend)
        normed: Tensor = self.norm(hidden)
        return normed

    def _layer(
        self, index: int, layer: BlockLayer, hidden: Tensor, position: Tensor, attend: Attend
    ) -> Tensor:
        convolved = self.config.convolution is not None
        normed = layer.input_layernorm(hidden)
        if convolved:
            kernels = layer.attention_conv.kernels(normed)
            normed = layer.attention_conv(normed, kernels, 0)
        key, value = layer.key_value(self._project(index, normed), position, self.rotary)
        attended = attend(index, layer.query(normed, position, self.rotary), key, value)
        output = layer.o_proj(attended.flatten(-2))
        hidden = hidden + (layer.attention_conv(output, kernels, 1) if convolved else output)
        normed = layer.post_attention_layernorm(hidden)
        if convolved:
            kernels = layer.mlp_conv.kernels(normed)
            normed = layer.mlp_conv(normed, kernels, 0)
        output = layer.mlp(normed)
        hidden = hidden + (layer.mlp_conv(output, kernels, 1) if convolved else output)
        return hidden

    def _project(self, index: int, x: Tensor) -> Tensor:
        """Project rows by one layer's slice of the fused key and value weights."""
        width = self.key_value.out_features // self.config.layers
        bias = self.key_value.bias
        part = slice(index * width, (index + 1) * width)
        return nn.functional.linear(x, self.key_value.weight[part], None if bias is None else bias[part])

    def head(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return logits over the draft vocabulary [.., draft_vocab] of outputs of `forward`."""
        if self.config.own_head:
            logits: Tensor = self.lm_head(hidden)
            return logits
        assert target_head is not None, "a drafter without a head needs the target's"
        return target_head(hidden)
