"""DFlash 2: convolved block rows, and a walk over each row's likeliest tokens (methods.md 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec
from specc.drafters.block import BlockDrafter
from specc.methods.block import block_config, cache_specs, observe_features, reject_pair, run_block


@dataclass(frozen=True)
class DFlash2:
    """One pass over the block, then K small steps over the C candidates of each row (C is the drafter's).

    What a draft is drawn from has those C tokens alone.

    Attributes:
        draft_attention_window: Context positions before the anchor that the block may see; None = the
            drafter's.
    """

    name: str = "dflash2"
    default_block: int = 7  # block 8 of the published Qwen3.8-27B drafter, less the anchor's row
    needs_drafter: bool = True
    history: int = 0
    draft_attention_window: int | None = None

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        reasons = [*reject_pair(self.name, target, drafter, block, self.draft_attention_window)]
        config = block_config(drafter) if drafter is not None else None
        if config is not None and config.selector is None:
            reasons.append("the drafter has no candidate selector; without one it is a dflash drafter")
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
        selector = drafter.candidate_selector
        hidden, valid = run_block(context, self.draft_attention_window)
        ids, unary = selector.candidates(drafter.head(hidden, context.head))  # [slots, block, C]
        previous = context.anchor
        for index in range(context.block):
            scores = selector.score(hidden[:, index], ids[:, index], unary[:, index], previous)
            previous = context.draw(scores, index, ids=ids[:, index])
        return context.draw.draft(valid=valid)
