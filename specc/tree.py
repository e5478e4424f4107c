"""The shape of a draft that is a tree: several guesses for each position, of which one path is kept.

A tree's shape is fixed when a step is built, so every mask in it is a constant of the graph (methods.md 2.7, E4).
Node 0 is the anchor, the newest committed token; draft i is node i + 1. A node's row stands behind the anchor's
in every cache, in the order of the nodes; its position is the anchor's plus its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specc.errors import InputError

MOST_DRAFTS = 62  # a node's path is a set of bits in an int64; attend_cpu.py's source knows the number, too


@dataclass(frozen=True)
class Tree:
    """Which node each draft continues.

    Attributes:
        parents: ``parents[i]`` is the node that draft i, node i + 1, continues: 0 or an earlier draft's node.
            The drafts of one parent are its likeliest first.

    Raises:
        InputError: no drafts, too many, or one that comes before its parent.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parents) <= MOST_DRAFTS:
            raise InputError("tree", f"{len(self.parents)} drafts", f"1 to {MOST_DRAFTS}")
        for index, parent in enumerate(self.parents):
            if not 0 <= parent <= index:
                raise InputError(
                    "tree", f"draft {index} continues node {parent}", f"a node from 0 to {index}"
                )

    @property
    def nodes(self) -> int:
        """The number of nodes, the anchor included."""
        return len(self.parents) + 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Each node's distance from the anchor."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def height(self) -> int:
        """The most drafts that one step can accept."""
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Each node's children, the likeliest first."""
        found: list[list[int]] = [[] for _ in range(self.nodes)]
        for index, parent in enumerate(self.parents):
            found[parent].append(index + 1)
        return tuple(tuple(c) for c in found)

    @cached_property
    def paths(self) -> tuple[int, ...]:
        """The drafts on each node's path, itself included: bit i stands for draft i; the anchor has none."""
        paths = [0]
        for index, parent in enumerate(self.parents):
            paths.append(paths[parent] | 1 << index)
        return tuple(paths)

    def level(self, depth: int) -> tuple[int, ...]:
        """Return the nodes of a depth."""
        return tuple(node for node, at in enumerate(self.depths) if at == depth)

    def on_path(self, device: torch.device) -> Tensor:
        """Return whether a draft is on a node's path, bool [nodes, drafts]."""
        draft = torch.arange(len(self.parents), device=device)
        return (table(self.paths, device)[:, None] >> draft) & 1 > 0


def table(values: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers known when a graph is built as int64 [values].

    Each is filled in by an operator of its own: a tensor made of a Python list would be a copy from the host in
    every step.
    """
    return torch.cat([torch.full((1,), v, dtype=torch.int64, device=device) for v in values])


def likeliest_tree(drafts: int, ranks: Sequence[float], height: int) -> Tree:
    """Return the tree whose drafts are likeliest to be the text, if a draft's rank among its siblings is all one knows.

    Args:
        drafts: How many.
        ranks: ``ranks[r]`` is the chance that the drafter's r-th likeliest token is the text's; falling.
        height: The most drafts in a row.

    Returns:
        A tree of fewer drafts where ``ranks`` and ``height`` leave room for no more.
    """
    open_: list[tuple[float, tuple[int, ...]]] = [(ranks[0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while open_ and len(chosen) < drafts:
        open_.sort(key=lambda item: (-item[0], item[1]))
        chance, path = open_.pop(0)
        chosen.append(path)
        if len(path) < height:
            open_.append((chance * ranks[0], (*path, 0)))
        if path[-1] + 1 < len(ranks):
            open_.append((chance / ranks[path[-1]] * ranks[path[-1] + 1], (*path[:-1], path[-1] + 1)))
    chosen.sort(key=lambda path: (len(path), path))
    number = {(): 0} | {path: index + 1 for index, path in enumerate(chosen)}
    return Tree(tuple(number[path[:-1]] for path in chosen))
