"""Counters of a generation. Only emitted tokens count."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from specc.runtime.engine import SlotRecord


@dataclass
class Stats:
    """What a generation did and how long it took; times in seconds unless the name says otherwise.

    Of a tree, drafts are counted by depth: the guesses for one position count as one.
    """

    steps: int = 0  # steps of a slot in which it emitted tokens
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # steps in which draft i was accepted
    drafted_at: list[int] = field(default_factory=list)  # steps in which there was a draft i
    device_steps: int = 0
    prefill_steps: int = 0
    begin: float = field(default_factory=time.perf_counter, repr=False)
    first_token_s: float | None = None
    seconds: float = 0.0
    step_seconds: float = field(default=0.0, repr=False)

    def add(self, record: SlotRecord) -> None:
        """Count one slot's part of one step."""
        if not record.tokens:
            return
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.begin
        self.steps += 1
        self.tokens += len(record.tokens)
        self.drafted += record.drafted
        self.accepted += record.accepted
        for counts, reached in ((self.drafted_at, record.drafted), (self.accepted_at, record.accepted)):
            counts.extend([0] * (reached - len(counts)))
            for index in range(reached):
                counts[index] += 1

    def forget(self, record: SlotRecord, kept: int) -> None:
        """Take back the tokens of a step behind the first ``kept``: a stop string ended before them."""
        self.tokens -= len(record.tokens) - kept
        for index in range(min(kept, record.accepted), record.accepted):
            self.accepted -= 1
            self.accepted_at[index] -= 1

    def finish(self) -> Stats:
        self.seconds = time.perf_counter() - self.begin
        return self

    @property
    def mean_accepted_length(self) -> float:
        """Return the mean tokens per step of a slot, the bonus included."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Return, per draft position, the share of steps with a draft there in which it was accepted."""
        accepted = [*self.accepted_at, *[0] * (len(self.drafted_at) - len(self.accepted_at))]
        return [a / d if d else 0.0 for a, d in zip(accepted, self.drafted_at, strict=False)]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_ms(self) -> float:
        """Return the mean milliseconds of a decoding step, prompt steps left out."""
        steps = self.device_steps - self.prefill_steps
        return 1e3 * self.step_seconds / steps if steps else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return the counters and the figures made from them, for JSON."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_by_position": self.acceptance_by_position,
            "mean_accepted_length": self.mean_accepted_length,
            "first_token_ms": None if self.first_token_s is None else 1e3 * self.first_token_s,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "step_ms": self.step_ms,
            "device_steps": self.device_steps,
            "prefill_steps": self.prefill_steps,
        }
