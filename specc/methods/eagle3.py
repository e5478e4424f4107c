"""EAGLE-3: draft from the target's own hidden states, one small layer run K times (methods.md 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specc import ops
from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec, drafts_with
from specc.drafters.eagle3 import Eagle3Drafter
from specc.methods.chain import draft_chain, observe_chain


@dataclass(frozen=True)
class Eagle3:
    """A chain of K drafts; rows and state as in `methods.chain`.

    Attributes:
        draft_attention_window: Cache rows a drafted row may look back on; None = all. Rows of true
            features always see everything. There is no sink: a row reads one interval.
    """

    name: str = "eagle3"
    default_block: int = 4  # speculators' own proposals, `speculative_tokens` of its EAGLE-3 checkpoints
    needs_drafter: bool = True
    history: int = 0
    draft_attention_window: int | None = None

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        if drafter is None:
            return (f"{self.name} needs a drafter; give the folder of an EAGLE-3 checkpoint of this target",)
        reasons = []
        if drafter.method != drafts_with(self):
            reasons.append(f"the drafter {drafter.name} is made for {drafter.method}, not for {self.name}")
        if block < 1:
            reasons.append(f"block is {block}; {self.name} drafts at least 1 token (plain is method='plain')")
        if drafter.target_hidden != target.hidden:
            reasons.append(
                f"the drafter reads target states of width {drafter.target_hidden}, the target's hidden size "
                f"is {target.hidden}"
            )
        outside = [tap for tap in drafter.taps if not 0 <= tap <= target.layers]
        if outside:
            reasons.append(
                f"the drafter taps the states after layers {outside}, the target has {target.layers}"
            )
        if drafter.target_vocab is not None and drafter.target_vocab > target.vocab:
            reasons.append(
                f"the drafter's vocabulary has {drafter.target_vocab} ids, the target's {target.vocab}"
            )
        elif drafter.target_vocab is not None and drafter.target_vocab < (
            target.tokenizer_vocab or target.vocab
        ):
            reasons.append(
                f"the drafter's vocabulary has {drafter.target_vocab} ids, the target's "
                f"{target.tokenizer_vocab or target.vocab}: some tokens could not be embedded"
            )
        if self.draft_attention_window is not None and self.draft_attention_window < 1:
            reasons.append(
                f"draft_attention_window is {self.draft_attention_window}; at least 1, or None for all"
            )
        return tuple(reasons)

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        return None  # a chain can be as long as one likes

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        assert drafter is not None, "reject() asks for a drafter first"
        return drafter.taps

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        layer, dtype = drafter.config.layer, drafter.norm.weight.dtype
        cache = TensorSpec((slots, layer.kv_heads, capacity + 1, layer.head_dim), dtype)
        specs = {"hidden": TensorSpec((slots, layer.hidden), dtype)}  # output of row n - 2, before the norm
        for index in range(drafter.config.layers):
            specs[f"key.{index}"] = specs[f"value.{index}"] = cache
        return specs

    def observe(self, context: MethodContext, rows: Rows) -> None:
        observe_chain(context, rows, rows_step(context))

    def draft(self, context: MethodContext) -> Draft:
        return draft_chain(context, rows_step(context), self.draft_attention_window)


def rows_step(context: MethodContext) -> Callable[..., Tensor]:
    """Return what runs the drafter's rows: a `chain.Step`, and with ``last`` and ``path`` a `tree.Step`."""
    drafter: Eagle3Drafter = context.drafter
    scale = drafter.config.layer.scale

    def step(
        feature: Tensor, embedding: Tensor, position: Tensor, slot: Tensor, cache_row: Tensor, first: Tensor,
        last: Tensor | None = None, path: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        branch = () if path is None else (None, None, path)
        last = cache_row if last is None else last

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            caches = context.state[f"key.{index}"], context.state[f"value.{index}"]
            attended: Tensor = ops.attend(
                query, key, value, *caches, slot, cache_row, first, last, scale, *branch
            )
            return attended

        return drafter.step(feature, embedding, position, attend)

    return step
