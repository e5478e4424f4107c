"""EAGLE-3 with a tree of drafts: several guesses for each position, for few sequences at a time (methods.md 2.7)."""

from __future__ import annotations

from dataclasses import dataclass

from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo
from specc.methods.eagle3 import Eagle3, rows_step
from specc.methods.tree import draft_tree
from specc.tree import MOST_DRAFTS, Tree, likeliest_tree

# How often the text was the drafter's likeliest, second likeliest .. token, given that all before it in the path was
# right: measured with the shipped EAGLE-3 drafter on answers that it was not trained on. How much likelier each rank is
# than the next makes the shape; other drafters differ in the first number more than in those.
_RANKS = (0.58, 0.10, 0.043, 0.024, 0.016, 0.012, 0.009, 0.007, 0.006, 0.005)


@dataclass(frozen=True)
class Eagle3Tree(Eagle3):
    """An EAGLE-3 drafter's ``block`` drafts as a tree of a shape that is fixed when the step is built.

    A tree costs more rows to verify for the same number of passes of the drafter, so it suits a machine that waits
    for memory, and few sequences. Drafts are point masses: sampled text is exact under both rules.

    Attributes:
        height: The most drafts in a row; each but the first is a pass of the drafter.
    """

    name: str = "eagle3_tree"
    default_block: int = (
        15  # 16 rows are the most that cost hardly more than one on a CPU (the weights are read once)
    )
    height: int = 5

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
        if not reasons and (room := len(self.tree(block).parents)) < block:
            reasons += (f"a tree of height {self.height} has room for {room} drafts, block is {block}",)
        return reasons

    def tree(self, block: int) -> Tree:
        """Return the shape of a draft of ``block`` tokens, 1 or more."""
        return likeliest_tree(block, _RANKS, self.height)

    def draft(self, context: MethodContext) -> Draft:
        assert context.tree is not None, "the spine gives a tree to a method that declares one"
        return draft_tree(context, rows_step(context), context.tree)
