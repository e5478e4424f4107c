"""An MTP module: the target's own kind of decoder layer behind two norms and a projection (methods.md 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from specc.errors import InvariantError


class CacheSizes(Protocol):
    """The K/V of a layer, as `specc.models.attention.CacheShape` has them."""

    @property
    def heads(self) -> int: ...
    @property
    def key_size(self) -> int: ...
    @property
    def value_size(self) -> int: ...


@dataclass(frozen=True)
class MtpConfig:
    """What differs between families, after their names are normalised."""

    hidden: int
    vocab: int
    modules: int = 1  # how many the checkpoint has; only the first is run
    embed_first: bool = True  # the projection reads [embedding, hidden]; MiMo has [hidden, embedding]
    reads: Literal["pre", "post"] = "post"  # the target's last state before or after its final norm (3.4)
    carry: Literal["pre", "post"] = (
        "post"  # what a chained step reads: the output before or after norm_out (3.2)
    )
    own_embed: bool = False
    own_head: bool = False
    max_position: int | None = None


class MtpDrafter(nn.Module):
    """One MTP module under normalised names; ``layer`` is a `specc.models.decoder_layer.DecoderLayer`.

    ``target_norm`` is the target's final norm, when the module reads states after it; a checkpoint without
    the target's weights leaves it to `attach`.
    """

    target_ids: None = None  # drafts over the target's own vocabulary
    target_norm: nn.Module | None

    def __init__(
        self,
        config: MtpConfig,
        layer: Any,
        norms: tuple[nn.Module, nn.Module, nn.Module],
        target_norm: nn.Module | None,
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.norm_embed, self.norm_hidden, self.norm_out = norms
        self.target_norm = target_norm
        self.project = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        if config.own_embed:
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)

    @property
    def cache(self) -> CacheSizes:
        sizes: CacheSizes = self.layer.cache
        return sizes

    @property
    def dtype(self) -> torch.dtype:
        return self.project.weight.dtype

    @property
    def needs_target_norm(self) -> bool:
        """Whether `attach` must be called before the module can run."""
        return self.config.reads == "post" and self.target_norm is None

    def attach(self, target_norm: nn.Module) -> None:
        """Take the loaded target's final norm, shared with it."""
        if self.config.reads == "post":
            self.target_norm = target_norm

    def embed(self, ids: Tensor, target_embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [.., hidden] of ids; ids nobody reads may be anything, so they are clamped."""
        ids = ids.clamp(0, self.config.vocab - 1)
        return self.embed_tokens(ids) if self.config.own_embed else target_embed(ids).to(self.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Return what a row reads of the target's last state [.., hidden], given before the final norm."""
        features = features.to(self.dtype)
        if self.config.reads == "pre":
            return features
        if self.target_norm is None:
            raise InvariantError("the target's final norm was never attached to the MTP module")
        normed: Tensor = self.target_norm(features)
        return normed

    def step(self, feature: Tensor, embedding: Tensor, position: Tensor, **rows: Tensor) -> Tensor:
        """Return the output [rows, hidden], before ``norm_out``, of rows (feature t, embedded token t + 1).

        ``rows``: slot, cache_row, first, key_cache and value_cache, as the layer takes them.
        """
        halves = [self.norm_embed(embedding), self.norm_hidden(feature)]
        mixed = torch.cat(halves if self.config.embed_first else halves[::-1], dim=-1)
        output: Tensor = self.layer(self.project(mixed), position, **rows)
        return output

    def carried(self, output: Tensor) -> Tensor:
        """Return what the next chained step reads in place of a true feature."""
        return self.norm_out(output) if self.config.carry == "post" else output

    def head(self, output: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits [.., vocab] of outputs of `step`."""
        normed = self.norm_out(output)
        return self.lm_head(normed) if self.config.own_head else target_head(normed)
