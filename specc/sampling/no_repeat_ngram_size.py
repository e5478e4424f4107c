"""``no_repeat_ngram_size``: ban tokens that would complete an n-gram the history already holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.errors import UnsupportedError
from specc.sampling.validate import whole
from specc.sampling.warper import Column, SamplingContext, per_slot

_LONGEST = 8  # the bound: each further token is one more comparison of every history position


@dataclass(frozen=True)
class NoRepeatNgramSize:
    """Compares the end of each row's history with every place in it; the size is data, up to eight."""

    name: str = "no_repeat_ngram_size"
    is_sampling: bool = False
    bucket: tuple[int, ...] = ()

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {self.name: Column((), torch.int64, 0)}

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        size = whole(self.name, value, "a non-negative integer")
        if size > _LONGEST:
            raise UnsupportedError(f"{self.name}={size}", [f"n-grams have at most {_LONGEST} tokens here"])
        return {self.name: torch.tensor(size)} if size else None

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        size = per_slot(context, self.name)
        history = context.history
        end = torch.arange(history.shape[1], device=history.device)  # position of the n-gram's last token
        inside = (end < context.position[..., None]) & (end >= size - 1)  # [slots, rows, positions]
        repeated = (size > 0) & inside
        suffix = context.last(_LONGEST - 1)
        for back in range(1, _LONGEST):
            before = history.roll(back, 1)[:, None]  # wraps only where `end` is below the size
            repeated = repeated & ((before == suffix[..., -back, None]) | (back >= size))
        banned = torch.where(repeated, float("-inf"), 0.0)
        where = history.clamp(0, logits.shape[2] - 1)[:, None].expand_as(banned)
        known = (history < logits.shape[2])[:, None]
        # Adding -inf any number of times, or 0, is the same in any order.
        return logits.scatter_add(2, where, torch.where(known, banned, 0.0))
