"""Every setting of `generate` at any batch, block and method: greedy text is transformers', sampled is plain's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from specc.errors import InputError, UnsupportedError
from specc.runtime import arguments
from tests.serving import CAPACITY, EVERYTHING, PROMPTS, compiled, plain_text, reference_text, serve
from tests.tiny import EOS

NEW = 14


@functools.cache
def base(index: int) -> list[int]:
    """Greedy text without settings."""
    return plain_text(PROMPTS[index], max_new_tokens=NEW)


def greedy_cases() -> dict[str, dict[str, Any]]:
    """Return settings that all change the greedy text of at least one prompt."""
    text = base(0)
    end = text[4]
    return {
        "repetition_penalty": {"repetition_penalty": 1.6},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[text[3]], text[5:7], text[1:4]]},
        "min_length": {"min_length": 15, "eos_token_id": end},
        "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [end, text[6]]},
        "forced_eos_token_id": {"forced_eos_token_id": [EOS, 7]},
        "suppress_tokens": {"suppress_tokens": [text[0], text[2], text[7]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [text[0], text[1]]},
        "sequence_bias": {"sequence_bias": {(text[0],): -9.0, (text[2], 33): 12.0, (33, 34, 35): 20.0, (33, 34): 20.0}},
        "eos_token_id": {"eos_token_id": [text[9], text[4]]},
        "together": {
            "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [text[2:4]], "min_new_tokens": 6,
            "suppress_tokens": [text[1]], "sequence_bias": {(text[4],): 4.0}, "eos_token_id": text[4],
            "forced_eos_token_id": 7, "begin_suppress_tokens": [text[0]],
        },
    }  # fmt: skip


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.06},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "logit_bias": {"logit_bias": {30: 4.0, 31: -100.0}},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": -1.5},
    "together": {
        "temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.97, "epsilon_cutoff": 1e-3,
        "repetition_penalty": 1.2, "frequency_penalty": 0.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5,
        "bad_words_ids": [[30, 31], [32]],
    },
}  # fmt: skip


def batch_of(prompts: Any) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


# Alone in its step's accept tail; the others are alone in their request only (below): a tail takes a second to trace.
@pytest.mark.parametrize("name", ["repetition_penalty", "sequence_bias", "min_new_tokens", "together"])
def test_one_setting_in_a_padded_batch_equals_transformers_on_unpadded_rows(name):
    setting = greedy_cases()[name]
    out = compiled().generate(**batch_of(PROMPTS), max_new_tokens=NEW, pad_token_id=0, **setting)
    width = max(map(len, PROMPTS))
    for index, row in enumerate(out):
        want = plain_text(PROMPTS[index], max_new_tokens=NEW, **setting)
        assert row[width:].tolist()[: len(want)] == want, index
        assert set(row[width + len(want) :].tolist()) <= {0}


@pytest.mark.parametrize("name", ["temperature", "top_p", "frequency_penalty", "together"])
def test_one_sampled_setting_equals_the_slow_loop(name):
    setting = {**SAMPLED[name], "do_sample": True}
    out = compiled().generate(
        **batch_of(PROMPTS), max_new_tokens=NEW, pad_token_id=0, seed=[3, 4, 5], **setting
    )
    width = max(map(len, PROMPTS))
    for index, row in enumerate(out):
        want = reference_text(PROMPTS[index], NEW, seed=3 + index, **setting)
        assert row[width:].tolist()[: len(want)] == want, index


def test_every_setting_changes_the_text_of_some_prompt():
    """Otherwise the tests below would be empty."""
    for name, setting in greedy_cases().items():
        assert any(plain_text(PROMPTS[i], max_new_tokens=NEW, **setting) != base(i) for i in range(3)), name
    for name, setting in SAMPLED.items():
        plain = {"do_sample": True, "top_k": 0}
        texts = [(reference_text(PROMPTS[i], NEW, **{**plain, **setting}), reference_text(PROMPTS[i], NEW, **plain))
                 for i in range(3)]  # fmt: skip
        assert any(a != b for a, b in texts), name


# Each object takes every stride-th case from its own start: together they take all of them, the last one alone, too.
OBJECTS = [
    ("plain", 0, 3, slice(0, None, 4)), ("ngram", 3, 1, slice(1, None, 4)), ("draft_model", 0, 3, slice(2, None, 4)),
    ("draft_model", 1, 3, slice(3, None, 4)), ("draft_model", 3, 3, slice(None)),
]  # fmt: skip


@pytest.mark.parametrize(("method", "block", "batch", "part"), OBJECTS)
def test_all_settings_in_one_stream_under_every_method(method, block, batch, part):
    wanted, requests = [], []
    for number, (index, setting) in enumerate((i, s) for i in range(3) for s in greedy_cases().values()):
        new = NEW - number % 5
        requests.append({"input_ids": [list(PROMPTS[index])], "max_new_tokens": new, **setting})
        wanted.append(plain_text(PROMPTS[index], max_new_tokens=new, **setting))
    for number, (index, setting) in enumerate((i, s) for i in range(2) for s in SAMPLED.values()):
        given = {**setting, "do_sample": True, "seed": number}
        requests.insert(2 * number, {"input_ids": [list(PROMPTS[index])], "max_new_tokens": NEW, **given})
        wanted.insert(2 * number, reference_text(PROMPTS[index], NEW, **given))
    requests, wanted = requests[part], wanted[part]
    object_ = compiled(method, block, batch)
    assert serve(object_, requests, EVERYTHING) == wanted
    before = list(object_.engine.compiles)
    assert serve(object_, requests[:4], EVERYTHING) == wanted[:4]
    assert object_.engine.compiles == before, "other values of known settings compiled again"


IDS = st.integers(2, 20)
SEQUENCES = st.lists(st.lists(IDS, min_size=1, max_size=3), min_size=1, max_size=4)
LOGIT_SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.floats(0.5, 2.0),
    "no_repeat_ngram_size": st.integers(1, 4),
    "bad_words_ids": SEQUENCES,
    "min_length": st.integers(0, 20),
    "min_new_tokens": st.integers(0, NEW),
    "forced_eos_token_id": st.sampled_from([EOS, 7, [7, 9]]),
    "suppress_tokens": st.lists(IDS, max_size=6, unique=True).filter(lambda ids: not {7, 9} <= set(ids)),
    "begin_suppress_tokens": st.lists(IDS, min_size=1, max_size=6),
    "sequence_bias": st.dictionaries(
        st.lists(IDS, min_size=1, max_size=3).map(tuple), st.floats(-8, 8), min_size=1, max_size=4
    ),
    "eos_token_id": st.one_of(IDS, st.lists(IDS, min_size=1, max_size=3, unique=True)),
}
OWN_SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(IDS, st.floats(-8, 8), min_size=1, max_size=4),
    "temperature": st.floats(0.3, 2.0),
    "top_k": st.integers(0, 96),
    "top_p": st.floats(0.1, 1.0),
    "min_p": st.floats(0.0, 0.5),
    "typical_p": st.floats(0.1, 1.0),
}


@st.composite
def requests_of(draw: st.DrawFn, *, sampled: bool) -> dict[str, Any]:
    known = {**LOGIT_SETTINGS, **OWN_SETTINGS} if sampled else LOGIT_SETTINGS
    names = draw(st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True))
    request = {name: draw(known[name]) for name in names}
    if "forced_eos_token_id" in request and request["forced_eos_token_id"] in request.get(
        "suppress_tokens", []
    ):
        del request["suppress_tokens"]
    # Ids up to 20 repeat often: histories in which the settings have something to do.
    request["input_ids"] = [draw(st.lists(IDS, min_size=1, max_size=12))]
    request["max_new_tokens"] = draw(st.integers(1, NEW))
    if sampled:
        request |= {"do_sample": True, "seed": draw(st.integers(-(2**63), 2**63 - 1))}
    return request


OBJECT = st.sampled_from([("plain", 0, 3), ("ngram", 3, 1), ("draft_model", 3, 3)])
PROPERTY = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


@PROPERTY
@given(OBJECT, st.lists(requests_of(sampled=False), min_size=1, max_size=4))
def test_property_greedy_equals_transformers(which, requests):
    texts = serve(compiled(*which), requests, EVERYTHING)
    for text, request in zip(texts, requests, strict=True):
        given_ = {n: v for n, v in request.items() if n != "input_ids"}
        assert text == plain_text(request["input_ids"][0], **given_)


@PROPERTY
@given(OBJECT, st.lists(requests_of(sampled=True), min_size=1, max_size=4))
def test_property_sampled_equals_the_slow_loop(which, requests):
    texts = serve(compiled(*which), requests, EVERYTHING)
    for text, request in zip(texts, requests, strict=True):
        given_ = {n: v for n, v in request.items() if n not in ("input_ids", "max_new_tokens")}
        assert text == reference_text(request["input_ids"][0], request["max_new_tokens"], **given_)


@pytest.mark.parametrize("name", ["bad_words_ids", "suppress_tokens", "sequence_bias"])
def test_a_long_list_leaves_nothing_behind_for_a_short_one(name):
    """A slot that ran with a wide bucket serves a narrow one next, alone and beside another."""
    text = base(0)
    others = [i for i in range(2, 96) if i not in text]
    ids = {
        "bad_words_ids": [[i] for i in others],
        "suppress_tokens": others,
        "sequence_bias": {(i,): -50.0 for i in others},
    }
    long, short = ids[name], ({(text[0],): -50.0} if name == "sequence_bias" else ids[name][:1])
    for setting in (long, short, long, short):
        for count in (1, len(PROMPTS)):
            given = batch_of(PROMPTS[:count])
            out = compiled().generate(**given, max_new_tokens=NEW, pad_token_id=0, **{name: setting})
            for index in range(count):
                want = reference_text(PROMPTS[index], NEW, **{name: setting})
                assert out[index, given["input_ids"].shape[1] :].tolist()[: len(want)] == want


def test_every_field_of_transformers_is_honoured_or_refused():
    """At a value that changes text; what is ignored changes none, being about caches, beams or assistants."""
    known = arguments._SETTINGS | arguments._OWN | arguments._IGNORED | set(arguments._REFUSED)
    assert set(GenerationConfig().to_dict()) <= known
    values: dict[str, Any] = {"guidance_scale": 0, "max_time": 0, "forced_bos_token_id": 0, "num_beams": 0,
                              "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2}  # fmt: skip
    for name, neutral in arguments._REFUSED.items():
        ids = torch.tensor([PROMPTS[0]])
        with pytest.raises(UnsupportedError, match=name):
            compiled().generate(ids, max_new_tokens=2, **{name: values.get(name, 3)})
        for value in (None, False, neutral):
            compiled().generate(ids, max_new_tokens=0, **{name: value})


def test_lengths_that_do_not_fit(caplog: pytest.LogCaptureFixture):
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(InputError, match="max_length"):
        compiled().generate(ids, max_length=ids.shape[1] - 1)
    assert torch.equal(compiled().generate(ids, max_length=ids.shape[1]), ids)
    assert not caplog.records
    whole = compiled().generate(ids, max_new_tokens=CAPACITY, eos_token_id=None)
    assert whole.shape[1] == CAPACITY
    assert caplog.text.count(f"room for {CAPACITY - ids.shape[1]} more") == 1
    caplog.clear()
    compiled().check_request(ids, max_new_tokens=CAPACITY)
    assert not caplog.records, "only a call that goes on says so"
    for empty in ([], [[]]):
        with pytest.raises(InputError, match="at least one token"):
            compiled().generate(empty)
    for mask in ([[0.5] * ids.shape[1]], [[1.7] * ids.shape[1]]):
        with pytest.raises(InputError, match="zeros and ones"):
            compiled().generate(ids, mask)
