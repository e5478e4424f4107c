"""How a drafter that runs a chain of rows drafts a tree: level by level, every node's likeliest tokens its children.

A drafted node's row pairs what its parent's row carried on with the node's token. It stands behind the true rows in
the order of the nodes and sees those and its own path (methods.md 2.7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specc.contracts import Draft, MethodContext
from specc.methods.chain import is_within
from specc.tree import Tree, table

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(feature, embedding, position, slot, cache_row, first, last, path) -> output [rows, hidden]; writes the rows' K/V."""


def draft_tree(context: MethodContext, step: Step, tree: Tree) -> Draft:
    """Draft a token for every node; those without a context or past the drafter's positions come out as -1."""
    drafter, device = context.drafter, context.length.device
    slots = context.slots
    newest = context.length - 2  # the newest true row, whose output is the first to draft from
    # With one committed token there is no feature row yet, and ``hidden`` is some earlier request's.
    inside = ((newest >= 0) & is_within(drafter, context, newest))[:, None]
    output = torch.where(inside, context.state["hidden"], 0)[:, None]
    drafts: dict[int, Tensor] = {}
    parents: tuple[int, ...] = (0,)
    for depth in range(1, tree.height + 1):
        drafted = _likeliest(drafter, context, output, max(len(tree.children[n]) for n in parents))
        drafted = torch.where(inside[..., None], drafted, -1)
        carried: dict[int, Tensor] = {}
        for row, parent in enumerate(parents):
            for rank, node in enumerate(tree.children[parent]):
                drafts[node], carried[node] = drafted[:, row, rank], output[:, row]
        parents = tuple(node for node in tree.level(depth) if tree.children[node])
        if not parents:
            break
        width = len(parents)
        token = torch.stack([drafts[node] for node in parents], 1)
        position = (newest + depth)[:, None].expand(-1, width)
        place = newest[:, None] + table(parents, device)
        inside = is_within(drafter, context, position) & (newest >= 0)[:, None] & (token >= 0)
        inside = inside & (place < context.capacity)
        cache_row = context.cache_rows(place, inside & context.running[:, None])
        slot = torch.arange(slots, device=device)[:, None].expand_as(place)
        path = table([tree.paths[node] for node in parents], device).expand(slots, -1)
        last = newest[:, None].expand_as(place)
        feature = drafter.carried(torch.stack([carried[node] for node in parents], 1).flatten(0, 1))
        embedding = drafter.embed(token.flatten(), context.embed)
        rows = (position.clamp(min=0), slot, cache_row, torch.zeros_like(place), last, path)
        output = step(feature, embedding, *(t.flatten() for t in rows)).view(slots, width, -1)
    return Draft(torch.stack([drafts[node] for node in range(1, tree.nodes)], 1))


def _likeliest(drafter: Any, context: MethodContext, output: Tensor, count: int) -> Tensor:
    """Return the ``count`` likeliest target ids after each row, int64 [slots, rows, count], -1 where there is none."""
    scores, ids = drafter.head(output, context.head).float(), drafter.target_ids
    if ids is None:
        ids = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill((ids < 0) | (ids >= context.vocab), float("-inf"))
    best, index = scores.topk(min(count, scores.shape[-1]), -1)
    found = torch.where(best > float("-inf"), ids[index], -1)  # false for NaN, too
    return torch.nn.functional.pad(found, (0, count - found.shape[-1]), value=-1)
