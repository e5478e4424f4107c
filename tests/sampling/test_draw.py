"""Drawing drafts: each kind of slot, candidates, broken rows, and what a greedy build leaves out."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from specc.errors import InvariantError
from specc.sampling.draw import Drawer, best_id, inverse_cdf
from tests import reference

NAN, NEVER = float("nan"), float("-inf")
VOCAB = 11
SEED = torch.tensor([1, -2, 3, 2**50])
LENGTH = torch.tensor([5, 9, 0, 77])
HEAT = torch.tensor([0.0, 0.7, 1.0, 1.5])


def _logits(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rule", ["ratio", "coupled", "both"])
def test_each_slot_draws_by_its_own_rule(rule):
    coupled = {"ratio": [False] * 4, "coupled": [True] * 4, "both": [True, True, False, True]}[rule]
    drawer = Drawer(VOCAB, HEAT, SEED, LENGTH, torch.tensor(coupled) if rule == "both" else rule)
    got = [drawer(_logits(index), index) for index in range(3)]
    draft = drawer.draft()
    assert torch.equal(torch.stack(got, 1), draft.tokens)
    for slot in range(4):
        for index in range(3):
            row, position = _logits(index)[slot], int(LENGTH[slot]) + index
            heat, seed = float(HEAT[slot]), int(SEED[slot])
            if heat == 0:
                expected = int(row.argmax())
            elif coupled[slot]:
                expected = reference._coupled(row / heat, seed, position)
            else:
                q = (row / heat).softmax(0)
                expected = reference.pick(q.tolist(), reference.uniform(seed, position, reference.DRAFT))
                assert draft.drawn[slot, index] == pytest.approx(float(q[expected]), rel=1e-5)
                torch.testing.assert_close(draft.proposal.probs[slot, index], q)
            assert int(draft.tokens[slot, index]) == expected
    assert (draft.proposal is None) == (rule == "coupled")


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize("per_slot", [False, True])
def test_candidates_are_named_by_target_ids(rule, per_slot):
    ids = (
        torch.tensor([9, 2, 5])
        if not per_slot
        else torch.tensor([[9, 2, 5], [0, 1, 2], [10, 3, 4], [8, 7, 6]])
    )
    full = torch.full((4, VOCAB), NEVER)
    full.scatter_(1, ids.expand(4, 3), _logits()[:, :3])
    sparse, dense = Drawer(VOCAB, HEAT, SEED, LENGTH, rule), Drawer(VOCAB, HEAT, SEED, LENGTH, rule)
    got, expected = sparse(_logits()[:, :3], 0, ids), dense(full, 0)
    if rule == "coupled":
        assert torch.equal(got, expected)  # one noise per target id, whatever the order of candidates
    else:
        assert bool((got[:, None] == ids.expand(4, 3)).any(1).all())
        probs = sparse.draft().proposal
        scattered = torch.zeros(4, VOCAB).scatter(1, ids.expand(4, 3), probs.probs[:, 0])
        torch.testing.assert_close(scattered, dense.draft().proposal.probs[:, 0])
        assert torch.equal(sparse.draft().drawn[1:], scattered.gather(1, got[:, None])[1:])
        assert probs.ids.shape == ((4, 1, 3) if per_slot else (3,))
    assert int(got[0]) == int(full[0].argmax())


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_ids_outside_the_target_are_never_drawn(rule):
    wide = _logits(vocab=VOCAB + 5)
    wide[:, VOCAB:] = 100.0
    assert int(Drawer(VOCAB, HEAT, SEED, LENGTH, rule)(wide, 0).max()) < VOCAB
    ids = torch.tensor([3, -1, VOCAB, 4])
    logits = torch.tensor([[0.0, 50.0, 50.0, 0.0]]).expand(4, -1)
    got = Drawer(VOCAB, HEAT, SEED, LENGTH, rule)(logits, 0, ids)
    assert set(got.tolist()) <= {3, 4}


def test_equal_logits_draw_the_lowest_id():
    heat = torch.zeros(4)
    flat = torch.zeros(4, VOCAB)
    assert Drawer(VOCAB, heat, SEED, LENGTH)(flat, 0).tolist() == [0] * 4
    assert Drawer(VOCAB)(flat[:, :3], 0, torch.tensor([7, 4, 6])).tolist() == [4] * 4


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("ids", [None, torch.arange(VOCAB)])
def test_broken_rows_draft_nothing(rule, sampled, ids):
    drawer = Drawer(VOCAB, HEAT, SEED, LENGTH, rule) if sampled else Drawer(VOCAB)
    logits = _logits()
    logits[0] = NAN
    logits[1] = NEVER
    logits[2, 3] = NAN
    got = drawer(logits, 0, ids)
    assert 0 <= int(got.min()) <= int(got.max()) < VOCAB  # may be embedded
    drawer(_logits(), 1, ids)
    draft = drawer.draft()
    assert draft.tokens[:3].tolist() == [[-1, -1]] * 3
    assert int(draft.tokens[3].min()) >= 0


def test_nothing_counts_after_an_invalid_draft():
    drawer = Drawer(VOCAB, HEAT, SEED, LENGTH)
    for index in range(3):
        drawer(_logits(index), index)
    valid = torch.tensor([[True] * 3, [True, False, True], [False, True, True], [True, True, False]])
    tokens = drawer.draft(valid=valid).tokens
    assert (tokens >= 0).tolist() == [[True] * 3, [True, False, False], [False] * 3, [True, True, False]]
    confidence = torch.zeros(4, 3)
    assert drawer.draft(confidence).confidence is confidence


def test_order_is_checked():
    with pytest.raises(InvariantError, match="in order"):
        Drawer(VOCAB)(_logits(), 1)


def test_a_greedy_build_holds_no_softmax_and_no_noise():
    def step(logits):
        drawer = Drawer(VOCAB)
        drawer(logits, 0)
        return drawer.draft().tokens

    nodes = make_fx(step, tracing_mode="fake")(_logits()).graph.nodes
    names = {str(node.target).split(".")[1] for node in nodes if node.op == "call_function"}
    assert "argmax" in names
    assert not names & {"exp", "log", "logsumexp", "_softmax", "bitwise_and", "bitwise_xor", "cumsum", "mul"}


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_traces_without_reading_a_value(rule):
    def step(logits, heat, seed, length):
        drawer = Drawer(VOCAB, heat, seed, length, rule)
        ids = torch.arange(VOCAB)
        drawer(logits, 0, ids)
        drawer(logits, 1, ids)
        return drawer.draft().tokens

    traced = make_fx(step, tracing_mode="fake")(_logits(1), HEAT, SEED, LENGTH)
    swapped = HEAT.flip(0)
    assert torch.equal(traced(_logits(2), swapped, SEED, LENGTH), step(_logits(2), swapped, SEED, LENGTH))


def test_inverse_cdf_never_takes_what_cannot_be():
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for coin, index in ((1e-12, 1), (0.5 - 1e-12, 1), (0.5, 3), (1 - 2.0**-33, 3)):
        assert inverse_cdf(weights, torch.tensor([coin], dtype=torch.float64)).tolist() == [index]
    none = torch.tensor([[0.0, 0.0], [NAN, 1.0]])
    assert inverse_cdf(none, torch.tensor([0.3, 0.3], dtype=torch.float64)).tolist()[0] == -1


@pytest.mark.parametrize("count", [511, 512, 513, 1024, 3001])
def test_inverse_cdf_of_long_rows(count):
    generator = torch.Generator().manual_seed(count)
    weights = torch.rand(60, count, generator=generator)
    weights[torch.rand(60, count, generator=generator) < 0.7] = 0.0
    weights[0, : count // 2] = 0.0
    weights[1, count // 2 :] = 0.0
    weights[2] = 0.0
    weights[2, count - 1] = 1e-30
    weights[3] = 0.0
    coins = torch.rand(60, dtype=torch.float64, generator=generator)
    coins[:2] = torch.tensor([2.0**-33, 1 - 2.0**-33])
    expected = [
        reference.pick(row, coin) if sum(row) else -1
        for row, coin in zip(weights.tolist(), coins.tolist(), strict=True)
    ]
    assert inverse_cdf(weights, coins).tolist() == expected


def test_best_id_of_equals_among_banned():
    assert best_id(torch.tensor([[NEVER, 2.0, 2.0]]), None).tolist() == [1]
