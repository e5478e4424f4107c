"""Calibrate a confidence head on answers it was not trained on: its bias, then a temperature per position.

A drafter guesses the answers it was trained on better than others, and its confidence head has learnt how
well it guesses those. That is an offset alike at all positions: the head's own bias takes it. What is left is
sequential temperature scaling (methods.md 5.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 10
_LOW, _HIGH, _GRID = 0.2, 5.0, 97
_FURTHEST, _HALVINGS = 20.0, 60  # of a bias; what a sigmoid of it leaves is below float32's step


@dataclass(frozen=True)
class Calibration:
    """What the bias moves by, a temperature per draft position, and the calibration error of the survival at each.

    ``before`` is the error of the head as it was trained, ``after`` that with both.
    """

    bias: float
    temperatures: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


def calibration_error(predicted: Tensor, happened: Tensor, bins: int = BINS) -> float:
    """Return the mean of |predicted - happened| over bins of the prediction, weighted by their sizes."""
    index = (predicted * bins).long().clamp(0, bins - 1)
    sums = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, (predicted - happened).double())
    return float(sums.abs().sum() / max(len(predicted), 1))


def fit_bias(logits: Tensor, accepted: Tensor) -> float:
    """Return the likeliest offset of the logits: with it as many drafts are accepted as are foretold.

    Args:
        logits, accepted: as `fit_confidence` takes them; a draft counts as often as it is reached.
    """
    reached = torch.cat([torch.ones(len(accepted), 1), accepted.float().cumprod(1)[:, :-1]], 1).double()
    wanted = (accepted.double() * reached).sum()
    low, high = -_FURTHEST, _FURTHEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if (torch.sigmoid(logits.double() + middle) * reached).sum() < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def fit_confidence(logits: Tensor, accepted: Tensor, *, has_bias: bool = True) -> Calibration:
    """Fit the bias, then temperatures left to right: each minimises the error of the product up to its position.

    Args:
        logits: [rows, positions], the confidence head's.
        accepted: [rows, positions], the probability that each draft is accepted if all before it are.
        has_bias: Whether the head has one to move.
    """
    survived = accepted.float().cumprod(1)
    bias = round(fit_bias(logits, accepted), 4) if has_bias else 0.0
    grid = torch.logspace(torch.tensor(_LOW).log10().item(), torch.tensor(_HIGH).log10().item(), _GRID)
    raw = torch.sigmoid(logits.float()).cumprod(1)
    logits = logits + bias
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
    return Calibration(bias, tuple(temperatures), tuple(before), tuple(after))
