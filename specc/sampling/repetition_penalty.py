"""``repetition_penalty``: shrink the logits of ids in the prompt or the text so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.history import change_by_count
from specc.sampling.validate import real
from specc.sampling.warper import Column, SamplingContext, per_slot


@dataclass(frozen=True)
class RepetitionPenalty:
    """Negative logits are multiplied by the penalty, others divided (Keskar et al. 2019)."""

    name: str = "repetition_penalty"
    is_sampling: bool = False
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.float32, 1.0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        penalty = real(self.name, value, "a number above 0", 0.0, open_low=True)
        return None if penalty == 1.0 else {self.name: torch.tensor(penalty)}

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        penalty = per_slot(context, self.name)

        def change(scores: Tensor, count: Tensor) -> Tensor:
            shrunk = torch.where(scores < 0, scores * penalty, scores / penalty)
            return torch.where(count > 0, shrunk, scores)

        return change_by_count(logits, context, None, change)
