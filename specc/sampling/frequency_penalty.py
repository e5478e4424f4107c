"""``frequency_penalty``: lower logits by how often the text holds the id. Not a transformers setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.history import change_by_count
from specc.sampling.validate import real
from specc.sampling.warper import Column, SamplingContext, per_slot


@dataclass(frozen=True)
class FrequencyPenalty:
    """Subtracts in proportion to how often the generated text holds the id; the prompt does not count."""

    name: str = "frequency_penalty"
    is_sampling: bool = False
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.float32, 0.0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        penalty = real(self.name, value, "a number from -2 to 2", -2.0, 2.0)
        return {self.name: torch.tensor(penalty)} if penalty else None

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        penalty = per_slot(context, self.name)

        def change(scores: Tensor, count: Tensor) -> Tensor:
            return scores - penalty * count

        return change_by_count(logits, context, context.prompt_length, change)
