"""The state of a compiled object: fixed-address tensors, grouped by owner, allocated once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from specc.contracts import TensorSpec

_NAMESPACE = "specc"


@optree.dataclasses.dataclass(namespace=_NAMESPACE)  # type: ignore[call-overload]
class StepState:
    """Every tensor a step reads and writes besides weights, by owner.

    ``state`` is the spine's, ``cache`` the target's K/V, ``method`` the drafter's, ``setting`` the per-slot sampling
    settings, ``feed`` the prompt rows of the next step.
    """

    state: dict[str, Tensor]
    cache: dict[str, Tensor]
    method: dict[str, Tensor]
    setting: dict[str, Tensor]
    feed: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by their names as graph inputs, like ``cache.key.0``."""
        whole: Any = self
        paths, leaves, _ = optree.tree_flatten_with_path(whole, namespace=_NAMESPACE)
        return {".".join(str(part) for part in path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def allocate(specs: Mapping[str, TensorSpec], device: torch.device) -> StepState:
    """Allocate zeroed tensors for ``specs``, whose names start with their owner."""
    groups: dict[str, dict[str, Tensor]] = {g: {} for g in ("state", "cache", "method", "setting", "feed")}
    for name, spec in specs.items():
        owner, rest = name.split(".", 1)
        groups[owner][rest] = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return StepState(**groups)
