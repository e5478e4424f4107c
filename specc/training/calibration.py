"""Sequential temperature scaling of a confidence head, and the error it removes (methods.md 5.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 10
_LOW, _HIGH, _GRID = 0.2, 5.0, 97


@dataclass(frozen=True)
class Calibration:
    """A temperature per draft position, and the expected calibration error of the survival at each."""

    temperatures: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


def calibration_error(predicted: Tensor, happened: Tensor, bins: int = BINS) -> float:
    """Return the mean of |predicted - happened| over bins of the prediction, weighted by their sizes."""
    index = (predicted * bins).long().clamp(0, bins - 1)
    sums = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, (predicted - happened).double())
    return float(sums.abs().sum() / max(len(predicted), 1))


def fit_temperatures(logits: Tensor, accepted: Tensor) -> Calibration:
    """Fit temperatures left to right: each minimises the error of the product up to its position.

    Args:
        logits: [rows, positions], the confidence head's.
        accepted: [rows, positions], the probability that each draft is accepted if all before it are.
    """
    survived = accepted.float().cumprod(1)
    grid = torch.logspace(torch.tensor(_LOW).log10().item(), torch.tensor(_HIGH).log10().item(), _GRID)
    raw = torch.sigmoid(logits.float()).cumprod(1)
    kept = torch.ones(len(logits))
    temperatures, before, after = [], [], []
    for position in range(logits.shape[1]):
        happened = survived[:, position]
        chances = [kept * torch.sigmoid(logits[:, position].float() / t) for t in grid]
        errors = [calibration_error(chance, happened) for chance in chances]
        # Equal errors: the temperature nearest to 1, so that a head that is right is left alone.
        best = min(range(len(grid)), key=lambda i: (round(errors[i], 9), abs(float(grid[i].log()))))
        temperatures.append(round(float(grid[best]), 4))
        before.append(calibration_error(raw[:, position], happened))
        after.append(errors[best])
        kept = chances[best]
    return Calibration(tuple(temperatures), tuple(before), tuple(after))
