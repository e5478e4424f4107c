"""``typical_p``: keep the ids whose surprise is nearest the entropy until their probability reaches p."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.cut import typical_cut
from specc.sampling.validate import real
from specc.sampling.warper import Column, SamplingContext, per_row


@dataclass(frozen=True)
class TypicalP:
    """All ids as near as the last one taken stay (Meister et al. 2022; ties as in transformers)."""

    name: str = "typical_p"
    is_sampling: bool = True
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.float64, 1.0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        mass = real(self.name, value, "a number above 0, up to 1", 0.0, 1.0, open_low=True)
        return None if mass == 1.0 else {self.name: torch.tensor(mass, dtype=torch.float64)}

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        mass = per_row(context, self.name)
        flat = logits.flatten(0, 1)
        surprise = -flat.log_softmax(-1)
        entropy = (surprise * (-surprise).exp()).nansum(-1, keepdim=True)
        shift = (surprise - entropy).abs()
        removed = shift > typical_cut(shift, flat, mass)[:, None]
        return flat.masked_fill(removed, float("-inf")).view(logits.shape)
