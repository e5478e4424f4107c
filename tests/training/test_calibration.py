"""Temperatures are fitted left to right and take the error away."""

from __future__ import annotations

import torch

from specc.training.calibration import calibration_error, fit_temperatures


def test_known_temperatures_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(20000, 3, generator=generator) * 1.5
    accepted = torch.sigmoid(true)
    factors = torch.tensor([2.0, 0.5, 1.0])
    fitted = fit_temperatures(true * factors, accepted)
    torch.testing.assert_close(torch.tensor(fitted.temperatures), factors, rtol=0.08, atol=0)
    assert all(after < 0.01 for after in fitted.after)
    assert fitted.before[0] > 0.05
    assert fitted.before[1] > 2 * fitted.after[1]


def test_error_counts_bins_by_their_size() -> None:
    predicted = torch.tensor([0.05, 0.05, 0.05, 0.95])
    happened = torch.tensor([0.0, 0.0, 0.0, 0.0])
    assert abs(calibration_error(predicted, happened) - (0.75 * 0.05 + 0.25 * 0.95)) < 1e-6
