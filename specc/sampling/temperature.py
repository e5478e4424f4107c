"""``temperature``: divide the logits; 0 is greedy. The column tells sampled slots from greedy ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.validate import real
from specc.sampling.warper import Column, SamplingContext, per_slot


@dataclass(frozen=True)
class Temperature:
    """The neutral value is 0: a slot without sampling settings is a greedy one."""

    name: str = "temperature"
    is_sampling: bool = True
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.float32, 0.0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        heat = 1.0 if value is None else real(self.name, value, "a finite number not below 0", 0.0)
        column = torch.tensor(heat)
        return {self.name: column} if column else None  # what float32 rounds to 0 is greedy, too

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        heat = per_slot(context, self.name)
        return logits / torch.where(heat == 0, 1.0, heat)
