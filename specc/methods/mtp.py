"""MTP: draft with the multi-token-prediction module of the target's checkpoint (methods.md 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec
from specc.drafters.mtp import MtpConfig, MtpDrafter
from specc.methods.chain import Step, draft_chain, observe_chain


@dataclass(frozen=True)
class Mtp:
    """A chain of K drafts through one module; rows and state as in `methods.chain`.

    Attributes:
        draft_attention_window: Cache rows a drafted row may look back on; None = all. Rows of true
            features always see everything. There is no sink: a row reads one interval.
    """

    name: str = "mtp"
    default_block: int = (
        3  # the draft length of FastMTP's recipe, speculators' `speculative_tokens` for MTP (3.7)
    )
    needs_drafter: bool = True
    history: int = 0
    draft_attention_window: int | None = None

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        if drafter is None:
            return (
                "mtp needs the module's weights; give the folder of the target's own checkpoint as drafter",
            )
        reasons = []
        if drafter.method != self.name:
            reasons.append(f"the drafter {drafter.name} is made for {drafter.method}, not for {self.name}")
        if block < 1:
            reasons.append(f"block is {block}; mtp drafts at least 1 token (plain is method='plain')")
        modules = drafter.config.modules if isinstance(drafter.config, MtpConfig) else 1
        if modules > 1 and block > 1:
            reasons.append(
                f"the checkpoint has {modules} MTP modules, one per draft token; only the first is run: "
                f"block must be 1, not {block}"
            )
        if drafter.hidden != target.hidden:
            reasons.append(f"the module's hidden size is {drafter.hidden}, the target's {target.hidden}")
        if drafter.vocab != target.vocab:
            reasons.append(f"the module scores {drafter.vocab} ids, the target's head {target.vocab}")
        if self.draft_attention_window is not None and self.draft_attention_window < 1:
            reasons.append(
                f"draft_attention_window is {self.draft_attention_window}; at least 1, or None for all"
            )
        return tuple(reasons)

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        config = None if drafter is None else drafter.config
        return 1 if isinstance(config, MtpConfig) and config.modules > 1 else None

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        return (target.layers,)  # the last state before the final norm, which the module applies itself

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        cache, lead = drafter.cache, (slots, drafter.cache.heads, capacity + 1)
        return {
            "hidden": TensorSpec(
                (slots, drafter.config.hidden), drafter.dtype
            ),  # output of row n - 2, before norm_out
            "key.0": TensorSpec((*lead, cache.key_size), drafter.dtype),
            "value.0": TensorSpec((*lead, cache.value_size), drafter.dtype),
        }

    def observe(self, context: MethodContext, rows: Rows) -> None:
        observe_chain(context, rows, _step(context))

    def draft(self, context: MethodContext) -> Draft:
        return draft_chain(context, _step(context), self.draft_attention_window)


def _step(context: MethodContext) -> Step:
    drafter: MtpDrafter = context.drafter
    caches = {"key_cache": context.state["key.0"], "value_cache": context.state["value.0"]}

    def step(
        feature: Tensor, embedding: Tensor, position: Tensor, slot: Tensor, cache_row: Tensor, first: Tensor
    ) -> Tensor:
        return drafter.step(
            feature, embedding, position, slot=slot, cache_row=cache_row, first=first, **caches
        )

    return step
