"""Thresholds without a sort: the host's prefilter and the device's bisection against sorting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.sampling import cut
from specc.sampling.cut import kth_largest, nucleus_cut, typical_cut

NEVER = float("-inf")
PROFILE = settings(max_examples=100, derandomize=True, deadline=None)
KTH = pytest.mark.parametrize("kth", [kth_largest, cut._kth_device], ids=["host", "device"])


def _rows(seed: int, vocab: int, coarse: bool, banned: float) -> Tensor:
    """Return scores [3, vocab]; coarse ones hold many ties, some ids are banned."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, vocab, generator=generator) * 3
    if coarse:
        scores = (scores * 2).round() / 2
    hidden = torch.rand(3, vocab, generator=generator) < banned
    hidden[:, 0] = False
    return scores.masked_fill(hidden, NEVER)


ROWS = st.builds(
    _rows, st.integers(0, 10**6), st.sampled_from([1, 2, 5, 63, 64, 65, 300]), st.booleans(),
    st.sampled_from([0.0, 0.3, 0.95]),
)  # fmt: skip


@KTH
@PROFILE
@given(rows=ROWS, counts=st.lists(st.integers(0, 400), min_size=3, max_size=3))
def test_kth_largest(kth, rows, counts):
    got = kth(rows, torch.tensor(counts))
    for row, count, value in zip(rows, counts, got.tolist(), strict=True):
        best = row.sort(descending=True).values
        assert value == (float(best[min(count, len(best)) - 1]) if count else NEVER)


def _nucleus_kept(rows: Tensor, threshold: Tensor, first: Tensor) -> Tensor:
    index = torch.arange(rows.shape[1])
    return ~((rows < threshold[:, None]) | ((rows == threshold[:, None]) & (index < first[:, None])))


def _sorted_nucleus(row: Tensor, mass: float) -> Tensor:
    """Return what TopPLogitsWarper keeps."""
    ordered, ids = row.sort(stable=True)
    removed = ordered.softmax(0).cumsum(0) <= 1 - mass
    removed[-1] = False
    return torch.ones_like(row, dtype=torch.bool).scatter(0, ids, ~removed)


MASSES = st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.25, 0.5, 0.9, 0.97, 1.0]), min_size=3, max_size=3)


@PROFILE
@given(rows=ROWS, masses=MASSES)
def test_nucleus_on_the_host_equals_a_sort_to_the_last_id(rows, masses):
    kept = _nucleus_kept(rows, *nucleus_cut(rows, torch.tensor(masses, dtype=torch.float64)))
    for row, mass, mask in zip(rows, masses, kept, strict=True):
        assert torch.equal(mask, _sorted_nucleus(row, mass) if mass < 1 else torch.ones_like(mask))


@pytest.mark.parametrize("vocab", [10, 60, 200])
def test_nucleus_of_equal_scores(vocab):
    """Masses that the running sum meets within rounding, and ties that reach beyond the best scores."""
    row = torch.zeros(vocab)
    for count in range(vocab):
        for mass in (count / vocab, (count + 0.5) / vocab):
            kept = _nucleus_kept(
                row[None], *nucleus_cut(row[None], torch.tensor([mass], dtype=torch.float64))
            )
            assert torch.equal(kept[0], _sorted_nucleus(row, mass))


@PROFILE
@given(rows=ROWS, masses=MASSES)
def test_nucleus_on_a_device_is_the_smallest_set_that_reaches_the_mass(rows, masses):
    """Sums run in another order there, so sets may differ where a sum meets the mass within rounding."""
    kept = _nucleus_kept(rows, *cut._nucleus_device(rows, torch.tensor(masses, dtype=torch.float64)))
    for row, mass, mask in zip(rows, masses, kept, strict=True):
        if mass == 1:
            assert mask.all()
            continue
        probs = row.double().softmax(0)
        assert probs[mask].sum() >= mass - 1e-6
        best = row.sort(stable=True).indices.flip(0)[: int(mask.sum())]
        assert mask[best].all()  # the best ids, of equals the highest
        if int(mask.sum()) > 1 and bool(row[best[-1]].isfinite()):
            assert probs[best[:-1]].sum() < mass + 1e-6


@PROFILE
@given(rows=ROWS, masses=MASSES)
def test_typical_cut(rows, masses):
    logs = rows.log_softmax(1)
    shift = (-logs + (logs * logs.exp()).nansum(1, keepdim=True)).abs()
    wanted = torch.tensor(masses, dtype=torch.float64)
    got = shift <= typical_cut(shift, rows, wanted)[:, None]
    device = shift <= cut._typical_device(shift, rows, wanted)[:, None]
    for index, mass in enumerate(masses):
        if mass == 1:
            assert got[index].all()
            assert device[index].all()
            continue
        ordered, ids = shift[index].sort(stable=True)
        running = rows[index][ids].softmax(0).cumsum(0)
        last = min(int((running < mass).sum()), len(ids) - 1)
        assert torch.equal(got[index], shift[index] <= ordered[last])
        if float((running - mass).abs().min()) > 1e-6:
            assert torch.equal(device[index], got[index])


def test_the_host_sorts_only_rows_that_the_best_scores_do_not_decide(monkeypatch):
    peaked = torch.linspace(0, -40, 5000)
    flat = torch.linspace(0, -1, 5000)
    sorts = []
    real = Tensor.sort
    monkeypatch.setattr(Tensor, "sort", lambda self, **more: sorts.append(1) or real(self, **more))
    mass = torch.tensor([0.31, 0.31], dtype=torch.float64)
    peaked, flat = peaked * 100, flat
    got = _nucleus_kept(torch.stack([peaked, flat]), *nucleus_cut(torch.stack([peaked, flat]), mass))
    assert len(sorts) == 1
    monkeypatch.undo()
    assert torch.equal(got[1], _sorted_nucleus(flat, 0.31))
    assert torch.equal(got[0], _sorted_nucleus(peaked, 0.31))


def test_negative_zero_equals_zero():
    rows = torch.tensor([[0.0, -0.0, -1.0]])
    for kth in (kth_largest, cut._kth_device):
        assert kth(rows, torch.tensor([1])).item() == 0.0
    kept = _nucleus_kept(rows, *cut._nucleus_device(rows, torch.tensor([0.1], dtype=torch.float64)))
    assert kept.tolist() == [[False, True, False]]


@pytest.mark.parametrize("bad", [float("nan"), NEVER])
def test_broken_rows_do_not_raise_and_stay_broken(bad):
    rows = torch.full((1, 80), bad)
    for found in (kth_largest(rows, torch.tensor([70])), cut._kth_device(rows, torch.tensor([70]))):
        assert not (rows < found[:, None]).any()
    half = torch.tensor([0.5], dtype=torch.float64)
    assert nucleus_cut(rows, half)[0].shape == cut._nucleus_device(rows, half)[0].shape == (1,)
    assert typical_cut(rows.abs(), rows, half).shape == (1,)


def test_operators_are_sound():
    rows = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    mass = torch.tensor([0.2, 0.9, 1.0], dtype=torch.float64)
    for name, inputs in (
        ("kth_largest", (rows, torch.tensor([3, 0, 99]))), ("nucleus_cut", (rows, mass)),
        ("typical_cut", (rows.abs(), rows, mass)),
    ):  # fmt: skip
        torch.library.opcheck(
            getattr(torch.ops.specc, name).default, inputs, test_utils=("test_schema", "test_faketensor")
        )
