"""N-gram drafting (prompt lookup): copy what followed the longest earlier match of the newest tokens.

Runs on the device: it reads the token history, so it needs no weights and no context of its own. Its
proposals are point masses. Source: methods.md 7; the matching rule is that of transformers' prompt lookup
(longest n-gram first), with the most recent match by default instead of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec


@dataclass(frozen=True)
class Ngram:
    """Propose the tokens after an earlier occurrence of the last ``max_ngram`` .. 1 tokens."""

    max_ngram: int = 3
    prefer: Literal["recent", "first"] = "recent"
    name: str = "ngram"
    default_block: int = 8  # transformers' prompt_lookup examples use 10; a miss costs rows, not passes
    needs_drafter: bool = False
    history: int = 0

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        reasons = []
        if self.max_ngram < 1:
            reasons.append(f"max_ngram must be at least 1, not {self.max_ngram}")
        if drafter is not None:
            reasons.append(
                f"ngram drafts from the tokens themselves and takes no drafter; got {drafter.name}"
            )
        return tuple(reasons)

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        return None

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        return ()

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        return {}

    def draft(self, context: MethodContext) -> Draft:
        tokens, found = lookup(context.tokens, context.length, context.block, self.max_ngram, self.prefer)
        return Draft(torch.where(found & context.running[:, None], tokens, -1))

    def observe(self, context: MethodContext, rows: Rows) -> None:
        return None


def lookup(tokens: Tensor, length: Tensor, block: int, max_ngram: int, prefer: str) -> tuple[Tensor, Tensor]:
    """Find what followed the longest earlier match of each history's end.

    Args:
        tokens: int64 [slots, columns], the history is ``tokens[:, :length]``.
        length: int64 [slots].

    Returns:
        The continuation int64 [slots, block] and which of it exists, bool [slots, block].
    """
    columns = tokens.shape[1]
    index = torch.arange(columns, device=tokens.device)
    # matched[s, e] = how many tokens ending at e equal the history's end, up to max_ngram.
    matched = torch.zeros_like(tokens)
    running = torch.ones_like(tokens, dtype=torch.bool)
    for back in range(max_ngram):
        suffix = tokens.gather(1, (length - 1 - back).clamp(min=0)[:, None])
        earlier = torch.roll(tokens, back, dims=1)
        running = running & (earlier == suffix) & (index >= back) & (length[:, None] - 1 - back >= 0)
        matched = matched + running.to(matched.dtype)
    has_next = index < length[:, None] - 1
    order = index if prefer == "recent" else columns - 1 - index
    score = torch.where(has_next & (matched > 0), matched * columns + order, -1)
    best, end = score.max(dim=1)
    at = end[:, None] + 1 + torch.arange(block, device=tokens.device)
    exists = (best[:, None] >= 0) & (at < length[:, None])
    return tokens.gather(1, at.clamp(max=columns - 1)), exists
