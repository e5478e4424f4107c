"""The reference loop agrees with itself: speculation changes no greedy and no coupled token."""

from __future__ import annotations

import pytest
import torch

from tests import reference

TABLE = torch.randn(6, 6, generator=torch.Generator().manual_seed(2)) * 2
NOISY = TABLE + torch.randn(6, 6, generator=torch.Generator().manual_seed(4))
SETTINGS = {"repetition_penalty": 1.2, "temperature": 0.8, "top_k": 4, "top_p": 0.95}


def _run(block: int, do_sample: bool, guess, rule: str = "coupled") -> reference.Generation:
    return reference.generate(
        lambda history: TABLE[history[-1]], [0, 3], 20, drafter=guess, block=block, rule=rule, seed=12345,
        settings=SETTINGS, eos=(5,), do_sample=do_sample,
    )  # fmt: skip


GUESSES = {
    "noisy": lambda history: NOISY[history[-1]],
    "point": lambda history: (history[-1] + 1) % 6,
    "none": lambda history: None if len(history) % 2 else NOISY[history[-1]],
}


@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES)
@pytest.mark.parametrize("do_sample", [False, True])
def test_speculation_changes_no_token(guess, do_sample):
    plain = _run(0, do_sample, None)
    spoken = _run(3, do_sample, guess)
    assert spoken.tokens == plain.tokens
    assert sum(spoken.counts) == spoken.accepted <= spoken.drafted
    assert len(spoken.counts) <= len(plain.counts)


def test_a_perfect_drafter_is_accepted_by_the_ratio_test():
    result = reference.generate(
        lambda history: TABLE[history[-1]], [0], 12, drafter=lambda history: TABLE[history[-1]], block=3,
        do_sample=True, seed=9,
    )  # fmt: skip
    assert result.counts == [3, 3, 3]
    assert len(result.tokens) == 12
