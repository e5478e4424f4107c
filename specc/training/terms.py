"""What an objective is given and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specc.training.packing import Batch, take

Embed = Callable[[Tensor], Tensor]


@dataclass
class Result:
    """Terms of a loss by name: (weight, sum, divisor), and counts for reports."""

    terms: dict[str, tuple[float, Tensor, Tensor]] = field(default_factory=dict)
    prefix: Tensor | None = None  # [positions], rows whose whole prefix of greedy drafts is right
    total: Tensor | None = None  # [positions], rows with a label
    runs: Tensor | None = (
        None  # int64 [batch, length], greedy drafts right in a row after each anchor; -1: no anchor
    )
    overlap: Tensor | None = None  # [positions], sum of 1 - TV: expected acceptance when sampling
    confidence: Tensor | None = None  # [rows, positions], logits of whole blocks
    accepted: Tensor | None = None  # [rows, positions], the probability that each draft is accepted

    def loss(self, reduce: Callable[[Tensor], Tensor] = lambda t: t) -> Tensor:
        """Return the weighted sum of terms; ``reduce`` sums a divisor over the processes."""
        return torch.stack([w * s / reduce(d).clamp(min=1e-9) for w, s, d in self.terms.values()]).sum()


@dataclass(frozen=True)
class LossOptions:
    """Weights of the terms.

    Attributes:
        ce: DSpark's cross-entropy with the text's own token (0.1 in the released configurations).
        l1: DSpark's ||q - p||_1 (0.9 there).
        confidence: The confidence head's term (1.0 there).
        soft: Cross-entropy with the target's distribution over the draft vocabulary; not part of any released
            configuration, 0 by default. Its gradient does not vanish where q and p are far apart, as that of
            ``l1`` does, so a short run from a rough start gains by it.
        decay: g of exp(-r / g), the weight of row r; None = 4 for DSpark, by the block's length for DFlash.
        selector: DFlash 2's selector term.
        step_decay: EAGLE-3's weight of step s is this to the power s.
        anchors: Anchors drawn per sequence.
        steps: EAGLE-3's training-time test steps; None = as many as the block it is trained for.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    soft: float = 0.0
    decay: float | None = None
    selector: float = 1.0
    step_decay: float = 0.8
    anchors: int = 64
    steps: int | None = None


@dataclass(frozen=True)
class Reference:
    """What the target says about a label's row.

    Attributes:
        head: [draft vocabulary, hidden], the target's head rows of the draft vocabulary.
        draft_index: int64 [vocabulary], a target id's draft id, or -1.
        transform: What the target does to its logits after the head (softcap, scale).
    """

    head: Tensor
    draft_index: Tensor
    transform: Callable[[Tensor], Tensor]

    def probabilities(self, batch: Batch, columns: Tensor | None = None) -> Tensor:
        """Return p over the draft vocabulary [batch, length, ..]; what is missing to 1 lies outside of it.

        Args:
            batch: The sequences.
            columns: int64 [batch, columns], the positions that are asked for; None = all.
        """
        final, total = batch.final, batch.log_total
        if columns is not None:
            final, total = take(final, columns), take(total, columns)
        logits = self.transform(functional.linear(final, self.head))
        return (logits - total[..., None]).exp().clamp(max=1.0)


Objective = Callable[[Any, Batch, Reference, Embed, LossOptions, int], Result]
"""(drafter, batch, reference, embed, options, seed) -> Result."""
