"""Run contestants in interleaved rounds: a machine that slows down slows all of them down."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specc.benchmark.contestants import Contestant, Run

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 12


@dataclass(frozen=True)
class Task:
    """A prompt to answer: its ids int64 [tokens], how many tokens to answer, its name and kind."""

    ids: Tensor
    max_new_tokens: int
    name: str = ""
    category: str = ""


@dataclass(frozen=True)
class Measured:
    """All runs of one contestant: ``rounds[r][p]`` is round r's answer to prompt p."""

    contestant: Contestant
    rounds: tuple[tuple[Run, ...], ...]


def measure(
    contestants: Sequence[Contestant],
    tasks: Sequence[Task],
    repeats: int,
    progress: Callable[[str], None] = logger.info,
) -> list[Measured]:
    """Return every contestant's runs; compiling and other first-call work comes before any is timed.

    Within a round every prompt is answered by all contestants before the next prompt, and who begins changes.
    """
    for number, contestant in enumerate(contestants):
        progress(f"warming up {_label(contestant)} ({number + 1} of {len(contestants)})")
        contestant.run(tasks[0].ids, min(tasks[0].max_new_tokens, WARM_UP_TOKENS))
    rounds: list[list[list[Run]]] = [[] for _ in contestants]
    for repeat in range(repeats):
        progress(f"round {repeat + 1} of {repeats}")
        for runs in rounds:
            runs.append([])
        for place, task in enumerate(tasks):
            first = (place + repeat) % len(contestants)
            for index in [*range(first, len(contestants)), *range(first)]:
                rounds[index][-1].append(contestants[index].run(task.ids, task.max_new_tokens))
    return [Measured(c, tuple(tuple(r) for r in runs)) for c, runs in zip(contestants, rounds, strict=True)]


def _label(contestant: Contestant) -> str:
    return contestant.name if not contestant.block else f"{contestant.name}, block {contestant.block}"


@dataclass(frozen=True)
class Spread:
    """A median with the least and the greatest value over the rounds."""

    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median, least and greatest of values over rounds."""
    return Spread(statistics.median(values), min(values), max(values))


def rates(measured: Measured, chosen: Sequence[int]) -> list[float]:
    """Return tokens per second of each round over the chosen prompts."""
    out = []
    for runs in measured.rounds:
        seconds = sum(runs[p].seconds for p in chosen)
        out.append(sum(len(runs[p].tokens) for p in chosen) / seconds if seconds else 0.0)
    return out


def ratios(measured: Measured, against: Measured | None, chosen: Sequence[int]) -> list[float] | None:
    """Return the rates of each round as multiples of another contestant's in the same round."""
    if against is None:
        return None
    theirs = rates(against, chosen)
    return [a / b for a, b in zip(rates(measured, chosen), theirs, strict=True) if b] or None


def accepted_length(measured: Measured, chosen: Sequence[int]) -> float | None:
    """Return tokens per pass of the target, the bonus included."""
    steps = sum(runs[p].steps for runs in measured.rounds for p in chosen)
    return sum(len(runs[p].tokens) for runs in measured.rounds for p in chosen) / steps if steps else None


def acceptance_by_position(measured: Measured, chosen: Sequence[int]) -> list[float]:
    """Return, per draft position, the share of steps with a draft there in which it was accepted."""
    drafted: list[int] = []
    accepted: list[int] = []
    for runs in measured.rounds:
        for p in chosen:
            for sums, counts in ((drafted, runs[p].drafted_at), (accepted, runs[p].accepted_at)):
                sums.extend([0] * (len(counts) - len(sums)))
                for index, count in enumerate(counts):
                    sums[index] += count
    accepted += [0] * (len(drafted) - len(accepted))
    return [a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)]
