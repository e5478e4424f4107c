"""What EAGLE-3 and MTP share: rows of (feature t, token t + 1), first true ones and then the drafter's own.

The newest true row is n - 2. Its output, kept in the state ``hidden``, already gives the first draft; each
further draft is one more row, whose feature is what the row before carried on (methods.md 2.5, 2.6 b).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specc import ops
from specc.contracts import Draft, MethodContext, Rows

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(feature, embedding, position, slot, cache_row, first) -> output [rows, hidden]; writes the rows' K/V."""


def observe_chain(context: MethodContext, rows: Rows, step: Step) -> None:
    """Run the drafter on rows of true features and keep the output of each slot's newest."""
    drafter = context.drafter
    assert rows.features is not None, "a chain has taps"
    cache_row = rows.cache_row.clamp(max=context.capacity)  # garbage rows go to the one scratch row
    output = step(
        drafter.fuse(rows.features),
        drafter.embed(rows.next_token, context.embed),
        rows.position,
        rows.slot,
        cache_row,
        torch.zeros_like(cache_row),
    )
    newest = output[rows.newest.clamp(0, output.shape[0] - 1)]
    hidden = context.state["hidden"]
    ops.store(hidden, torch.where(rows.has_newest[:, None], newest.to(hidden.dtype), hidden))


def draft_chain(context: MethodContext, step: Step, window: int | None) -> Draft:
    """Draft ``block`` tokens; those without a context or past the drafter's positions come out as -1.

    Args:
        context: The step's.
        step: Runs the drafter's rows.
        window: Cache rows a drafted row may look back on, itself included; None = all.
    """
    drafter = context.drafter
    slot = torch.arange(context.slots, device=context.length.device)
    # With one committed token there is no feature row yet, and ``hidden`` is some earlier request's.
    ready = context.length >= 2
    output = torch.where(ready[:, None], context.state["hidden"], 0)
    valid = [is_within(drafter, context, context.length - 2) & ready]
    for index in range(context.block):
        token = context.draw(drafter.head(output, context.head), index, ids=drafter.target_ids)
        if index + 1 == context.block:
            break
        position = context.length - 1 + index
        inside = is_within(drafter, context, position) & ready
        cache_row = context.cache_rows(position, inside & context.running)
        first = torch.zeros_like(cache_row) if window is None else (cache_row - window + 1).clamp(min=0)
        embedding = drafter.embed(token, context.embed)
        output = step(drafter.carried(output), embedding, position.clamp(min=0), slot, cache_row, first)
        valid.append(inside)
    return context.draw.draft(valid=torch.stack(valid, dim=1))


def is_within(drafter: Any, context: MethodContext, position: Tensor) -> Tensor:
    """Return whether rows at ``position`` are inside the cache and the drafter's own position range."""
    limit = drafter.config.max_position
    return position < (context.capacity if limit is None else min(limit, context.capacity))
