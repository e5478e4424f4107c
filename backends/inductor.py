"""Compile a step graph with Inductor, unit by unit; a unit whose graph was compiled before is not compiled again.

No dynamo runs: the graph is already whole and static, so there are no guards and nothing can recompile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from specc.backends.lowering import with_kernels
from specc.backends.units import join, returns_one, split, unit_text, units, with_tuple
from specc.graph import StepGraph

logger = logging.getLogger(__name__)


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
        module = split(with_kernels(graph))
        return join(module, {name: self.unit(name, unit) for name, unit in units(module)})

    def unit(self, name: str, unit: fx.GraphModule) -> Callable[..., Any]:
        """Return a unit compiled, which may change the module; one of the same text is compiled once."""
        text = unit_text(unit)
        if text not in self.compiled:
            begin = time.perf_counter()
            values = [n.meta["val"] for n in unit.graph.find_nodes(op="placeholder")]
            self.compiled[text] = _lower(unit, values)
            logger.info("inductor: compiled %s, %.1f s", name, time.perf_counter() - begin)
        return self.compiled[text]


def _lower(unit: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor import compile as inductor_compile

    single = returns_one(unit)
    with torch.no_grad():
        call: Callable[..., Any] = inductor_compile(with_tuple(unit), list(values))
    return (lambda *inputs: call(*inputs)[0]) if single else call
