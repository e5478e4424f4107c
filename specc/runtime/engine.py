"""The engine: one state, a family of step graphs, and slots to bind sequences to.

It knows tensors and slots, not requests. Graphs are built and compiled on first use and kept; the state's
addresses never change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specc.contracts import Backend, TensorSpec
from specc.errors import InputError
from specc.runtime.host_accept import OwnRules, judge
from specc.runtime.state import StepState, allocate
from specc.sampling import fit, settings_columns
from specc.step import MAX_EOS, RECORD, StepKey
from specc.stitch import BuiltStep, StepSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotRecord:
    """What one step did to one slot; of a tree, ``drafted`` is how deep it was."""

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

    def __init__(self, builder: StepSource, backend: Backend, feed: int) -> None:
        self.builder, self.backend, self.feed = builder, backend, feed
        specs = dict(builder.state())
        specs |= {name: TensorSpec((feed,), torch.int64) for name in ("feed.slot", "feed.position")}
        self.state: StepState = allocate(specs, builder.device)
        self._runners: dict[StepKey, _Runner] = {}
        self._columns: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._families: tuple[str, ...] = ()
        self._values: dict[int, Mapping[str, Tensor]] = {}
        self.compiles: list[str] = []
        self.outputs: dict[str, Tensor] = {}
        self._handed: dict[tuple[str, tuple[int, ...]], Tensor] = {}

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
            built = self.builder.step(key)
            call = self.backend.build(built.graph)
            tensors = {**self.state.named(), **self.builder.weights, **self._settings(key.families)}
            for node in built.graph.graph.find_nodes(op="placeholder"):
                if node.meta["input"].name not in tensors and node.meta["input"].kind == "host":
                    tensors[node.meta["input"].name] = self._hand(node.meta["input"].name, node.meta["val"])
            inputs = [tensors[i.storage if i.kind == "weight" else i.name] for i in built.graph.inputs]
            self._runners[key] = _Runner(built, call, inputs)
            what = f"block {key.block}, feed {key.feed}, {'sampled' if key.sampled else 'greedy'}"
            what += f", {'+'.join(key.families)}" if key.families else ""
            what += f", {key.part} part" if key.part != "whole" else ""
            self.compiles.append(what)
            logger.info(
                "compiled step (%s) on %s: %.1f s", what, self.backend.name, time.perf_counter() - begin
            )
        return self._runners[key]

    def _hand(self, name: str, like: Tensor) -> Tensor:
        """Return the tensor through which the host hands a value to a commit part, allocated once per shape."""
        place = (name, tuple(like.shape))
        if place not in self._handed:
            self._handed[place] = torch.zeros(like.shape, dtype=like.dtype, device=self.builder.device)
        return self._handed[place]

    def _settings(self, families: Sequence[str]) -> dict[str, Tensor]:
        """Return the settings tensors of ``families``, allocated once per name and shape."""
        tensors = {}
        for name, column in settings_columns(families).items():
            place = (name, column.shape)
            if place not in self._columns:
                shape = (self.slots, *column.shape)
                value = torch.full(shape, column.neutral, dtype=column.dtype, device=self.builder.device)
                self._columns[place] = value
            tensors[f"setting.{name}"] = self._columns[place]
        return tensors

    def use(self, families: Sequence[str]) -> None:
        """Choose the settings families of the next steps; every slot's values are put into their columns."""
        if tuple(families) != self._families:
            self._families = tuple(families)
            for slot in self._values:
                self._write_settings(slot)

    def _write_settings(self, slot: int) -> None:
        known = settings_columns(self._families)
        values = {n: t for n, t in self._values.get(slot, {}).items() if n in known}
        tensors = self._settings(self._families)
        for name, value in fit(values, self._families).items():
            tensors[f"setting.{name}"][slot] = value.to(self.builder.device)

    @torch.no_grad()
    def bind(
        self,
        slot: int,
        ids: Tensor,
        *,
        limit: int,
        eos: Sequence[int] = (),
        seed: int = 0,
        is_coupled: bool = False,
        settings: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Give a slot to a new sequence; it does not run before `feed_rows` and `start`.

        Args:
            ids: int64 [tokens], the prompt.
            limit: total tokens at which the slot stops.
            eos: ids that end the sequence.
            seed: 64-bit seed of the slot's random streams.
            is_coupled: which accept rule the slot follows in a "mixed" step.
            settings: values of the settings columns that are not neutral.
        """
        if len(eos) > MAX_EOS:
            raise InputError("eos_token_id", list(eos), f"at most {MAX_EOS} ids end a sequence")
        state = self.state.state
        count = ids.shape[0]
        state["tokens"][slot, :count] = ids.to(state["tokens"].device)
        state["length"][slot] = count
        state["prompt_length"][slot] = count
        state["reach"][slot] = count
        state["limit"][slot] = limit
        state["running"][slot] = False
        state["eos"][slot] = torch.tensor([*eos, *[-1] * (MAX_EOS - len(eos))])
        state["seed"][slot] = seed
        state["coupled"][slot] = is_coupled
        self._values[slot] = dict(settings or {})
        self._write_settings(slot)

    def start(self, slots: Sequence[int]) -> None:
        """Let slots take part in the next steps."""
        for slot in slots:
            self.state.state["running"][slot] = True
            self.state.state["fresh"][slot] = True

    def rewind(self, slot: int) -> None:
        """Take a slot out until its rows have been fed again, as one prompt of its present length."""
        self.state.state["running"][slot] = False
        self.state.state["reach"][slot] = self.state.state["length"][slot]

    def stop(self, slot: int) -> None:
        """Take a slot out of the next steps; its tokens and caches stay, for a shared prefix."""
        self.state.state["running"][slot] = False
        self._values.pop(slot, None)  # families chosen later need not have room for them

    def forget(self, slot: int, rows: int) -> None:
        """Count no more than the first ``rows`` tokens of a slot as tokens whose rows have run."""
        length = self.state.state["length"]
        length[slot] = min(int(length[slot]), rows + 1 if rows else 0)  # the newest token's row never has

    def history(self, slot: int) -> Tensor:
        """Return the committed tokens of a slot, int64 [tokens]."""
        return self.state.state["tokens"][slot, : int(self.state.state["length"][slot])]

    def set_feed(self, rows: Sequence[tuple[int, int]]) -> None:
        """Set the prompt rows (slot, position) of the next filling step; the rest is padding."""
        pad = self.feed - len(rows)
        self.state.feed["slot"].copy_(torch.tensor([r[0] for r in rows] + [0] * pad))
        self.state.feed["position"].copy_(torch.tensor([r[1] for r in rows] + [-1] * pad))

    def step(self, key: StepKey, rules: Mapping[int, OwnRules] | None = None) -> list[SlotRecord]:
        """Run one step and return what it did to every slot.

        Args:
            key: which step.
            rules: what the host has to apply to some slots; the step then runs in two parts around it.
        """
        if rules:
            self.outputs = self._step_by_host(key, rules)
        else:
            self.outputs = self._run(key)
        records = []
        for row in self.outputs["record"].tolist():
            count, accepted, drafted, finish, fault = row[: len(RECORD)]
            tokens = tuple(row[len(RECORD) : len(RECORD) + count])
            records.append(SlotRecord(tokens, accepted, drafted, finish, bool(fault)))
        return records

    @torch.no_grad()
    def read(self, key: StepKey, drafts: Tensor) -> Tensor:
        """Return the target's logits of a step's rows, float [slots, block + 1, vocab]; nothing is committed.

        Args:
            key: which step.
            drafts: int64 [slots, block], read in place of a method's.
        """
        runner = self.runner(replace(key, part="target"))
        for item, tensor in zip(runner.built.graph.inputs, runner.inputs, strict=True):
            if item.name == "draft.tokens":
                tensor.copy_(drafts)
        outputs = dict(zip(runner.built.graph.outputs, runner.call(*runner.inputs), strict=True))
        return outputs["verify.logits"].clone()

    def _run(self, key: StepKey) -> dict[str, Tensor]:
        runner = self.runner(key)
        return dict(zip(runner.built.graph.outputs, runner.call(*runner.inputs), strict=True))

    @torch.no_grad()
    def _step_by_host(self, key: StepKey, rules: Mapping[int, OwnRules]) -> dict[str, Tensor]:
        verify, commit = key.halves()
        made = self._run(verify)
        given = self.state.named() | self._settings(key.families) | made
        made |= judge(given, key, self.builder.shape, rules, self.builder.tree(key.block))
        runner = self.runner(commit)
        for item, tensor in zip(runner.built.graph.inputs, runner.inputs, strict=True):
            if item.name in made:
                tensor.copy_(made[item.name])
        runner.call(*runner.inputs)
        return made
