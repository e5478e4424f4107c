"""Cut a step graph into units that are compiled apart: draft and verify, accept, commit.

The accept tail is a unit of its own, so that a new family of sampling settings compiles the tail alone. A unit's text
says all that its code depends on, so equal units share one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from specc.graph import StepGraph

_UNIT = {"draft": 0, "verify": 0, "accept": 1, "commit": 2}


def split(graph: StepGraph) -> fx.GraphModule:
    """Return a module that calls the units of ``graph``, its children, in order."""
    # split_module reads the graph; it keeps node metadata and the order of nodes.
    return split_module(graph.gm, graph.gm, lambda node: _UNIT[node.meta["stage"]], keep_original_order=True)


def units(module: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    """Return the units of a split module with their names."""
    found = []
    for name, unit in module.named_children():
        assert isinstance(unit, fx.GraphModule)
        found.append((name, unit))
    return found


def join(module: fx.GraphModule, calls: dict[str, Callable[..., Any]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a callable that runs a split module with ``calls`` in place of its units."""
    for name, call in calls.items():
        setattr(module, name, _Unit(call))

    @torch.no_grad()
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(module(*inputs))

    return run


class _Unit(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)


def returns_one(unit: fx.GraphModule) -> bool:
    """Whether a unit returns a tensor rather than a tuple of them."""
    return not isinstance(_output(unit).args[0], (tuple, list))


def with_tuple(unit: fx.GraphModule) -> fx.GraphModule:
    """Let a unit that returns a tensor return a tuple of it, in place: Inductor wants one."""
    if returns_one(unit):
        output = _output(unit)
        output.args = ((output.args[0],),)
        unit.recompile()
    return unit


def _output(unit: fx.GraphModule) -> fx.Node:
    node: fx.Node = unit.graph.output_node()
    return node


def unit_text(unit: fx.GraphModule) -> str:
    """Return what makes a unit what it is: its nodes, their order, and the shapes and dtypes of its inputs."""
    number = {node: index for index, node in enumerate(unit.graph.nodes)}
    lines = []
    for node in unit.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        value = node.meta.get("val")
        shape = f"{value.dtype}{tuple(value.shape)}{value.stride()}" if isinstance(value, Tensor) else ""
        target = "" if node.op in ("placeholder", "output") else node.target
        lines.append(f"{node.op} {target} {arguments} {shape}")
    return "\n".join(lines)


def unit_digest(unit: fx.GraphModule) -> str:
    """Return the sha256 of a unit's text, in hexadecimal."""
    return hashlib.sha256(unit_text(unit).encode()).hexdigest()


def unit_stages(unit: fx.GraphModule) -> str:
    """Return which stages a unit holds: "draft+verify"."""
    stages = dict.fromkeys(n.meta["stage"] for n in unit.graph.nodes if n.op == "call_function")
    return "+".join(stages)
