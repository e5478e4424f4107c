"""DFlash: draft a whole block in one pass, each position on its own (methods.md 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec
from specc.drafters.block import BlockDrafter
from specc.methods.block import cache_specs, observe_features, reject_pair, run_block


@dataclass(frozen=True)
class DFlash:
    """One pass over the block; row r drafts its own position, or the next one if the drafter says so.

    Attributes:
        draft_attention_window: Context positions before the anchor that the block may see; None = the
            drafter's.
    """

    name: str = "dflash"
    default_block: int = 15  # block 16 of the published z-lab drafters, less the anchor's row
    needs_drafter: bool = True
    history: int = 0
    draft_attention_window: int | None = None

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        return reject_pair(self.name, target, drafter, block, self.draft_attention_window)

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
        logits = drafter.head(hidden, context.head)
        for index in range(context.block):
            context.draw(logits[:, index], index, ids=drafter.target_ids)
        return context.draw.draft(valid=valid)
