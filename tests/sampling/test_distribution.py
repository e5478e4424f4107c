"""The joint distribution of three emitted tokens is that of plain sampling, and planted faults are seen.

20,000 slots with different seeds run a Markov target over four tokens; each test compares the 64 joint
counts with the exact probabilities by a chi-square test. The error rate of the whole family is 1e-4.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.contracts import Draft, Proposal
from specc.sampling import WARPERS, SamplingContext, bind_all, fit, frequency_penalty, process
from specc.sampling import accept as accept_module
from specc.sampling.accept import accept
from specc.sampling.draw import Drawer
from specc.sampling.rng import Stream
from tests import chi_square

VOCAB, EMITTED, DRAWS = 4, 3, 20_000
EOS = 3
LIMIT = 1e-4 / 200  # Bonferroni: fewer than two hundred chi-square tests here
_GENERATOR = torch.Generator().manual_seed(5)
TARGET = torch.randn(VOCAB, VOCAB, generator=_GENERATOR)  # logits of the next token by the last one
DRAFTER = TARGET + torch.randn(VOCAB, VOCAB, generator=_GENERATOR)
PLAIN = {"temperature": 1.0}
CUT = {"temperature": 0.9, "top_k": 3, "top_p": 0.95, "min_p": 0.08}
KINDS = ("dense", "sparse", "subset", "point")


def _propose(kind: str, draw: Drawer, last: Tensor, block: int) -> Draft:
    tokens = []
    for index in range(block):
        logits = DRAFTER[last]
        if kind == "point":
            last = logits.argmax(1)
        elif kind == "sparse":
            best, ids = logits.topk(2, dim=1)
            last = draw(best, index, ids)
        elif kind == "subset":
            ids = torch.tensor([0, 2, 3])
            last = draw(logits[:, ids], index, ids)
        else:
            last = draw(logits, index)
        tokens.append(last)
    return Draft(torch.stack(tokens, 1)) if kind == "point" else draw.draft()


def run(
    kind: str, block: int, settings: dict[str, Any], rule="ratio", *,
    draws: int = DRAWS, draft_fault=None, logits_fault=None,
) -> Tensor:  # fmt: skip
    """Return the emitted tokens, int64 [draws, 3]; every slot starts from token 0 with its own seed."""
    columns, families = _bound(settings)
    seeds = torch.arange(draws) * 7919 + 3
    out = torch.zeros((draws, EMITTED + block + 1), dtype=torch.int64)
    lengths = torch.ones(draws, dtype=torch.int64)
    index = torch.arange(block + 1)
    while len(live := (lengths <= EMITTED).nonzero()[:, 0]):
        tokens, length, seed = out[live], lengths[live], seeds[live]
        own_rule = rule[live] if isinstance(rule, Tensor) else rule
        settings_now = {name: value.expand(len(live), *value.shape) for name, value in columns.items()}
        heat = settings_now["temperature"]
        last = tokens.gather(1, length[:, None] - 1)[:, 0]
        draft = Draft(torch.zeros((len(live), 0), dtype=torch.int64))
        if block:
            draft = _propose(kind, Drawer(VOCAB, heat, seed, length, own_rule), last, block)
        if draft_fault:
            draft = draft_fault(draft, last)
        raw = TARGET[torch.cat([last[:, None], draft.tokens], 1)]
        context = SamplingContext(
            tokens, length, torch.ones_like(length), draft.tokens, settings_now,
            torch.full((len(live), 1), EOS), torch.full_like(length, 1 + EMITTED),
        )  # fmt: skip
        logits = process(raw, context, families)
        if logits_fault:
            logits = logits_fault(logits, draft)
        result = accept(logits, draft, temperature=heat, seed=seed, length=length, rule=own_rule, raw=raw)
        assert not result.broken.any()
        where = length[:, None] + index
        emitted = torch.where(index <= result.count[:, None], result.tokens, 0)
        out[live] = tokens.scatter(1, where, emitted)
        lengths[live] = length + result.count + 1
    return out[:, 1 : EMITTED + 1]


def _bound(settings: dict[str, Any]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    values, families = bind_all({"temperature": 1.0} | settings, vocab=VOCAB, do_sample=True, eos=(EOS,))
    return dict(fit(values, families)), families


def expected(settings: dict[str, Any]) -> Tensor:
    """Return the exact joint probabilities, float64 [vocab, vocab, vocab]: every history's next token by itself."""
    columns, families = _bound(settings)
    joint = torch.ones((), dtype=torch.float64)
    for emitted in range(EMITTED):
        histories = torch.tensor([[0, *ids] for ids in itertools.product(range(VOCAB), repeat=emitted)])
        count = len(histories)
        length = torch.full((count,), 1 + emitted)
        context = SamplingContext(
            torch.cat([histories, torch.zeros((count, EMITTED), dtype=torch.int64)], 1), length,
            torch.ones_like(length), torch.zeros((count, 0), dtype=torch.int64),
            {name: value.expand(count, *value.shape) for name, value in columns.items()},
            torch.full((count, 1), EOS), torch.full_like(length, 1 + EMITTED),
        )  # fmt: skip
        step = process(TARGET[histories[:, -1]][:, None], context, families)[:, 0].double().softmax(1)
        joint = joint[..., None] * step.view(*[VOCAB] * (emitted + 1))
    return joint


def p_value(tokens: Tensor, settings: dict[str, Any]) -> float:
    return chi_square.p_value(tokens, expected(settings))


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_ratio_keeps_the_joint_distribution(kind, block, temperature):
    settings = {"temperature": temperature}
    assert p_value(run(kind, block, settings), settings) > LIMIT


@pytest.mark.parametrize(("kind", "block"), list(itertools.product(KINDS, [1, 3])))
def test_ratio_keeps_it_with_cut_tails(kind, block):
    assert (expected(CUT) == 0).any()
    assert p_value(run(kind, block, CUT), CUT) > LIMIT


EACH = {
    "bad_words_ids": [[1], [2, 2]],
    "begin_suppress_tokens": [0, 1],
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "forced_eos_token_id": EOS,
    "frequency_penalty": 1.5,
    "logit_bias": {1: 1.0, 2: -1.5},
    "min_length": 3,
    "min_new_tokens": 2,
    "min_p": 0.15,
    "no_repeat_ngram_size": 2,
    "presence_penalty": 1.5,
    "repetition_penalty": 2.0,
    "sequence_bias": [[[1], 1.0], [[2, 2], 3.0]],
    "suppress_tokens": [2],
    "temperature": 1.4,
    "top_k": 2,
    "top_p": 0.85,
    "typical_p": 0.8,
}


def test_every_setting_is_tried():
    assert set(EACH) == {warper.name for warper in WARPERS}
    for name, value in EACH.items():
        moved = (expected({name: value}) - expected(PLAIN)).abs().sum()
        assert moved > 0.09, f"{name} changes too little to be seen"
        assert (expected({name: value}) > 1e-3).sum() >= 4, f"{name} leaves too little to chance"


@pytest.mark.parametrize(("name", "kind"), list(zip(EACH, itertools.cycle(KINDS), strict=False)))
def test_ratio_keeps_it_under_each_setting(name, kind):
    settings = {name: EACH[name]}
    assert p_value(run(kind, 3, settings), settings) > LIMIT


def test_a_penalty_that_does_not_count_drafts_is_seen(monkeypatch):
    """An approximation that engines make: every row of a block is judged by the history before the block."""
    real = frequency_penalty.change_by_count

    def blind(logits, context, start, change):
        nothing = torch.full_like(context.draft, -1)
        return real(logits, replace(context, draft=nothing), start, change)

    settings = {"frequency_penalty": 1.5}
    exact = expected(settings)
    monkeypatch.setattr(frequency_penalty, "change_by_count", blind)
    assert chi_square.p_value(run("dense", 3, settings), exact) < LIMIT


@pytest.mark.parametrize(
    "settings", [PLAIN, CUT, {"typical_p": 0.8}, {"epsilon_cutoff": 0.1}, {"eta_cutoff": 0.1}]
)
def test_plain_and_coupled_draw_from_the_target(settings):
    assert p_value(run("dense", 0, settings), settings) > LIMIT
    assert p_value(run("dense", 0, settings, "coupled"), settings) > LIMIT


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [PLAIN, CUT], ids=["plain", "cut"])
def test_coupled_text_equals_plain_text(kind, block, settings):
    plain = run(kind, 0, settings, "coupled", draws=2000)
    assert torch.equal(run(kind, block, settings, "coupled", draws=2000), plain)
    assert not torch.equal(run(kind, block, settings, "ratio", draws=2000), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_of_both_rules_mix(kind):
    coupled = torch.arange(2000) % 2 == 0
    mixed = run(kind, 3, CUT, coupled, draws=2000)
    assert torch.equal(mixed[coupled], run(kind, 3, CUT, "coupled", draws=2000)[coupled])
    assert torch.equal(mixed[~coupled], run(kind, 3, CUT, "ratio", draws=2000)[~coupled])


# --- planted faults ------------------------------------------------------------------------------------


def _other_temperature(draft: Draft, last: Tensor) -> Draft:
    probs = draft.proposal.probs.pow(0.6)
    probs = probs / probs.sum(-1, keepdim=True)
    return replace(draft, proposal=Proposal(probs), drawn=probs.gather(2, draft.tokens[..., None])[..., 0])


def _softmax_of_an_argmax(draft: Draft, last: Tensor) -> Draft:
    chain = torch.cat([last[:, None], draft.tokens[:, :-1]], 1)
    probs = DRAFTER[chain].softmax(-1)
    return replace(draft, proposal=Proposal(probs), drawn=probs.gather(2, draft.tokens[..., None])[..., 0])


def _bonus_of_the_drafter(logits: Tensor, draft: Draft) -> Tensor:
    return torch.cat([logits[:, :-1], DRAFTER[draft.tokens[:, -1]][:, None]], 1)


@pytest.mark.parametrize("block", [1, 3])
class TestPlantedFaults:
    def test_q_of_another_temperature(self, block):
        assert p_value(run("dense", block, PLAIN, draft_fault=_other_temperature), PLAIN) < LIMIT

    def test_softmax_q_of_an_argmax_draft(self, block):
        assert p_value(run("point", block, PLAIN, draft_fault=_softmax_of_an_argmax), PLAIN) < LIMIT

    def test_bonus_of_the_drafter(self, block):
        block = min(
            block, 2
        )  # after three accepted drafts the bonus is the fourth token, which is not counted
        assert p_value(run("dense", block, PLAIN, logits_fault=_bonus_of_the_drafter), PLAIN) < LIMIT

    def test_no_residual(self, block, monkeypatch):
        monkeypatch.setattr(accept_module, "_residual", lambda probs, *_: probs)
        assert p_value(run("dense", block, PLAIN), PLAIN) < LIMIT

    @pytest.mark.parametrize("stream", [Stream.COIN, Stream.FINAL])
    def test_noise_shared_with_the_draft(self, block, stream, monkeypatch):
        real = accept_module.uniform
        monkeypatch.setattr(
            accept_module, "uniform",
            lambda seed, position, which: real(seed, position, Stream.DRAFT if which is stream else which),
        )  # fmt: skip
        assert p_value(run("dense", block, PLAIN), PLAIN) < LIMIT
