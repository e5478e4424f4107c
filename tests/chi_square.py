"""The chi-square test of joint token counts against exact probabilities."""

from __future__ import annotations

import torch
from scipy import stats
from torch import Tensor


def p_value(tokens: Tensor, chances: Tensor) -> float:
    """Return how likely counts as far off as these are; 0 if a token came that cannot.

    Args:
        tokens: int64 [draws, emitted], what was emitted.
        chances: float64 [vocab, ...], one axis per emitted token: the joint probabilities.
    """
    draws, vocab = tokens.shape[0], chances.shape[0]
    expected = chances.flatten() * draws
    place = torch.tensor([vocab**power for power in reversed(range(chances.dim()))])
    counts = torch.bincount((tokens * place).sum(1), minlength=expected.numel()).double()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    rare = expected < 5
    cells = torch.cat([counts[~rare], counts[rare].sum()[None]])
    ideal = torch.cat([expected[~rare], expected[rare].sum()[None]])
    cells, ideal = cells[ideal > 1e-6], ideal[ideal > 1e-6]
    return float(stats.chisquare(cells.numpy(), (ideal / ideal.sum() * draws).numpy()).pvalue)
