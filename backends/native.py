"""Run a step graph operator by operator with this device's own kernels: nothing to compile but these, once.

Between `eager`, the reference, and `inductor`, which takes minutes to compile: for short jobs and for big batches,
where the time goes into matrix products anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.backends.eager import Eager
from specc.backends.lowering import with_kernels
from specc.graph import StepGraph


@dataclass(frozen=True)
class Native:
    """Interpret the graph, its specc operators replaced by the device's kernels."""

    name: str = "native"

    def reject(self, device: torch.device) -> tuple[str, ...]:
        if device.type != "cpu":
            return (f"it has kernels for the CPU only, not for {device.type}",)
        return ()

    def build(self, graph: StepGraph) -> Callable[..., tuple[Tensor, ...]]:
        return Eager().build(with_kernels(graph))
