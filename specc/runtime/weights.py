"""Notice weights that changed after compile: a compiled step must never mix old and new ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specc.errors import UnsupportedError

_SAMPLES = 64  # elements per tensor that a checksum reads


class WeightWatch:
    """Remembers address, version counter and a sampled checksum of every weight."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = dict(weights)
        self._seen = {name: _mark(tensor) for name, tensor in self._weights.items()}

    def check(self) -> None:
        """Raise UnsupportedError naming the weights that are not what they were at compile time."""
        changed = [n for n, t in self._weights.items() if _mark(t) != self._seen[n]]
        if changed:
            more = [f"... and {len(changed) - 5} more"] if len(changed) > 5 else []
            raise UnsupportedError(
                "the model's weights changed after compile",
                [*changed[:5], *more],
                "Compile again: the compiled steps and their caches belong to the old weights.",
            )


def _mark(tensor: Tensor) -> tuple[int, int, str]:
    """Return address, version and checksum; in-place writes raise the version, others change the checksum.

    The checksum is text, because a NaN equals itself there.
    """
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    step = max(1, flat.shape[0] // _SAMPLES)
    version = -1 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, repr(float(flat[::step].to(torch.float64).sum()))
