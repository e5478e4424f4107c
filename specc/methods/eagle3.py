"""EAGLE-3: draft from the target's own hidden states, one small layer run K times (methods.md 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc import ops
from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec
from specc.drafters.eagle3 import Attend, Eagle3Drafter


@dataclass(frozen=True)
class Eagle3:
    """A chain of K drafts.

    The drafter's row t pairs the target's feature of position t with the token at t + 1 and sits at
    position t, so its newest true row is n - 2 and that row's output already gives the first draft.

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
            return ("eagle3 needs a drafter; give the folder of an EAGLE-3 checkpoint of this target",)
        reasons = []
        if drafter.method != self.name:
            reasons.append(f"the drafter {drafter.name} is made for {drafter.method}, not for {self.name}")
        if block < 1:
            reasons.append(f"block is {block}; eagle3 drafts at least 1 token (plain is method='plain')")
        if drafter.target_hidden != target.hidden:
            reasons.append(
                f"the drafter reads target states of width {drafter.target_hidden}, the target's hidden size "
                f"is {target.hidden}"
            )
        outside = [tap for tap in drafter.taps if not 0 <= tap <= target.layers]
        if outside:
            reasons.append(f"the drafter taps the states after layers {outside}, the target has {target.layers}")
        if drafter.target_vocab is not None and drafter.target_vocab > target.vocab:
            reasons.append(f"the drafter's vocabulary has {drafter.target_vocab} ids, the target's {target.vocab}")
        elif drafter.target_vocab is not None and drafter.target_vocab < (target.tokenizer_vocab or target.vocab):
            reasons.append(
                f"the drafter's vocabulary has {drafter.target_vocab} ids, the target's "
                f"{target.tokenizer_vocab or target.vocab}: some tokens could not be embedded"
            )
        if self.draft_attention_window is not None and self.draft_attention_window < 1:
            reasons.append(f"draft_attention_window is {self.draft_attention_window}; at least 1, or None for all")
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
        drafter: Eagle3Drafter = context.drafter
        assert rows.features is not None, "eagle3 has taps"
        cache_row = rows.cache_row.clamp(max=context.capacity)  # garbage rows go to the one scratch row
        output = drafter.step(
            drafter.fuse(rows.features),
            drafter.embed(rows.next_token, context.embed),
            rows.position,
            _attend(context, rows.slot, cache_row, torch.zeros_like(cache_row), cache_row),
        )
        newest = output[rows.newest.clamp(0, output.shape[0] - 1)]
        hidden = context.state["hidden"]
        ops.store(hidden, torch.where(rows.has_newest[:, None], newest.to(hidden.dtype), hidden))

    def draft(self, context: MethodContext) -> Draft:
        drafter: Eagle3Drafter = context.drafter
        slot = torch.arange(context.slots, device=context.length.device)
        # With one committed token there is no feature row yet, and `hidden` is some earlier request's.
        ready = context.length >= 2
        output = torch.where(ready[:, None], context.state["hidden"], 0)
        valid = [self._within(drafter, context, context.length - 2) & ready]
        for index in range(context.block):
            token = context.draw(drafter.head(output, context.head), index, ids=drafter.target_ids)
            if index + 1 == context.block:
                break
            position = context.length - 1 + index
            inside = self._within(drafter, context, position) & ready
            cache_row = context.cache_rows(position, inside & context.running)
            first = torch.zeros_like(cache_row)
            if self.draft_attention_window is not None:
                first = (cache_row - self.draft_attention_window + 1).clamp(min=0)
            output = drafter.step(
                drafter.carried(output),
                drafter.embed(token, context.embed),
                position.clamp(min=0),
                _attend(context, slot, cache_row, first, cache_row),
            )
            valid.append(inside)
        return context.draw.draft(valid=torch.stack(valid, dim=1))

    @staticmethod
    def _within(drafter: Eagle3Drafter, context: MethodContext, position: Tensor) -> Tensor:
        """Return whether rows at ``position`` are inside the cache and the drafter's own position range."""
        limit = drafter.config.max_position
        return position < (context.capacity if limit is None else min(limit, context.capacity))


def _attend(context: MethodContext, slot: Tensor, cache_row: Tensor, first: Tensor, last: Tensor) -> Attend:
    scale = context.drafter.config.layer.scale

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key_cache, value_cache = context.state[f"key.{index}"], context.state[f"value.{index}"]
        attended: Tensor = ops.attend(
            query, key, value, key_cache, value_cache, slot, cache_row, first, last, scale
        )
        return attended

    return attend
