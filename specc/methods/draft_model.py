"""Draft with a smaller causal LM of the same tokenizer, through the same rows machinery as the target.

The drafter's caches follow the target's: K/V of position t comes from token t. Its first pass re-reads the
token before the anchor, because after a fully accepted block that one token never went through the drafter
(methods.md 1.9); in every other case it rewrites the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec


@dataclass(frozen=True)
class DraftModel:
    """Sample ``block`` tokens one after another from a draft model."""

    name: str = "draft_model"
    default_block: int = 4  # methods.md 1; vLLM and TensorRT-LLM examples use 3 to 5
    needs_drafter: bool = True
    history: int = 0

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        if drafter is None:
            return ("draft_model needs a drafter: a causal LM with the target's tokenizer",)
        reasons = []
        shared = min(drafter.vocab, target.vocab)
        if target.tokenizer_vocab is not None and shared < target.tokenizer_vocab:
            reasons.append(
                f"the drafter scores {drafter.vocab} ids, fewer than the tokenizer's {target.tokenizer_vocab}"
            )
        if target.tokenizer_vocab is None and abs(drafter.vocab - target.vocab) > 0.05 * target.vocab:
            reasons.append(
                f"the drafter's vocabulary is {drafter.vocab}, the target's {target.vocab}: "
                "more than padding apart, and no tokenizer is there to compare"
            )
        return tuple(reasons)

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        return None

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        return ()

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        specs: Mapping[str, TensorSpec] = drafter.cache_specs(slots, capacity)
        return specs

    def draft(self, context: MethodContext) -> Draft:
        slot = torch.arange(context.slots, device=context.length.device)
        position = context.length - 1
        previous = context.tokens.gather(1, (position - 1).clamp(min=0)[:, None])[:, 0]
        token = context.anchor
        # Two rows per slot: the token before the anchor, then the anchor.
        logits = self._rows(
            context,
            torch.stack([previous, token], 1).flatten(),
            slot.repeat_interleave(2),
            torch.stack([position - 1, position], 1).flatten(),
            logit_rows=2 * slot + 1,
        )
        for index in range(context.block):
            if index:
                logits = self._rows(context, token, slot, position, logit_rows=slot)
            token = context.draw(logits, index, ids=self._ids(context, logits)).clamp(min=0)
            position = position + 1
        return context.draw.draft(valid=self._valid(context))

    def observe(self, context: MethodContext, rows: Rows) -> None:
        # Drafting has already put a slot's own rows through the drafter, and a slot that did not draft in its first
        # step reads its one row again in the next; what is left is prompt rows, and all rows of steps without drafts.
        drafted = context.slots * (context.block + 1) if context.block else 0
        if rows.token.shape[0] > drafted:
            limit = self._limit(context)
            cache_row = torch.where(rows.position < limit, rows.cache_row, context.capacity)[drafted:]
            position = rows.position.clamp(max=limit - 1)[drafted:]
            reach = rows.reach[drafted:] if rows.reach is not None else None
            token, slot = rows.token[drafted:], rows.slot[drafted:]
            context.drafter(token, slot, position, cache_row, reach, logit_rows=slot[:1] * 0)

    def _rows(
        self,
        context: MethodContext,
        token: torch.Tensor,
        slot: torch.Tensor,
        position: torch.Tensor,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        live = context.running[slot] & (position < self._limit(context))
        cache_row = context.cache_rows(position, live)
        clamped = position.clamp(min=0, max=min(context.capacity, self._limit(context)) - 1)
        logits: torch.Tensor = context.drafter(token, slot, clamped, cache_row, logit_rows=logit_rows)[
            "logits"
        ]
        return logits[:, : context.vocab]  # ids past the target's vocabulary are padding of the drafter's

    def _ids(self, context: MethodContext, logits: torch.Tensor) -> torch.Tensor | None:
        narrower = logits.shape[1] < context.vocab
        return torch.arange(logits.shape[1], device=logits.device) if narrower else None

    def _limit(self, context: MethodContext) -> int:
        return context.drafter_limit if context.drafter_limit is not None else context.capacity

    def _valid(self, context: MethodContext) -> torch.Tensor:
        """A draft is valid when the row it was drawn from lies inside the drafter's position table."""
        made_at = context.length[:, None] - 1 + torch.arange(context.block, device=context.length.device)
        return (made_at < self._limit(context)) & context.running[:, None]
