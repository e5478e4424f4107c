"""Judging a tree of drafts: the target says its own token at every node, and the path that says the same is kept.

A tree's drafts are a function of what was committed, so each is a point mass. Trying siblings in turn, each with its
remaining chance under p, accepts x with probability p(x) in all (methods.md 1.4, 2.7): the same as drawing from p
and looking for the child that was drawn. The numbers drawn with are those of the position, so text with a seed is
plain decoding's under the coupled rule, and under both rules only what is emitted decides what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specc.contracts import AcceptRule
from specc.errors import InvariantError
from specc.sampling.draw import coupled_scores, inverse_cdf
from specc.sampling.rng import Stream, uniform
from specc.sampling.warper import SamplingContext
from specc.tree import Tree, table


@dataclass(frozen=True)
class AcceptedPath:
    """What a step of a tree emits per slot: ``count`` drafts, then one token of the target's own."""

    count: Tensor  # int64 [slots] accepted drafts, 0..height
    tokens: Tensor  # int64 [slots, height + 1] the count + 1 emitted tokens, padded with -1
    drafted: Tensor  # int64 [slots] the depth down to which there were drafts
    broken: Tensor  # bool [slots] the last emitted token comes from a row of NaN or nothing but -inf
    path: Tensor  # int64 [slots, height + 1] the node at each depth; behind ``count`` any node


def accept_tree(
    logits: Tensor, drafts: Tensor, tree: Tree, *, temperature: Tensor | None = None, seed: Tensor | None = None,
    length: Tensor | None = None, rule: AcceptRule | Tensor = "ratio", raw: Tensor | None = None,
) -> AcceptedPath:  # fmt: skip
    """Keep the longest path on which the target says every draft itself; of equal ones that of the first node.

    Siblings may be the same token: they were drafted in different ways, and go on differently.

    Args:
        logits: float32 [slots, nodes, vocab], after all warpers (temperature included).
        drafts: int64 [slots, drafts], -1 = none.
        tree: Which node each draft continues.
        temperature, seed, length, rule, raw: as `accept.accept` takes them.
    """
    device = logits.device
    choice, sound = _choices(logits, tree, temperature, seed, length, rule)
    fallback = logits if raw is None else raw
    fallback = torch.where(fallback.isnan(), float("-inf"), fallback).argmax(-1)
    parents, depths, on_path = table(tree.parents, device), table(tree.depths, device), tree.on_path(device)
    # Whether the target says each node's token at its parent; then, whether so of every node on its path.
    said = (drafts == choice[:, parents]) & sound[:, parents] & (drafts >= 0)
    whole = (said[:, None] | ~on_path).all(-1)
    order = torch.arange(tree.nodes, device=device)
    node = (depths * whole * tree.nodes - order).argmax(1)  # all differ: no backend has a tie to break
    count = depths[node]
    depth = torch.arange(tree.height + 1, device=device)
    step = on_path[node][:, None] & (depths[1:] == depth[:, None])  # [slots, depths, drafts]
    path = torch.where(step.any(-1), step.long().argmax(-1) + 1, 0)
    emitted = torch.where(sound, choice, fallback).gather(1, path)
    there = ((drafts >= 0)[:, None] | ~on_path).all(-1)
    drafted = (depths * there).amax(1)
    broken = ~sound.gather(1, node[:, None])[:, 0]
    return AcceptedPath(count, torch.where(depth <= count[:, None], emitted, -1), drafted, broken, path)


def _choices(
    logits: Tensor, tree: Tree, temperature: Tensor | None, seed: Tensor | None, length: Tensor | None,
    rule: AcceptRule | Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the target's own token at every node, int64 [slots, nodes], and whether it has one."""
    if temperature is None:
        return _highest(logits)
    if seed is None or length is None:
        raise InvariantError("sampling needs seed and length", where="accept_tree")
    position = length[:, None] + table(tree.depths, logits.device)
    greedy = temperature == 0
    if isinstance(rule, str) and rule == "coupled":
        return _highest(coupled_scores(logits, seed, position, ~greedy))
    noisy = ~greedy & rule if isinstance(rule, Tensor) else None
    scores = logits if noisy is None else coupled_scores(logits, seed, position, noisy)
    exact = greedy if noisy is None else greedy | noisy
    choice, sound = _highest(scores)
    coin = uniform(seed, position, Stream.FINAL)
    drawn = inverse_cdf(logits.softmax(-1).flatten(0, 1), coin.flatten()).view_as(choice)
    choice = torch.where(exact[:, None], choice, drawn)
    return choice, torch.where(exact[:, None], sound, drawn >= 0)


def _highest(scores: Tensor) -> tuple[Tensor, Tensor]:
    choice = scores.argmax(-1)
    return choice, scores.gather(-1, choice[..., None])[..., 0].isfinite()


def as_slots(context: SamplingContext, tree: Tree) -> SamplingContext:
    """Return the context in which every node is a slot of its own, its path committed: warpers then need no trees."""
    drafts, nodes = context.draft, tree.nodes
    depth = table(tree.depths, drafts.device)
    # The drafts of a path by depth; what a shorter path has behind its end is beyond its length.
    at = torch.arange(1, tree.height + 1, device=drafts.device)
    chosen = tree.on_path(drafts.device)[:, None] & (depth[1:] == at[:, None])
    line = (chosen * drafts.clamp(min=0)[:, None, None]).sum(-1)  # [slots, nodes, height]
    column = (context.length[:, None] + at - 1).clamp(max=context.tokens.shape[1] - 1)
    tokens = context.tokens[:, None].expand(-1, nodes, -1)
    tokens = tokens.scatter(2, column[:, None].expand(-1, nodes, -1), line)

    def spread(value: Tensor) -> Tensor:
        return value.repeat_interleave(nodes, 0)

    return replace(
        context,
        tokens=tokens.flatten(0, 1),
        length=(context.length[:, None] + depth).flatten(),
        prompt_length=spread(context.prompt_length),
        draft=drafts.new_empty(drafts.shape[0] * nodes, 0),
        settings={name: spread(value) for name, value in context.settings.items()},
        eos=spread(context.eos),
        max_length=spread(context.max_length),
    )
