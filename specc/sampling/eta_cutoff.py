"""``eta_cutoff``: keep ids above a floor that falls as the entropy rises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.validate import real
from specc.sampling.warper import Column, SamplingContext, per_slot


@dataclass(frozen=True)
class EtaCutoff:
    """The floor is min(eta, sqrt(eta) * exp(-entropy)); the most probable ids stay (Hewitt et al. 2022)."""

    name: str = "eta_cutoff"
    is_sampling: bool = True
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.float32, 0.0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        eta = real(self.name, value, "a number from 0 to below 1", 0.0, 1.0, open_high=True)
        return {self.name: torch.tensor(eta)} if eta else None

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        probs = logits.softmax(-1)
        logs = logits.log_softmax(-1).clamp(min=torch.finfo(logits.dtype).min)  # 0 times -inf is NaN
        entropy = -(logs * probs).sum(-1, keepdim=True)
        eta = per_slot(context, self.name)
        removed = probs < torch.minimum(eta, eta.sqrt() * torch.exp(-entropy))
        removed = removed & (logits < logits.amax(-1, keepdim=True))
        return logits.masked_fill(removed, float("-inf"))
