"""``top_k``: keep the k highest logits, and all that equal the kth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.cut import kth_largest
from specc.sampling.validate import whole
from specc.sampling.warper import Column, SamplingContext, per_row


@dataclass(frozen=True)
class TopK:
    """0 keeps everything."""

    name: str = "top_k"
    is_sampling: bool = True
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.int64, 0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        count = whole(self.name, value, "a non-negative integer, 0 for no limit")
        return {self.name: torch.tensor(count)} if 0 < count < vocab else None

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        count = per_row(context, self.name)
        threshold = kth_largest(logits.flatten(0, 1), count).view(logits.shape[:2])
        return logits.masked_fill(logits < threshold[..., None], float("-inf"))
