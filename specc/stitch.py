"""Make one step graph of four stage graphs, wherever they come from: traced just now, or read from a package.

It imports neither models nor the tracer, so that a loaded package can run without either.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, fx, nn

from specc.contracts import DrafterInfo, ModelInfo, Stage, TensorSpec
from specc.graph import Input, Kind, StepGraph
from specc.passes import STEP_PIPELINE
from specc.pipeline import PassReport, run_passes
from specc.step import Shape, StepKey
from specc.tree import Tree


@dataclass
class BuiltStep:
    """A step graph after its passes, with what each pass did."""

    key: StepKey
    graph: StepGraph
    reports: tuple[PassReport, ...]


@runtime_checkable
class StepSource(Protocol):
    """Where an engine gets its steps, state and weights from: a `StepBuilder`, or a loaded package."""

    @property
    def shape(self) -> Shape: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Every weight by its name as a graph input; names of one storage may share a tensor."""

    @property
    def target_info(self) -> ModelInfo: ...

    @property
    def drafter_info(self) -> DrafterInfo | None: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """The target states that the method reads, each "after j layers"."""

    @property
    def rows_reports(self) -> tuple[PassReport, ...]:
        """What the passes over the target's rows graph did."""

    def tree(self, block: int) -> Tree | None:
        """Return the shape of a draft of ``block`` tokens, or None where it is a chain."""

    def state(self) -> dict[str, TensorSpec]:
        """Return every state tensor of the step, the method's and the caches included."""

    def stage(self, stage: Stage, key: StepKey) -> StepGraph:
        """Return one stage of the step of ``key``; it is not to be changed."""

    def step(self, key: StepKey) -> BuiltStep:
        """Return the step graph of ``key`` after its passes."""


def kind_of(name: str) -> Kind:
    """Return what an input is, from its name's first part."""
    first = name.split(".", 1)[0]
    kinds: dict[str, Kind] = {
        "target": "weight",
        "drafter": "weight",
        "state": "state",
        "cache": "state",
        "method": "state",
        "setting": "setting",
        "feed": "host",
    }
    return kinds.get(first, "value")


def relevant(stage: Stage, key: StepKey) -> StepKey:
    """Return the part of the key that a stage depends on, so that equal parts share one trace."""
    rule = key.rule if key.sampled else "ratio"  # greedy slots are judged alike under every rule
    key = replace(key, part="whole")
    if stage == "accept":
        return replace(key, rule=rule)
    if stage == "draft":
        return replace(key, rule=rule, families=("temperature",) if key.sampled else (), extras=())
    # What verify and commit read does not depend on how drafts are drawn and judged.
    extras = tuple(e for e in key.extras if e == "hidden") if stage == "verify" else ()
    return replace(key, rule="ratio", families=(), extras=extras)


def assemble(
    stages: Sequence[StepGraph], key: StepKey, disable: Sequence[str] = (), dump: Path | None = None
) -> BuiltStep:
    """Return the step graph of ``stages``: stitched, then rewritten by the passes.

    Args:
        stages: in order; they are copied, not changed.
        key: what the step is called.
        disable: names of passes to leave out; names of other pipelines' passes are nothing to this one.
        dump: a folder for the graph as text after every pass, or None.
    """
    known = {p.name for p in STEP_PIPELINE}
    graph, reports = run_passes(
        stitch(stages, key), STEP_PIPELINE, disable=[n for n in disable if n in known], dump=dump
    )
    return BuiltStep(key, graph, reports)


def stitch(stages: Sequence[StepGraph], key: StepKey) -> StepGraph:
    """Return a graph of one call per stage of the key's part, wired by the names of values.

    A value that no stage of the part makes becomes an input that the host hands over; what later parts read is output.
    """
    stages = [s for s in stages if s.name in key.stages]
    made = {name for stage in stages for name in stage.outputs}
    root = nn.Module()
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    for stage in stages:
        for node in stage.graph.find_nodes(op="placeholder"):
            given = node.meta["input"]
            if given.kind == "value" and given.name not in made:
                given = replace(given, kind="host")
            if given.name not in known and given.kind != "value":
                placeholder = graph.placeholder(given.name.replace(".", "_"))
                placeholder.meta = {"input": given, "val": node.meta["val"]}
                known[given.name] = placeholder
    outputs: list[str] = []
    for stage in stages:
        if not stage.call_nodes():
            continue
        root.add_module(stage.name, stage.gm)
        arguments = tuple(known[i.name] for i in stage.inputs)
        call = graph.call_module(stage.name, arguments)
        values = [n.meta["val"] for n in stage.output_values()]
        call.meta = {"val": values, "stage": stage.name}
        for index, name in enumerate(stage.outputs):
            picked = graph.call_function(operator.getitem, (call, index))
            picked.meta = {"val": values[index], "stage": stage.name}
            known[name] = picked
            if "." not in name or name == "draft.confidence" or key.part in ("verify", "target"):
                outputs.append(name)
    graph.output([known[n] for n in outputs]).meta["val"] = None
    gm = fx.GraphModule(root, graph)
    suffix = "" if key.part == "whole" else f"_{key.part}"
    return StepGraph(gm, (), tuple(outputs), name=f"step_k{key.block}_p{key.feed}{suffix}").sync()


def stage_inputs(
    specs: Mapping[str, TensorSpec], storage: Mapping[str, str], earlier: Sequence[StepGraph]
) -> dict[Input, TensorSpec]:
    """Return all that a stage may read: the tensors of ``specs``, and what earlier stages make."""
    inputs = {Input(n, kind_of(n), storage.get(n, "")): s for n, s in specs.items()}
    for made in earlier:
        for name, node in zip(made.outputs, made.output_values(), strict=True):
            value = node.meta["val"]
            inputs[Input(name, "value")] = TensorSpec(tuple(value.shape), value.dtype)
    return inputs
