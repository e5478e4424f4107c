"""The engine: one state, a family of step graphs, and slots to bind sequences to.

It knows tensors and slots, not requests. Graphs are built and compiled on first use and kept; the state's
addresses never change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.build import BuiltStep, StepBuilder
from specc.contracts import Backend, TensorSpec
from specc.errors import InputError
from specc.runtime.state import StepState, allocate
from specc.sampling import neutral, settings_columns
from specc.step import MAX_EOS, RECORD, StepKey

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotRecord:
    """What one step did to one slot."""

    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    finish: int
    fault: bool


@dataclass
class _Runner:
    built: BuiltStep
    call: Callable[..., tuple[Tensor, ...]]
    inputs: list[Tensor]


class Engine:
    """Steps the slots of one compiled object.

    Args:
        builder: makes the step graphs.
        backend: compiles them.
        feed: prompt rows per filling step.
    """

    def __init__(self, builder: StepBuilder, backend: Backend, feed: int) -> None:
        self.builder, self.backend, self.feed = builder, backend, feed
        specs = dict(builder.state())
        specs |= {name: TensorSpec((feed,), torch.int64) for name in ("feed.slot", "feed.position")}
        self.state: StepState = allocate(specs, builder.device)
        self._runners: dict[StepKey, _Runner] = {}
        self.compiles: list[str] = []
        self.outputs: dict[str, Tensor] = {}

    @property
    def slots(self) -> int:
        return self.builder.shape.slots

    @property
    def capacity(self) -> int:
        return self.builder.shape.capacity

    def runner(self, key: StepKey) -> _Runner:
        """Return the compiled step of ``key``, building it if this is its first use."""
        if key not in self._runners:
            begin = time.perf_counter()
            self.declare(key.families)
            built = self.builder.step(key)
            call = self.backend.build(built.graph)
            tensors = self.state.named() | self.builder.weights
            inputs = [tensors[i.storage if i.kind == "weight" else i.name] for i in built.graph.inputs]
            self._runners[key] = _Runner(built, call, inputs)
            what = f"block {key.block}, feed {key.feed}, {'sampled' if key.sampled else 'greedy'}"
            what += f", {'+'.join(key.families)}" if key.families else ""
            self.compiles.append(what)
            logger.info("compiled step (%s) on %s: %.1f s", what, self.backend.name, time.perf_counter() - begin)
        return self._runners[key]

    def declare(self, families: Sequence[str]) -> None:
        """Allocate the settings columns of families that are new here, neutral in every slot."""
        for name, column in settings_columns(families).items():
            if name not in self.state.setting:
                shape = (self.slots, *column.shape)
                self.state.setting[name] = neutral(name, column, shape, self.builder.device)

    @torch.no_grad()
    def bind(
        self, slot: int, ids: Tensor, *, limit: int, eos: Sequence[int], seed: int,
        settings: Mapping[str, object], keep: int = 0, prompt_length: int | None = None,
    ) -> None:
        """Give a slot to a new sequence; it does not run before `feed_rows` and `start`.

        Args:
            ids: int64 [tokens], the prompt.
            limit: total tokens at which the slot stops.
            eos: ids that end the sequence.
            seed: 64-bit seed of the slot's random streams.
            settings: values of the settings columns that are not neutral.
            keep: leading tokens already in the slot (a shared prefix).
        """
        if len(eos) > MAX_EOS:
            raise InputError("eos_token_id", list(eos), f"at most {MAX_EOS} ids end a sequence")
        state = self.state.state
        count = ids.shape[0]
        state["tokens"][slot, keep:count] = ids[keep:].to(state["tokens"].device)
        state["length"][slot] = count
        state["prompt_length"][slot] = count if prompt_length is None else prompt_length
        state["limit"][slot] = limit
        state["running"][slot] = False
        state["eos"][slot] = torch.tensor([*eos, *[-1] * (MAX_EOS - len(eos))])
        for name, tensor in self.state.setting.items():
            column = settings_columns(None).get(name)
            if name == "seed":
                tensor[slot] = seed
            elif name in settings:
                value = settings[name]
                tensor[slot] = torch.as_tensor(value, dtype=tensor.dtype)
            elif column is not None:
                tensor[slot] = neutral(name, column, tuple(tensor.shape[1:]), tensor.device)

    def start(self, slots: Sequence[int]) -> None:
        """Let slots take part in the next steps."""
        for slot in slots:
            self.state.state["running"][slot] = True

    def stop(self, slot: int) -> None:
        """Take a slot out of the next steps; its tokens and caches stay, for a shared prefix."""
        self.state.state["running"][slot] = False

    def history(self, slot: int) -> Tensor:
        """Return the committed tokens of a slot, int64 [tokens]."""
        return self.state.state["tokens"][slot, : int(self.state.state["length"][slot])]

    def set_feed(self, rows: Sequence[tuple[int, int]]) -> None:
        """Set the prompt rows (slot, position) of the next filling step; the rest is padding."""
        pad = self.feed - len(rows)
        self.state.feed["slot"].copy_(torch.tensor([r[0] for r in rows] + [0] * pad))
        self.state.feed["position"].copy_(torch.tensor([r[1] for r in rows] + [-1] * pad))

    def step(self, key: StepKey) -> list[SlotRecord]:
        """Run one step and return what it did to every slot."""
        runner = self.runner(key)
        values = runner.call(*runner.inputs)
        self.outputs = dict(zip(runner.built.graph.outputs, values, strict=True))
        records = []
        for row in self.outputs["record"].tolist():
            count, accepted, drafted, finish, fault = row[: len(RECORD)]
            tokens = tuple(row[len(RECORD) : len(RECORD) + count])
            records.append(SlotRecord(tokens, accepted, drafted, finish, bool(fault)))
        return records
