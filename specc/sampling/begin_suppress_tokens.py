"""``begin_suppress_tokens``: the first generated token is none of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.sampling.history import ban
from specc.sampling.validate import pad_ids, token_ids
from specc.sampling.warper import Column, SamplingContext


@dataclass(frozen=True)
class BeginSuppressTokens:
    """Ids outside the vocabulary cannot be emitted anyway and are left out."""

    name: str = "begin_suppress_tokens"
    is_sampling: bool = False
    bucket: tuple[int, ...] = (64,)

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column(bucket, torch.int64, -1)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        ids = [item for item in dict.fromkeys(token_ids(self.name, value, None)) if item < vocab]
        return {self.name: pad_ids(ids, self.bucket[0])} if ids else None

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        return ban(logits, context.settings[self.name], context.position == context.prompt_length[:, None])
