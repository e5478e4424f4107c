"""No drafting: one row per slot and step. The baseline, and the fallback of every method (block 0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec


@dataclass(frozen=True)
class Plain:
    """Decode one token per step."""

    name: str = "plain"
    default_block: int = 0
    needs_drafter: bool = False
    history: int = 0

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        return (f"plain decodes one token per step; block must be 0, not {block}",) if block else ()

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        return 0

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        return ()

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        return {}

    def draft(self, context: MethodContext) -> Draft:
        # Asked only where plain decoding runs as many rows as a speculative step, to be bit-identical to it.
        return Draft(context.length.new_full((context.slots, context.block), -1))

    def observe(self, context: MethodContext, rows: Rows) -> None:
        return None
