"""`specc.verify`: equal, tie or bug; and exact="bitwise", where nothing may differ."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import specc
from specc import api, step
from specc.cli import app
from specc.errors import InputError, UnknownNameError, UnsupportedError
from specc.runtime.verdict import VerifyReport
from specc.sampling.logit_bias import LogitBias
from specc.sampling.no_repeat_ngram_size import NoRepeatNgramSize
from specc.sampling.repetition_penalty import RepetitionPenalty
from tests.serving import CAPACITY, PROMPTS, compiled, plain_text, target
from tests.tiny import noisy_copy, tiny_model

NEW = 24


def compile_tiny(method="draft_model", **options):
    model = options.pop("model", None) or target()
    drafter = noisy_copy(model) if method == "draft_model" else None
    given = {"block": 3, "batch": 3, "max_length": CAPACITY, "backend": "eager", **options}
    return specc.compile(model, drafter, method=method, **given)


def test_equal_texts_are_lossless():
    report = specc.verify(compiled(), PROMPTS, max_new_tokens=NEW)
    assert report.is_lossless
    assert report.divergences == ()
    assert report.tokens == len(PROMPTS) * NEW
    assert report.mean_accepted_length > 1.2
    assert report.logit_error < 100 * report.rounding < 1e-3
    assert "lossless" in report.render()
    assert json.loads(json.dumps(report.to_dict()))["is_lossless"]


def shift_cache_rows(rows):
    """K/V of every draft land one row too far."""

    def planted(v, key, shape, tree):
        out = rows(v, key, shape, tree)
        own = shape.slots * (key.block + 1)
        row = out.cache_row.clone()
        draft = (torch.arange(own) % (key.block + 1) > 0) if key.block else torch.zeros(own, dtype=torch.bool)
        row[:own] = torch.where(draft, (row[:own] + 1).clamp(max=shape.capacity), row[:own])
        return step._StepRows(out.token, out.slot, out.position, row, out.reach)

    return planted


def shift_positions(rows):
    """Drafts are rotated as if they stood one position further on; K/V land where they should."""

    def planted(v, key, shape, tree):
        out = rows(v, key, shape, tree)
        own = shape.slots * (key.block + 1)
        draft = torch.arange(out.token.shape[0]) % (key.block + 1) > 0
        draft = draft & (torch.arange(out.token.shape[0]) < own) if key.block else torch.zeros_like(draft)
        position = torch.where(draft, (out.position + 1).clamp(max=shape.capacity - 1), out.position)
        return step._StepRows(out.token, out.slot, position, out.cache_row, out.reach)

    return planted


@pytest.mark.parametrize("plant", [shift_cache_rows, shift_positions])
def test_an_off_by_one_in_the_target_is_a_bug(plant, monkeypatch):
    monkeypatch.setattr(step, "_rows", plant(step._rows))
    report = specc.verify(compile_tiny(), PROMPTS, max_new_tokens=NEW)
    assert not report.is_lossless
    bug = report.divergences[0]
    assert bug.verdict == "bug"
    assert bug.strayed > 100 * bug.error
    assert report.logit_error > 1000 * report.rounding, "it shows before the text does"
    text = plain_text(PROMPTS[bug.prompt], max_new_tokens=NEW)
    assert bug.plain == text[bug.position - len(PROMPTS[bug.prompt])]
    assert "NOT lossless" in report.render()


@pytest.mark.parametrize(
    ("warper", "settings"),
    [
        (NoRepeatNgramSize, {"no_repeat_ngram_size": 1}),
        (RepetitionPenalty, {"repetition_penalty": 3.0}),
        (LogitBias, {"logit_bias": dict.fromkeys(range(2, 96, 2), 2.0)}),
    ],
    ids=["ban", "penalty", "bias"],
)
def test_a_setting_that_forgets_drafts_is_a_bug(warper, settings, monkeypatch):
    """Logits are right to the bit then, so only the scores can tell."""
    right = warper.apply

    def planted(self, logits, context):
        return torch.cat([right(self, logits, context)[:, :1], logits[:, 1:]], dim=1)

    monkeypatch.setattr(warper, "apply", planted)
    report = specc.verify(compile_tiny(), PROMPTS, max_new_tokens=NEW, settings=settings)
    assert {d.verdict for d in report.divergences} == {"bug"}
    assert not report.is_lossless
    monkeypatch.setattr(warper, "apply", right)
    assert specc.verify(compile_tiny(), PROMPTS, max_new_tokens=NEW, settings=settings).divergences == ()


@pytest.mark.parametrize("penalised", [False, True])
def test_a_near_tie_of_bfloat16_is_a_tie(penalised):
    model = tiny_model("llama").to(torch.bfloat16)
    object_ = compile_tiny(model=model)
    # Which texts meet a near-tie depends on the machine's bfloat16 kernels: so many that some do on any.
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, 96, (6,), generator=generator) for _ in range(30)]
    settings = {"repetition_penalty": 1.3} if penalised else {}
    report = specc.verify(object_, prompts, max_new_tokens=40, settings=settings)
    assert report.dtype == "bfloat16"
    assert report.divergences, "no near-tie among these prompts: the test is empty"
    assert {d.verdict for d in report.divergences} == {"tie"}
    assert all(d.gap < 0.5 and d.error < 0.5 for d in report.divergences)


def test_bitwise_gives_equal_bits_and_is_refused_where_it_does_not_hold():
    prepared = api.prepare(target())
    given = {"block": 3, "batch": 2, "max_length": CAPACITY, "exact": "bitwise"}
    with pytest.raises(UnsupportedError, match="does not hold on cpu with backend 'eager'"):
        specc.compile(prepared, method="ngram", backend="eager", **given)
    drafted = specc.compile(prepared, method="ngram", backend="native", **given)
    plain = specc.compile(prepared, method="plain", backend="native", **given)
    accepted = 0
    for settings in ({}, {"do_sample": True, "temperature": 0.2, "seed": 4, "accept": "coupled"}):
        for prompts in ([PROMPTS[0]], [PROMPTS[2], PROMPTS[2][::-1], [*PROMPTS[2][1:], 5]]):
            runs = [
                c.generate(
                    torch.tensor(prompts),
                    max_new_tokens=NEW,
                    output_logits=True,
                    return_dict_in_generate=True,
                    **settings,
                )
                for c in (drafted, plain, drafted.without_drafts())
            ]
            accepted += runs[0].stats.accepted
            assert runs[1].stats.drafted == runs[2].stats.drafted == 0
            for run in runs[1:]:
                assert torch.equal(run.sequences, runs[0].sequences)
                assert all(torch.equal(a, b) for a, b in zip(run.logits, runs[0].logits, strict=True))
    assert accepted > 0
    assert specc.verify(drafted, PROMPTS, max_new_tokens=NEW).divergences == ()


def test_wrong_requests_are_refused():
    with pytest.raises(UnknownNameError, match="bitwise"):
        compile_tiny("ngram", exact="bit")
    with pytest.raises(InputError, match="block"):
        compile_tiny("plain", exact="bitwise", block=None)
    with pytest.raises(InputError, match="greedy"):
        specc.verify(compiled(), PROMPTS, settings={"do_sample": True})
    with pytest.raises(InputError, match="max_new_tokens"):
        specc.verify(compiled(), PROMPTS, max_new_tokens=0)
    with pytest.raises(InputError, match="compiled already"):
        specc.verify(compiled(), PROMPTS, block=3)


@pytest.mark.parametrize("is_lossless", [True, False])
def test_the_command_exits_with_1_on_a_bug(is_lossless, monkeypatch):
    asked = {}

    def fake(model, prompts, **options):
        asked.update(options, model=model)
        return REPORT if is_lossless else BUGGY

    monkeypatch.setattr(api, "verify", fake)
    result = CliRunner().invoke(app, ["verify", "some/model", "--method", "ngram", "--json"])
    assert result.exit_code == (0 if is_lossless else 1)
    assert asked["method"] == "ngram"
    assert '"is_lossless": ' + str(is_lossless).lower() in result.stdout
    CliRunner().invoke(app, ["verify", "some.specc"])
    assert asked["model"] == "some.specc"


REPORT = VerifyReport("ngram", 8, "eager", "float32", None, 1, 5, 1.5, 1e-6, 1e-6, ())
BUGGY = VerifyReport(
    "ngram", 8, "eager", "float32", None, 1, 5, 1.5, 1e-6, 1e-6,
    (specc.runtime.verdict.Divergence(0, 7, 4, 5, 1.0, 1e-6, 0.5, 0.5, "bug", "the gap is larger than the error"),),
)  # fmt: skip
