"""Add the residual stream after chosen layers to a rows graph's outputs.

Before:  %9 = aten.add.Tensor(...)  (the last node of layer j - 1)   return logits=%20
After:   %21 = aten.cat.default([%9, ...], -1)                        return logits=%20, taps=%21

"After j layers" is the last value of layer j - 1 that has the residual stream's shape; j = 0 is what layer 0
reads. The order of the taps is the order given, never sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from specc.contracts import Pass
from specc.errors import InvariantError
from specc.graph import StepGraph

aten = torch.ops.aten


def insert_taps(taps: Sequence[int], layer_paths: Sequence[str], hidden: int) -> Pass:
    """Return the pass that adds ``taps`` ("after j layers") as one output [rows, taps * hidden]."""

    def run(graph: StepGraph) -> StepGraph:
        if not taps:
            return graph
        streams = [_after(graph, j, layer_paths, hidden) for j in taps]
        end = graph.output_node()
        with graph.graph.inserting_before(end):
            picked = [_add(graph.graph, aten.select.int, s, 0, 0) for s in streams]
            joined = _add(graph.graph, aten.cat.default, picked, -1)
        end.args = ([*graph.output_values(), joined],)
        graph.outputs = (*graph.outputs, "taps")
        return graph

    return Pass("insert_taps", run, gives=frozenset({"taps"}) if taps else frozenset())


def _add(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values: Any = fx.map_arg(args, lambda n: n.meta["val"])
    node.meta["val"] = target(*values)
    return node


def _after(graph: StepGraph, j: int, layer_paths: Sequence[str], hidden: int) -> fx.Node:
    if not 0 <= j <= len(layer_paths):
        raise InvariantError(
            f"a tap after {j} layers needs {j} layers; there are {len(layer_paths)}", where="insert_taps"
        )
    if j == 0:
        return _entering(graph, layer_paths[0], hidden)
    inside: list[fx.Node] = [
        n for n in graph.graph.nodes if _is_in(n, layer_paths[j - 1]) and _is_stream(n, hidden)
    ]
    if not inside:
        raise InvariantError(
            "a layer has no value of the residual stream's shape", layer_paths[j - 1], "insert_taps"
        )
    return inside[-1]


def _entering(graph: StepGraph, path: str, hidden: int) -> fx.Node:
    for node in graph.graph.nodes:
        if _is_in(node, path):
            source: fx.Node
            for source in node.all_input_nodes:
                if not _is_in(source, path) and source.op == "call_function" and _is_stream(source, hidden):
                    return source
    raise InvariantError("the first layer reads no residual stream", path, "insert_taps")


def _is_in(node: fx.Node, path: str) -> bool:
    stack = node.meta.get("nn_module_stack", {})
    return any(entry[0].removeprefix("model.") == path for entry in stack.values())


def _is_stream(node: fx.Node, hidden: int) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dim() == 3
        and value.shape[-1] == hidden
    )
