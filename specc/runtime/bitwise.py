"""``exact="bitwise"``: every step runs the same rows; a self-test says whether bits still depend on a row's place.

A greedy token can differ between plain and speculative decoding only where the logits of one row differ between steps
of other shapes. With one shape for all steps what is left is where a row stands among the others, how many rows of
its slot stand beside it, and how far the block around it reaches. No library promises that these do not matter, so it
is measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specc.errors import UnsupportedError
from specc.runtime.engine import Engine
from specc.step import StepKey

FEED_ROWS = 16  # prompt rows that every step carries, read or not: their cost is paid in each step
_BLOCKS = 4  # blocks of text that the self-test reads


@torch.no_grad()
def check_bitwise(engine: Engine, block: int) -> None:
    """Read the same random text in four ways and compare the bits of its logits.

    Raises:
        UnsupportedError: They differ here; says by how much.
    """
    reader = _Reader(engine, block)
    try:
        one = reader.read(step=1, chunk=engine.feed)
        readings = {
            "as drafts of a block": reader.read(step=block + 1, chunk=engine.feed),
            "as drafts, the prompt read in other chunks, beside prompt rows": reader.read(
                step=block + 1, chunk=max(1, engine.feed // 2 - 1), skip=1, beside=True
            ),
            "as drafts, with the other slots idle": reader.read(
                step=block + 1, chunk=engine.feed, skip=2, alone=True
            ),
        }
    finally:
        for slot in range(engine.slots):
            engine.stop(slot)
            engine.forget(slot, 0)
    reasons = []
    for how, reading in readings.items():
        worst = max(float((one[place] - row).abs().max()) for place, row in reading.items())
        same = all(torch.equal(one[place], row) for place, row in reading.items())
        if not same:
            reasons.append(f"a row read one by one and {how}: its logits differ by up to {worst:.3g}")
    if reasons:
        raise UnsupportedError(
            f"exact='bitwise' does not hold on {engine.builder.device.type} with backend {engine.backend.name!r}",
            reasons,
            "Leave exact out: text then differs from plain decoding's at near-ties only; `specc verify` judges them.",
        )  # fmt: skip


class _Reader:
    def __init__(self, engine: Engine, block: int) -> None:
        self._engine, self._block = engine, block
        self._key = StepKey(block, engine.feed, "ratio")
        self._prompt = engine.feed + engine.feed // 2
        length = min(engine.capacity - 1, self._prompt + _BLOCKS * (block + 1))
        self._prompt = max(1, min(self._prompt, length - 2 * (block + 1)))
        generator = torch.Generator().manual_seed(0)
        vocab = engine.builder.shape.vocab
        self._texts = torch.randint(vocab, (engine.slots, length), generator=generator)

    def read(
        self, *, step: int, chunk: int, skip: int = 0, beside: bool = False, alone: bool = False
    ) -> dict[tuple[int, int], Tensor]:
        """Return logits by (slot, position): the prompt by fed rows, then ``step`` positions at a time."""
        engine, state = self._engine, self._engine.state.state
        slots = [0] if alone else list(range(engine.slots))
        length = self._texts.shape[1]
        for slot in range(engine.slots):
            engine.bind(slot, self._texts[slot], limit=engine.capacity)
        rows = [(slot, position) for slot in slots for position in range(self._prompt)]
        for start in range(0, len(rows), chunk):
            self._run(rows[start : start + chunk], None)
        engine.start(slots)
        found: dict[tuple[int, int], Tensor] = {}
        fed = [(slots[-1], position) for position in range(min(chunk, self._prompt))] if beside else []
        for at, known in _places(self._prompt, length - self._block, step, skip):
            guess = torch.full((engine.slots, self._block), -1)
            for slot in slots:
                state["length"][slot] = at + 1
                guess[slot, : known - 1] = self._texts[slot, at + 1 : at + known]
            logits = self._run(fed, guess)
            found |= {(slot, at + row): logits[slot, row] for slot in slots for row in range(known)}
        return found

    def _run(self, rows: list[tuple[int, int]], guess: Tensor | None) -> Tensor:
        self._engine.set_feed(rows)
        if guess is None:
            guess = torch.full((self._engine.slots, self._block), -1)
        return self._engine.read(self._key, guess)


def _places(first: int, end: int, step: int, skip: int) -> Iterator[tuple[int, int]]:
    """Yield where each block begins and how many rows it has; a first one of ``skip`` rows shifts the others."""
    at, rows = first, min(skip, step) or step
    while at + rows <= end:
        yield at, rows
        at, rows = at + rows, step
