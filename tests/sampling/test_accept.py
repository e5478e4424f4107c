"""Judging drafts: against the one-sequence reference, and at the edges."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from specc.contracts import Draft, Proposal
from specc.errors import InvariantError
from specc.sampling.accept import accept
from specc.sampling.draw import Drawer
from tests import reference

NAN, NEVER = float("nan"), float("-inf")
SLOTS, BLOCK, VOCAB = 64, 3, 7
GENERATOR = torch.Generator().manual_seed(3)
TARGET = torch.randn(VOCAB, VOCAB, generator=GENERATOR) * 2
DRAFTER = TARGET + torch.randn(VOCAB, VOCAB, generator=GENERATOR)
SEED = torch.arange(SLOTS) * 104_729 - 99
LENGTH = torch.arange(SLOTS) % 13 + 1
HEAT = torch.tensor([0.0, 0.6, 1.0, 1.4]).repeat(SLOTS // 4)
LAST = torch.arange(SLOTS) % VOCAB


def _drafted(rule, table=DRAFTER, heat=HEAT, candidates=None):
    drawer = Drawer(VOCAB, heat, SEED, LENGTH, rule)
    last = LAST
    for index in range(BLOCK):
        if candidates is None:
            last = drawer(table[last], index)
        else:
            best, ids = table[last].topk(candidates, dim=1)
            last = drawer(best, index, ids)
    return drawer.draft()


def _rows(draft, heat=HEAT, table=TARGET):
    raw = table[torch.cat([LAST[:, None], draft.tokens.clamp(min=0)], 1)]
    return raw / torch.where(heat == 0, 1.0, heat)[:, None, None]


def _judge(draft, rule, heat=HEAT, logits=None, **more):
    logits = _rows(draft, heat) if logits is None else logits
    return accept(logits, draft, temperature=heat, seed=SEED, length=LENGTH, rule=rule, **more)


@pytest.mark.parametrize("candidates", [None, 2])
@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_equals_the_reference(rule, candidates):
    result = _judge(_drafted(rule, candidates=candidates), rule)
    assert len(set(result.count.tolist())) == BLOCK + 1  # every length of prefix occurs
    for slot in range(SLOTS):
        last, heat = int(LAST[slot]), float(HEAT[slot])
        prompt = [0] * (int(LENGTH[slot]) - 1) + [last]

        def drafter(history):
            row = DRAFTER[history[-1]]
            return (
                row if candidates is None else torch.where(row >= row.topk(candidates).values[-1], row, NEVER)
            )

        def one_step(history):
            return TARGET[history[-1]]

        # The inverse CDF of a candidate list runs in its own order; only then may the reference differ.
        if candidates and rule == "ratio" and heat:
            continue
        expected = reference.generate(
            one_step, prompt, BLOCK + 1, drafter=drafter, block=BLOCK, rule=rule, seed=int(SEED[slot]),
            settings={"temperature": heat}, do_sample=heat > 0,
        )  # fmt: skip
        count = int(result.count[slot])
        assert count == expected.counts[0]
        assert result.tokens[slot].tolist() == expected.tokens[: count + 1] + [-1] * (BLOCK - count)
    assert result.drafted.tolist() == [BLOCK] * SLOTS
    assert not result.broken.any()


def test_greedy_build_equals_greedy_slots():
    heat = torch.zeros(SLOTS)
    draft = _drafted("ratio", heat=heat)
    plain = accept(_rows(draft, heat), Draft(draft.tokens))
    for rule in ("ratio", "coupled", torch.arange(SLOTS) % 2 == 0):
        mixed = _judge(draft, rule, heat)
        assert torch.equal(mixed.tokens, plain.tokens)
        assert torch.equal(mixed.count, plain.count)


@pytest.mark.parametrize("table", ["same", "disjoint"])
@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_equal_and_disjoint_supports(rule, table):
    if table == "same":
        result = _judge(_drafted(rule, TARGET), rule)
        assert result.count.tolist() == [BLOCK] * SLOTS
        return
    low = torch.where(torch.arange(VOCAB) < 3, TARGET, NEVER)
    high = torch.where(torch.arange(VOCAB) < 3, NEVER, TARGET)
    draft = _drafted(rule, low)
    result = _judge(draft, rule, logits=_rows(draft, table=high))
    assert result.count.tolist() == [0] * SLOTS
    nothing = accept(
        _rows(draft, table=high)[:, :1], None, temperature=HEAT, seed=SEED, length=LENGTH, rule=rule
    )
    assert torch.equal(result.tokens[:, 0], nothing.tokens[:, 0])  # the residual is p itself


def test_point_mass_is_never_emitted_again_after_its_rejection():
    heat = torch.ones(SLOTS)
    draft = Draft(torch.zeros((SLOTS, BLOCK), dtype=torch.int64))
    result = _judge(draft, "ratio", heat, logits=_rows(draft, heat) - 0.5 * torch.nn.functional.one_hot(
        torch.tensor(0), VOCAB))  # fmt: skip
    rejected = result.count < BLOCK
    assert rejected.any()
    last = result.tokens.gather(1, result.count[:, None])[:, 0]
    assert (last[rejected] != 0).all()


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_a_missing_draft_stops_there_and_draws_from_p(rule):
    heat = torch.full((SLOTS,), 0.8)
    full = _drafted(rule, TARGET, heat)  # all accepted when present
    cut = torch.arange(SLOTS) % (BLOCK + 1)
    index = torch.arange(BLOCK)
    tokens = torch.where(index == cut[:, None], -1, full.tokens)  # later ids are there, and must not count
    draft = Draft(tokens, full.proposal, full.drawn)
    result = _judge(draft, rule, heat)
    assert torch.equal(result.drafted, cut)
    assert torch.equal(result.count, cut)
    logits = _rows(draft, heat)
    for slot in range(SLOTS):
        count = int(cut[slot])
        row, at, seed = logits[slot, count], int(LENGTH[slot]) + count, int(SEED[slot])
        if rule == "coupled":
            expected = reference._coupled(row, seed, at)
        else:
            expected = reference.pick(row.softmax(0).tolist(), reference.uniform(seed, at, reference.FINAL))
        assert int(result.tokens[slot, count]) == expected


def test_a_missing_draft_leaves_no_residual_even_if_a_proposal_is_there():
    heat = torch.full((SLOTS,), 0.8)
    full = _drafted("ratio", DRAFTER, heat)
    logits = _rows(full, heat)
    missing = Draft(torch.full_like(full.tokens, -1), full.proposal, full.drawn)
    plain = accept(logits[:, :1], None, temperature=heat, seed=SEED, length=LENGTH)
    assert torch.equal(_judge(missing, "ratio", heat, logits=logits).tokens[:, 0], plain.tokens[:, 0])


@pytest.mark.parametrize("rule", [None, "ratio", "coupled"])
@pytest.mark.parametrize("bad", [NAN, NEVER])
def test_a_broken_row_emits_the_raw_argmax_and_says_so(rule, bad):
    heat = torch.ones(SLOTS)
    draft = _drafted(rule or "coupled", TARGET, heat)
    logits = _rows(draft, heat)
    raw = logits.clone()
    logits[0, 1] = bad  # reached: the draft before it is accepted
    if bad != bad:
        logits[1, 2, 4] = bad  # one NaN is enough
        raw[1, 2, 4] = bad
    logits[2, 0] = bad
    raw[2, 0] = bad  # nothing to choose from at all
    if rule is None:
        tokens = logits.nan_to_num(0.0, neginf=0.0).argmax(2)[:, :-1]
        result = accept(logits, Draft(tokens), raw=raw)
    else:
        result = _judge(draft, rule, heat, logits=logits, raw=raw)
    assert result.count[0] == 1
    assert result.count[2] == 0
    assert int(result.tokens[0, 1]) == int(raw[0, 1].argmax())
    assert int(result.tokens[2, 0]) == 0
    assert result.broken[[0, 2]].all()
    if bad != bad:
        assert result.broken[1]
        assert int(result.tokens[1, 2]) == int(raw[1, 2].nan_to_num(NEVER).argmax())
    assert not result.broken[3:].any()
    assert result.tokens.max() < VOCAB


def test_a_broken_row_beyond_the_first_rejection_is_not_seen():
    heat = torch.ones(SLOTS)
    draft = Draft(torch.full((SLOTS, BLOCK), -1))
    logits = _rows(draft, heat)
    logits[:, 1:] = NAN
    for rule in ("ratio", "coupled"):
        assert not _judge(draft, rule, heat, logits=logits).broken.any()


def test_narrow_and_wide_drafters():
    """A drafter of fewer or more ids than the target: the residual still lines up."""
    heat = torch.ones(SLOTS)
    full = _drafted("ratio", heat=heat)
    narrow = Proposal(full.proposal.probs[..., :5])
    wide = Proposal(torch.nn.functional.pad(full.proposal.probs, (0, 3)))
    listed = Proposal(full.proposal.probs[..., :5], torch.arange(5))
    expected = _judge(full, "ratio", heat)
    got = _judge(Draft(full.tokens, wide, full.drawn), "ratio", heat)
    assert torch.equal(got.tokens, expected.tokens)
    dense = _judge(Draft(full.tokens, narrow, full.drawn), "ratio", heat)
    sparse = _judge(Draft(full.tokens, listed, full.drawn), "ratio", heat)
    assert torch.equal(dense.tokens, sparse.tokens)


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, 2, VOCAB)
    logits[..., 0] = -1.0
    assert accept(logits, Draft(torch.tensor([[1]]))).tokens.tolist() == [[1, 1]]
    assert accept(logits, Draft(torch.tensor([[2]]))).tokens.tolist() == [[1, -1]]


def test_rows_must_fit_the_draft():
    with pytest.raises(InvariantError, match="rows"):
        accept(torch.zeros(1, 2, VOCAB), None)


@pytest.mark.parametrize("rule", ["ratio", "coupled", "both", None])
def test_traces_without_reading_a_value(rule):
    both = torch.arange(SLOTS) % 2 == 0

    def step(logits, tokens, probs, drawn, heat, seed, length, coupled):
        draft = Draft(tokens, Proposal(probs), drawn)
        if rule is None:
            result = accept(logits, Draft(tokens))
        else:
            chosen = coupled if rule == "both" else rule
            result = accept(logits, draft, temperature=heat, seed=seed, length=length, rule=chosen)
        return result.tokens, result.count

    draft = _drafted("ratio")
    inputs = (_rows(draft), draft.tokens, draft.proposal.probs, draft.drawn, HEAT, SEED, LENGTH, both)
    traced = make_fx(step, tracing_mode="fake")(*inputs)
    changed = (*inputs[:4], HEAT.flip(0), SEED + 1, LENGTH + 5, ~both)
    for got, expected in zip(traced(*changed), step(*changed), strict=True):
        assert torch.equal(got, expected)
    names = [str(node.target).split(".")[1] for node in traced.graph.nodes if node.op == "call_function"]
    if rule is None:
        assert not set(names) & {"exp", "_softmax", "bitwise_xor", "cumsum"}
    elif rule == "ratio":
        assert names.count("_softmax") == 1
