"""Run a step graph operator by operator, as it is printed. The reference that other backends must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.graph import StepGraph


@dataclass(frozen=True)
class Eager:
    """Interpret the graph with torch's own kernels."""

    name: str = "eager"

    def reject(self, device: torch.device) -> tuple[str, ...]:
        return ()

    def build(self, graph: StepGraph) -> Callable[..., tuple[Tensor, ...]]:
        module = graph.gm

        @torch.no_grad()
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(module(*inputs))

        return run
