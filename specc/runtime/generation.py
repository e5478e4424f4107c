"""What a generation returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from specc.runtime.stats import Stats

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Generation:
    """Sequences with how they ended and what it took.

    Attributes:
        sequences: int64 [sequences, longest], prompts included, padded at the right with the pad id.
        finish_reasons: per sequence "stop" (an end-of-sequence id or a stop string) or "length".
        stats: counters over all sequences.
        logits: per emitted position a float32 [sequences, vocab] before processors; rows of ended sequences are 0.
        scores: the same after processors and warpers.
        hidden_states: the same for the target's last hidden state.
    """

    sequences: Tensor
    finish_reasons: tuple[FinishReason, ...]
    stats: Stats
    logits: tuple[Tensor, ...] | None = None
    scores: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
