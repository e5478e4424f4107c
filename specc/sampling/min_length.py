"""``min_length``: no end of text before the sequence, prompt included, has so many tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.history import ban
from specc.sampling.validate import whole
from specc.sampling.warper import Column, SamplingContext


@dataclass(frozen=True)
class MinLength:
    """Bans every end-of-text id in the rows that come too early."""

    name: str = "min_length"
    is_sampling: bool = False
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.int64, 0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        count = whole(self.name, value, "a non-negative integer")
        return {self.name: torch.tensor(count)} if count and eos else None

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        early = context.position < context.settings[self.name][:, None]
        return ban(logits, context.eos, early)
