"""``epsilon_cutoff``: keep ids at least this probable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.validate import real
from specc.sampling.warper import Column, SamplingContext, per_slot


@dataclass(frozen=True)
class EpsilonCutoff:
    """The most probable ids stay in any case (Hewitt et al. 2022)."""

    name: str = "epsilon_cutoff"
    is_sampling: bool = True
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.float32, 0.0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        floor = real(self.name, value, "a number from 0 to below 1", 0.0, 1.0, open_high=True)
        return {self.name: torch.tensor(floor)} if floor else None

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        removed = logits.softmax(-1) < per_slot(context, self.name)
        removed = removed & (logits < logits.amax(-1, keepdim=True))
        return logits.masked_fill(removed, float("-inf"))
