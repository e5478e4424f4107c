"""The head's loss in pieces equals the plain one, and so does its gradient."""

from __future__ import annotations

import pytest
import torch

from specc.training import soft_cross as module
from specc.training.soft_cross import soft_cross


def make(rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    # Mass below 1: the rest of the target's vocabulary. One label has none at all.
    p = torch.rand(7, 50, generator=generator, dtype=torch.float64).softmax(-1)[:, :40]
    p[3] = 0
    return hidden, weight, p, torch.randint(0, 7, (rows,), generator=generator)


@pytest.mark.parametrize("rows", [1, 3, 4, 11])
def test_equals_the_plain_loss(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 4)
    hidden, weight, p, place = make(rows)
    weigh = torch.rand(rows, dtype=torch.float64)
    own, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    cross, likeliest, inside = soft_cross(own, weight, p, place)
    (cross * weigh).sum().backward()
    logits, label = plain @ weight.T, p[place]
    mass = label.sum(-1)
    full = logits.logsumexp(-1) - (label * logits).sum(-1) / mass.clamp(min=1e-9)
    (full * weigh).sum().backward()
    torch.testing.assert_close(cross.double(), full, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.grad, plain.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(likeliest, logits.argmax(-1))
    assert not inside.any()
    with torch.no_grad():
        inside = soft_cross(hidden, weight, p, place)[2]
    torch.testing.assert_close(
        inside.double(), torch.minimum(logits.softmax(-1), label).sum(-1), rtol=1e-5, atol=1e-6
    )
    assert p[3].eq(0).all(), "labels are the caller's"


def test_half_precision_is_near() -> None:
    hidden, weight, p, place = (v.float() if v.is_floating_point() else v for v in make(9))
    own, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = soft_cross(own, weight, p, place)[0]
    wide = soft_cross(plain, weight, p, place)[0]
    narrow.sum().backward()
    wide.sum().backward()
    assert own.grad is not None
    assert narrow.dtype == own.grad.dtype == torch.float32
    assert (narrow - wide).norm() < 0.01 * wide.norm()
    assert plain.grad is not None
    assert (own.grad - plain.grad).norm() < 0.01 * plain.grad.norm()
