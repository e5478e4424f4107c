"""DSpark: a DFlash block whose logits are corrected by the tokens drafted so far (methods.md 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec
from specc.drafters.block import BlockDrafter
from specc.methods.block import block_config, cache_specs, observe_features, reject_pair, run_block


@dataclass(frozen=True)
class DSpark:
    """One pass over the block, then K small steps: logits of row r plus a bias that the draft before r gives.

    Attributes:
        candidates: Correct and draw from only the C likeliest base logits of each row; None = all. What is
            drawn from has those C tokens alone, so any C is lossless.
        confidence_threshold: Drop the drafts from the first one on whose confidence is below this probability
            (for a batch of one; a batch shares its rows by `specc`'s budget instead). The confidence of a
            draft reads only tokens before it, so dropping by it changes no distribution.
        draft_attention_window: Context positions before the anchor that the block may see; None = the
            drafter's.
    """

    name: str = "dspark"
    default_block: int = 7  # block 7 of DeepSpec's released dspark_qwen3_*_block7
    needs_drafter: bool = True
    history: int = 0
    candidates: int | None = None
    confidence_threshold: float | None = None
    draft_attention_window: int | None = None

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        reasons = [*reject_pair(self.name, target, drafter, block, self.draft_attention_window)]
        config = block_config(drafter) if drafter is not None else None
        if self.candidates is not None and self.candidates < 1:
            reasons.append(f"candidates is {self.candidates}; at least 1, or None for the whole vocabulary")
        if config is not None and self.candidates is not None and self.candidates > config.draft_vocab:
            reasons.append(
                f"candidates is {self.candidates}, the draft vocabulary has {config.draft_vocab} tokens"
            )
        threshold = self.confidence_threshold
        if threshold is not None and not 0.0 < threshold < 1.0:
            reasons.append(f"confidence_threshold is {threshold}; a probability between 0 and 1")
        if threshold is not None and config is not None and config.confidence is None:
            reasons.append("confidence_threshold needs a confidence head, and this drafter has none")
        return tuple(reasons)

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        return drafter.block if drafter is not None else None

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        assert drafter is not None, "reject() asks for a drafter first"
        return drafter.taps

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        return cache_specs(drafter, slots, capacity)

    def observe(self, context: MethodContext, rows: Rows) -> None:
        observe_features(context, rows)

    def draft(self, context: MethodContext) -> Draft:
        drafter: BlockDrafter = context.drafter
        hidden, valid = run_block(context, self.draft_attention_window)
        confidence = self._walk(context, drafter, hidden, drafter.head(hidden, context.head))
        if self.confidence_threshold is not None and confidence is not None:
            threshold = math.log(self.confidence_threshold / (1 - self.confidence_threshold))
            valid = valid & ((confidence >= threshold).cumprod(dim=1) > 0)
        return context.draw.draft(confidence=confidence, valid=valid)

    def _walk(
        self, context: MethodContext, drafter: BlockDrafter, hidden: Tensor, base: Tensor
    ) -> Tensor | None:
        """Draw the block left to right from corrected logits; return the confidence logits [slots, block]."""
        config = drafter.config
        candidates: Tensor | None = None
        if self.candidates is not None:
            base, candidates = base.topk(self.candidates, dim=-1)  # [slots, block, C]
        previous, state = context.anchor, None
        embedded: Tensor | None = None
        confidence = []
        for index in range(context.block):
            row, logits = hidden[:, index], base[:, index]
            allowed = candidates[:, index] if candidates is not None else None
            if config.markov is not None:
                embedded = drafter.markov_head.look_up(previous)
                state = drafter.markov_head.start(embedded) if state is None else state
                latent, state = drafter.markov_head.latent(row, embedded, state)
                logits = logits.float() + drafter.markov_head.bias(latent, allowed).float()
            if config.confidence is not None:
                logit = drafter.confidence_head(row, embedded).float()
                calibrated = config.confidence.temperatures
                confidence.append(logit if calibrated is None else logit / calibrated[index])
            previous = context.draw(logits, index, ids=_name(drafter, allowed))
        return torch.stack(confidence, dim=1) if confidence else None


def _name(drafter: BlockDrafter, candidates: Tensor | None) -> Tensor | None:
    """Return the target ids of draft ids [slots, C], or of the whole draft vocabulary."""
    if candidates is None:
        return drafter.target_ids
    return candidates if drafter.target_ids is None else drafter.target_ids[candidates]
