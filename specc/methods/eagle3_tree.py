"""EAGLE-3 with a tree of drafts: several guesses for each position, for few sequences at a time (methods.md 2.7).

One branch of the tree is copied from where the text's newest tokens stood before, as `ngram` drafts: it costs rows and
no pass of the drafter, and where an answer repeats its prompt it is right further than any drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo
from specc.methods.eagle3 import Eagle3, rows_step
from specc.methods.ngram import lookup
from specc.methods.tree import draft_tree
from specc.tree import MOST_DRAFTS, Tree, likeliest_tree

# How often the text was the drafter's likeliest, second likeliest .. token, given that all before it in the path was
# right: measured with the shipped EAGLE-3 drafter on answers that it was not trained on. How much likelier each rank is
# than the next makes the shape; other drafters differ in the first number more than in those.
_RANKS = (0.58, 0.10, 0.043, 0.024, 0.016, 0.012, 0.009, 0.007, 0.006, 0.005)

_MAX_NGRAM = 3  # as `ngram`


@dataclass(frozen=True)
class Eagle3Tree(Eagle3):
    """An EAGLE-3 drafter's ``block`` drafts as a tree of a shape that is fixed when the step is built.

    A tree costs more rows to verify for the same number of passes of the drafter, so it suits a machine that waits
    for memory, and few sequences. Drafts are point masses: sampled text is exact under both rules.

    Attributes:
        height: The most drafts of the drafter in a row; each but the first is one pass of it.
        copies: Drafts of the block that are copied from earlier text; None = two in five, at most 8.
    """

    name: str = "eagle3_tree"
    default_block: int = 10  # the fastest of 7, 10, 15 and 23 where it was measured: docs/drafters.md
    height: int = 4
    copies: int | None = None

    @property
    def drafts_with(self) -> str:
        """The method whose drafters this one takes."""
        return "eagle3"

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        reasons = super().reject(target, drafter, block)
        if block > MOST_DRAFTS:
            reasons += (f"block is {block}; a tree has at most {MOST_DRAFTS} drafts",)
        if self.height < 1:
            reasons += (f"height is {self.height}; at least 1",)
        if self.draft_attention_window is not None:
            reasons += ("a tree has no draft_attention_window",)
        if not 0 <= self._copied(block) < max(block, 1):
            reasons += (f"copies is {self.copies}; 0 or more, and fewer than the block, which is {block}",)
        if not reasons and (room := len(self.tree(block).parents)) < block:
            reasons += (f"a tree of height {self.height} has room for {room} drafts, block is {block}",)
        return reasons

    def tree(self, block: int) -> Tree:
        """Return the shape of a draft of ``block`` tokens, 1 or more."""
        copied = self._copied(block)
        own = likeliest_tree(block - copied, _RANKS, self.height)
        # The copied drafts are a chain from the anchor, behind all others.
        chain = (0, *range(own.nodes, own.nodes + copied - 1)) if copied else ()
        return Tree((*own.parents, *chain))

    def draft(self, context: MethodContext) -> Draft:
        assert context.tree is not None, "the spine gives a tree to a method that declares one"
        copied = self._copied(context.block)
        own = Tree(context.tree.parents[: context.block - copied])
        drafts = draft_tree(context, rows_step(context), own).tokens
        if copied:
            found, exists = lookup(context.tokens, context.length, copied, _MAX_NGRAM, "recent")
            drafts = torch.cat([drafts, torch.where(exists, found, -1)], 1)
        return Draft(drafts)

    def _copied(self, block: int) -> int:
        return min(2 * block // 5, 8) if self.copies is None else self.copies
