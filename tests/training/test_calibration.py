"""The bias and the temperatures are found, and take the error away."""

from __future__ import annotations

import torch

from specc.training.calibration import calibration_error, fit_bias, fit_confidence


def test_known_temperatures_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(20000, 3, generator=generator) * 1.5
    accepted = torch.sigmoid(true)
    factors = torch.tensor([2.0, 0.5, 1.0])
    fitted = fit_confidence(true * factors, accepted, has_bias=False)
    assert fitted.bias == 0
    torch.testing.assert_close(torch.tensor(fitted.temperatures), factors, rtol=0.08, atol=0)
    assert all(after < 0.01 for after in fitted.after)
    assert fitted.before[0] > 0.05
    assert fitted.before[1] > 2 * fitted.after[1]


def test_error_counts_bins_by_their_size() -> None:
    predicted = torch.tensor([0.05, 0.05, 0.05, 0.95])
    happened = torch.tensor([0.0, 0.0, 0.0, 0.0])
    assert abs(calibration_error(predicted, happened) - (0.75 * 0.05 + 0.25 * 0.95)) < 1e-6


def test_an_offset_is_the_biases_not_the_temperatures() -> None:
    generator = torch.Generator().manual_seed(1)
    true = torch.randn(20000, 3, generator=generator) * 1.5
    drawn = torch.rand(true.shape, generator=generator) < torch.sigmoid(true)  # labels may be 0 and 1, too
    for accepted in (torch.sigmoid(true), drawn.float()):
        fitted = fit_confidence(true + 0.9, accepted)
        assert abs(fitted.bias + 0.9) < 0.05
        assert fitted.temperatures[:2] == (
            1.0,
            1.0,
        )  # few drafts reach the third: its own is in the next line's error
        assert fitted.before[0] > 0.1
        assert all(after < 0.01 for after in fitted.after)
    assert fit_confidence(true + 0.9, torch.sigmoid(true)).temperatures == (1.0, 1.0, 1.0)
    assert max(fit_confidence(true + 0.9, drawn.float(), has_bias=False).after) > 0.03


def test_nothing_and_everything_accepted_end_somewhere() -> None:
    logits = torch.zeros(5, 2)
    assert fit_bias(logits, torch.zeros(5, 2)) < -15
    assert fit_bias(logits, torch.ones(5, 2)) > 15
