"""Compile a step graph with Inductor: one unit for draft and verify, one for accept, one for commit.

The accept tail is a unit of its own, so that a new family of sampling settings compiles the tail alone; a unit whose
graph was compiled before is not compiled again. No dynamo runs: the graph is already whole and static, so there are no
guards and nothing can recompile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from specc.backends.lowering import with_kernels
from specc.graph import StepGraph

logger = logging.getLogger(__name__)

_UNIT = {"draft": 0, "verify": 0, "accept": 1, "commit": 2}


@dataclass
class Inductor:
    """Lower to Inductor's kernels; specc's operators stay calls."""

    name: str = "inductor"
    compiled: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False)

    def reject(self, device: torch.device) -> tuple[str, ...]:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        if device.type != "cpu":
            return ()
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            return (f"no C++ compiler was found: {error}",)
        return ()

    def build(self, graph: StepGraph) -> Callable[..., tuple[Tensor, ...]]:
        graph = with_kernels(graph)
        # split_module reads the graph; it keeps node metadata and the order of nodes.
        split = split_module(
            graph.gm, graph.gm, lambda node: _UNIT[node.meta["stage"]], keep_original_order=True
        )
        for name, unit in list(split.named_children()):
            assert isinstance(unit, fx.GraphModule)
            setattr(split, name, _Unit(self._compile(name, unit)))

        @torch.no_grad()
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(split(*inputs))

        return run

    def _compile(self, name: str, unit: fx.GraphModule) -> Callable[..., Any]:
        text = _text(unit)
        if text not in self.compiled:
            begin = time.perf_counter()
            values = [n.meta["val"] for n in unit.graph.find_nodes(op="placeholder")]
            self.compiled[text] = _lower(unit, values)
            logger.info("inductor: compiled %s, %.1f s", name, time.perf_counter() - begin)
        return self.compiled[text]


class _Unit(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)


def _lower(unit: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor import compile as inductor_compile

    single = not isinstance(unit.graph.output_node().args[0], (tuple, list))
    if single:  # Inductor wants a tuple
        output = unit.graph.output_node()
        output.args = ((output.args[0],),)
        unit.recompile()
    with torch.no_grad():
        call: Callable[..., Any] = inductor_compile(unit, list(values))
    return (lambda *inputs: call(*inputs)[0]) if single else call


def _text(unit: fx.GraphModule) -> str:
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
