"""``bad_words_ids``: ban the token that would complete a listed sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.errors import InputError
from specc.sampling.history import completes
from specc.sampling.validate import pad_sequences, token_ids
from specc.sampling.warper import Column, SamplingContext


@dataclass(frozen=True)
class BadWordsIds:
    """A sequence that is one end-of-text id is left out, as in transformers."""

    name: str = "bad_words_ids"
    is_sampling: bool = False
    bucket: tuple[int, ...] = (64, 8)

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column(bucket, torch.int64, -1)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        if not isinstance(value, list) or not value or any(not isinstance(item, list) for item in value):
            raise InputError(self.name, value, "a non-empty list of lists of token ids")
        sequences = dict.fromkeys(token_ids(self.name, item, vocab, value) for item in value)
        kept = [ids for ids in sequences if ids and not (len(ids) == 1 and ids[0] in eos)]
        return {self.name: pad_sequences(kept, self.bucket)} if kept else None

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        ids = context.settings[self.name]
        banned = torch.where(completes(ids, context), float("-inf"), 0.0)
        where = ids[..., -1].clamp(min=0)[:, None].expand_as(banned)
        # Adding -inf any number of times, or 0, is the same in any order.
        return logits.scatter_add(2, where, banned)
