"""Serve requests on the engine's slots: fill prompts in chunks, step, refill finished slots.

One step at a time. While any prompt is unfinished the step is a filling one: a chunk of prompt rows beside the rows of
the slots that run, which go on drafting. A slot starts in the step that takes the last chunk of its prompt, without
drafts; from then on it drafts in every step, whatever the others do: its text is that of its own run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.contracts import AcceptRule
from specc.errors import UnsupportedError
from specc.runtime.engine import Engine, SlotRecord
from specc.runtime.host_accept import OwnRules
from specc.runtime.stats import Stats
from specc.sampling import join
from specc.step import RUNNING, STOP, StepKey


@dataclass(eq=False)
class Request:
    """One sequence to generate.

    ``ids`` int64 [tokens], ``limit`` total tokens, ``settings`` the columns that are not neutral.
    """

    ids: Tensor
    limit: int
    eos: tuple[int, ...] = ()
    seed: int = 0
    settings: Mapping[str, Tensor] = field(default_factory=dict)
    families: tuple[str, ...] = ()
    rule: AcceptRule = "ratio"
    own: OwnRules = field(default_factory=OwnRules)
    block: int | None = None  # None = the compiled block
    key: object = None


@dataclass(frozen=True)
class Progress:
    """Tokens that a request got in one step, and how it ended if it did."""

    request: Request
    record: SlotRecord
    finish: str | None  # "stop" | "length" | None
    slot: int = 0


@dataclass
class _Slot:
    request: Request
    fed: int  # tokens whose rows have run
    length: int  # committed tokens
    running: bool = False


class Scheduler:
    """Runs requests to their end on the slots of an engine.

    Args:
        engine: its slots are this scheduler's while it runs.
        block: drafts per slot and step.
        rule: the accept rule that most requests follow.
        extras: what steps output beside tokens.
        is_uniform: whether every step has the same rows, prompt rows and drafts both, whether they are needed or not.
        drafts: false leaves the rows of drafts empty.
    """

    def __init__(
        self, engine: Engine, block: int, rule: AcceptRule, extras: tuple[str, ...] = (), *,
        is_uniform: bool = False, drafts: bool = True,
    ) -> None:  # fmt: skip
        self.engine, self.block, self.rule, self.extras = engine, block, rule, extras
        self.is_uniform, self.drafts = is_uniform, drafts
        self._slots: dict[int, _Slot] = {}
        self._families: tuple[str, ...] = ()

    def run(self, requests: Iterable[Request], stats: Stats) -> Generator[Progress, None, None]:
        """Yield the progress of every request, step by step; leaves the engine idle however it ends."""
        waiting = iter(requests)
        pending: deque[Request] = deque()
        exhausted = False
        try:
            while True:
                while not exhausted and len(self._slots) + len(pending) < self.engine.slots:
                    item = next(waiting, None)
                    exhausted = item is None
                    if item is not None:
                        pending.append(item)
                self._admit(pending)
                if not self._slots:
                    return
                yield from self._step(stats)
        except GeneratorExit:
            raise  # between two steps, where every slot is what it is counted as
        except BaseException:
            # A step that broke off has written nobody knows what: no later request may share its rows.
            for slot in range(self.engine.slots):
                self.engine.forget(slot, 0)
            raise
        finally:
            for slot in list(self._slots):
                self._release(slot)

    def cancel(self, request: Request) -> None:
        """End a request early; its slot is free for the next one."""
        for slot, held in list(self._slots.items()):
            if held.request is request:
                self._release(slot)

    def _release(self, slot: int) -> None:
        """Take a slot's request out before its end; of its tokens only those whose rows ran count from now on."""
        held = self._slots.pop(slot)
        self.engine.stop(slot)
        if not held.running:
            self.engine.forget(slot, held.fed)

    def _admit(self, pending: deque[Request]) -> None:
        free = [s for s in range(self.engine.slots) if s not in self._slots]
        while pending and free:
            request = pending.popleft()
            common = {s: self._common(s, request.ids) for s in free}
            slot = max(free, key=lambda s: (common[s], -s))
            free.remove(slot)
            count = request.ids.shape[0]
            # Row t of a drafter may hold token t + 1, so the last common row runs again; so does row n - 2,
            # which methods carry a hidden state from.
            fed = max(min(common[slot] - 1, count - 2), 0)
            self._families = join(self._families, request.families)
            self.engine.use(self._families)
            self.engine.bind(
                slot,
                request.ids,
                limit=request.limit,
                eos=request.eos,
                seed=request.seed,
                is_coupled=request.rule == "coupled",
                settings=request.settings,
            )
            self._slots[slot] = _Slot(request, fed, count)

    def _common(self, slot: int, ids: Tensor) -> int:
        if self.engine.builder.shape.switch is not None:
            return 0  # the cached rows may have been made with the other rotary frequencies
        history = self.engine.history(slot)[:-1]  # the newest token has no K/V yet
        shared = min(history.shape[0], ids.shape[0])
        if not shared:
            return 0
        differs = (history[:shared] != ids[:shared].to(history.device)).to(torch.int64)
        return int(differs.argmax()) if bool(differs.any()) else shared

    def _step(self, stats: Stats) -> Iterator[Progress]:
        rows = self._fill()
        filling = bool(rows) or any(not s.running for s in self._slots.values())
        # Slots that start now do not draft yet, so without others a filling step needs no drafts.
        block = self.block if not filling or any(s.running for s in self._slots.values()) else 0
        feed = self.engine.feed if filling else 0
        if self.is_uniform:
            block, feed = self.block, self.engine.feed
        key = self._key(block, feed)
        if feed:
            self.engine.set_feed(rows)
        if filling:
            ready = [i for i, s in self._slots.items() if not s.running and s.fed >= s.length - 1]
            self.engine.start(ready)
            for slot in ready:
                self._slots[slot].running = True
        if not self.drafts:
            self.engine.start(
                [i for i, s in self._slots.items() if s.running]
            )  # in a first step nothing is drafted
        begin = time.perf_counter()
        rules = {i: s.request.own for i, s in self._slots.items() if s.running and s.request.own.needs_host}
        records = self.engine.step(key, rules)
        stats.device_steps += 1
        if filling:
            stats.prefill_steps += 1
        else:
            stats.step_seconds += time.perf_counter() - begin
        for slot, held in list(self._slots.items()):
            record = records[slot]
            if not held.running or not record.tokens:
                continue
            if record.fault:
                raise UnsupportedError(
                    "this generation cannot go on",
                    ["the target's logits, or what the settings left of them, are NaN or all -inf"],
                    "Check that the settings leave a token to say; then the weights, and the dtype: float16 and "
                    "bfloat16 may overflow where float32 does not.",
                )
            stats.add(record)
            finish = None if record.finish == RUNNING else "stop" if record.finish == STOP else "length"
            if finish is not None:
                del self._slots[slot]
                self.engine.stop(slot)
            else:
                self._advance(slot, held, len(record.tokens))
            yield Progress(held.request, record, finish, slot)

    def _advance(self, slot: int, held: _Slot, count: int) -> None:
        """Count new tokens; past the length where rotary frequencies switch, every row has to run again."""
        before, held.length = held.length, held.length + count
        switch = self.engine.builder.shape.switch
        if switch is not None and before <= switch < held.length:
            self.engine.rewind(slot)
            held.fed, held.running = 0, False

    def _fill(self) -> list[tuple[int, int]]:
        """Return the prompt rows of the next step, the oldest request first."""
        rows: list[tuple[int, int]] = []
        for slot, held in self._slots.items():
            take = min(held.length - 1 - held.fed, self.engine.feed - len(rows))
            if held.running or take <= 0:
                continue
            rows.extend((slot, position) for position in range(held.fed, held.fed + take))
            held.fed += take
        return rows

    def _key(self, block: int, feed: int) -> StepKey:
        rules = {s.request.rule for s in self._slots.values()}
        rule = self.rule if rules <= {self.rule} else "mixed"
        return StepKey(block, feed, rule, self._families, self.extras)
