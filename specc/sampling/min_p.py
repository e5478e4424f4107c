"""``min_p``: keep ids at least ``min_p`` times as probable as the most probable one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.validate import real
from specc.sampling.warper import Column, SamplingContext, per_slot


@dataclass(frozen=True)
class MinP:
    """The most probable id always stays."""

    name: str = "min_p"
    is_sampling: bool = True
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.float32, 0.0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        share = real(self.name, value, "a number from 0 to 1", 0.0, 1.0)
        return {self.name: torch.tensor(share)} if share else None

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        probs = logits.softmax(-1)
        floor = per_slot(context, self.name) * probs.amax(-1, keepdim=True)
        return logits.masked_fill(probs < floor, float("-inf"))
