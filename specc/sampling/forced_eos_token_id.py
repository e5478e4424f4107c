"""``forced_eos_token_id``: the last token that ``max_length`` leaves room for is one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from specc.errors import InputError
from specc.sampling.history import id_mask
from specc.sampling.validate import pad_ids, token_ids
from specc.sampling.warper import Column, SamplingContext


@dataclass(frozen=True)
class ForcedEosTokenId:
    """In that row the listed ids get logit 0 and all others -inf, as in transformers."""

    name: str = "forced_eos_token_id"
    is_sampling: bool = False
    bucket: tuple[int, ...] = (8,)

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column(bucket, torch.int64, -1)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        ids = token_ids(self.name, [value] if isinstance(value, Integral) else value, vocab, value)
        if not ids:
            raise InputError(self.name, value, "at least one token id")
        return {self.name: pad_ids(ids, self.bucket[0])}

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        ids = context.settings[self.name]
        forced = (context.position == context.max_length[:, None] - 1) & (ids >= 0).any(1, keepdim=True)
        only = torch.where(id_mask(ids, logits.shape[2]), 0.0, float("-inf"))
        return torch.where(forced[..., None], only[:, None], logits)
