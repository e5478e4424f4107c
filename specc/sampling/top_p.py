"""``top_p``: keep the smallest set of most probable ids whose probability reaches p."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.cut import nucleus_cut
from specc.sampling.validate import real
from specc.sampling.warper import Column, SamplingContext, per_row


@dataclass(frozen=True)
class TopP:
    """Of equal logits at the edge the higher ids stay (Holtzman et al. 2020; ties as in transformers)."""

    name: str = "top_p"
    is_sampling: bool = True
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        # float64, because 1 - p is taken before it is rounded to float32.
        return {self.name: Column((), torch.float64, 1.0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        mass = real(self.name, value, "a number from 0 to 1", 0.0, 1.0)
        return None if mass == 1.0 else {self.name: torch.tensor(mass, dtype=torch.float64)}

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        mass = per_row(context, self.name)
        flat = logits.flatten(0, 1)
        threshold, first = nucleus_cut(flat, mass)
        index = torch.arange(logits.shape[2], device=logits.device)
        removed = (flat < threshold[:, None]) | ((flat == threshold[:, None]) & (index < first[:, None]))
        return flat.masked_fill(removed, float("-inf")).view(logits.shape)
