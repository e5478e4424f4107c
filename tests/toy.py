"""Step graphs of a few nodes, traced from a plain function, for tests of passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specc.contracts import TensorSpec
from specc.graph import Input, Kind, StepGraph
from specc.stitch import kind_of
from specc.trace import Tracer

CPU = torch.device("cpu")
Spec = tuple[tuple[int, ...], torch.dtype]


def toy(
    function: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], *, stage: str = "verify",
    storage: Mapping[str, str] | None = None, tracer: Tracer | None = None, kinds: Mapping[str, Kind] | None = None,
    **inputs: Spec,
) -> StepGraph:  # fmt: skip
    """Trace ``function``; inputs are named with ``__`` for the dot: ``target__head=((8, 4), torch.float32)``."""
    specs = {}
    for name, (shape, dtype) in inputs.items():
        dotted = name.replace("__", ".")
        kind = (kinds or {}).get(dotted, kind_of(dotted))
        specs[Input(dotted, kind, (storage or {}).get(dotted, ""))] = TensorSpec(shape, dtype)
    return (tracer or Tracer(CPU)).trace(stage, function, specs)


def f32(*shape: int) -> Spec:
    return shape, torch.float32


def i64(*shape: int) -> Spec:
    return shape, torch.int64


def run(graph: StepGraph, **values: Tensor) -> dict[str, Tensor]:
    """Run a graph on named tensors; returns its outputs by name."""
    graph.gm.recompile()
    out = graph.gm(*[values[item.name.replace(".", "__")] for item in graph.inputs])
    return dict(zip(graph.outputs, out, strict=True))


def targets(graph: StepGraph) -> list[str]:
    """Return the operators of a graph, in order."""
    return [str(node.target) for node in graph.call_nodes()]
