"""Checking settings on the host, families, buckets, and columns of one slot."""

from __future__ import annotations

import pytest
import torch

from specc.errors import InputError, InvariantError, SpeccError, UnknownNameError, UnsupportedError
from specc.sampling import WARPERS, Warper, bind_all, fit, is_sampled, join, neutral, settings_columns, split

VOCAB = 50
NAN, INF = float("nan"), float("inf")
WRONG = {
    "sequence_bias": [{}, [], 3, {(): 1.0}, {(1,): "a"}, {(1,): NAN}, {(1,): INF}, {(-1,): 1.0},
                      {(VOCAB,): 1.0}, {1: 1.0}, [[[1]]], [[[1], 2.0, 3]], {("a",): 1.0}, {(True,): 1.0}],
    "logit_bias": [[1], {VOCAB: 1.0}, {-1: 1.0}, {1: NAN}, {1: INF}, {1: "x"}, {1.5: 1.0}],
    "repetition_penalty": [0, 0.0, -1.0, NAN, INF, "1", True, [1.2], 1e39],
    "presence_penalty": [2.1, -2.5, NAN, "0"],
    "frequency_penalty": [2.1, -2.5, NAN, "0"],
    "no_repeat_ngram_size": [-1, 1.5, "2", True],
    "bad_words_ids": [[], [1], ["ab"], [[-1]], [[VOCAB]], [[1.0]], {1: 2}, ((1,),)],
    "min_length": [-1, 1.0, "3", 2**70],
    "min_new_tokens": [-1, 1.0, "3"],
    "forced_eos_token_id": [-1, VOCAB, [], 1.5, "2", [VOCAB], True],
    "suppress_tokens": [3, ["a"], [-1], [1.5], "12", torch.zeros(2, 2)],
    "begin_suppress_tokens": [3, ["a"], [-1], [1.5]],
    "temperature": [-0.1, NAN, INF, "1", True, None.__class__],
    "top_k": [-1, 1.5, "4", False],
    "top_p": [-0.1, 1.1, NAN, "1"],
    "min_p": [-0.1, 1.1, NAN],
    "typical_p": [0.0, -0.1, 1.1, NAN],
    "epsilon_cutoff": [-0.1, 1.0, NAN],
    "eta_cutoff": [-0.1, 1.0, NAN],
}  # fmt: skip


def test_names_are_unique_and_columns_belong_to_their_family():
    names = [warper.name for warper in WARPERS]
    assert len(set(names)) == len(names)
    assert set(WRONG) == set(names)
    columns = [name for warper in WARPERS for name in warper.columns(warper.bucket)]
    assert len(set(columns)) == len(columns)
    for warper in WARPERS:
        assert isinstance(warper, Warper)
        assert next(iter(warper.columns(warper.bucket).values())).shape == warper.bucket


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(InputError) as caught:
        bind_all({name: value}, vocab=VOCAB, eos=(1,), do_sample=True)
    assert caught.value.argument == name
    assert isinstance(caught.value, SpeccError)


def test_unknown_and_unsupported():
    with pytest.raises(UnknownNameError, match="top_p"):
        bind_all({"topp": 0.5}, vocab=VOCAB)
    with pytest.raises(UnsupportedError, match="8"):
        bind_all({"no_repeat_ngram_size": 9}, vocab=VOCAB)


def test_forcing_only_what_is_suppressed_is_refused():
    with pytest.raises(InputError, match="forced_eos_token_id"):
        bind_all({"forced_eos_token_id": [3, 4], "suppress_tokens": [3, 4, 5]}, vocab=VOCAB)
    assert bind_all({"forced_eos_token_id": [3, 4], "suppress_tokens": [3]}, vocab=VOCAB)[1]


def test_what_changes_nothing_needs_no_family():
    off = {
        "sequence_bias": None, "logit_bias": {}, "repetition_penalty": 1.0, "presence_penalty": 0,
        "frequency_penalty": 0.0, "no_repeat_ngram_size": 0, "bad_words_ids": [[1]], "min_length": 0,
        "min_new_tokens": 0, "suppress_tokens": [], "begin_suppress_tokens": [VOCAB], "top_k": 0, "top_p": 1,
        "min_p": 0, "typical_p": 1.0, "epsilon_cutoff": 0, "eta_cutoff": 0.0,
    }  # fmt: skip
    values, families = bind_all(off, vocab=VOCAB, eos=(1,), do_sample=True)
    assert families == ("temperature",)
    assert values == {"temperature": torch.tensor(1.0)}
    assert bind_all({"min_length": 5}, vocab=VOCAB, eos=()) == ({}, ())  # nothing to ban


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1e-60}, {}])
def test_greedy_requests_skip_sampling_settings_only(settings):
    given = {**settings, "top_k": 5, "top_p": 0.5, "min_length": 4}
    _, families = bind_all(given, vocab=VOCAB, eos=(1,), do_sample=bool(settings))
    assert families == ("min_length",)
    assert not is_sampled(families)
    _, families = bind_all({**given, "temperature": 2}, vocab=VOCAB, eos=(1,), do_sample=True)
    assert families == ("min_length", "temperature", "top_k", "top_p")
    assert is_sampled(families)
    assert split(families) == (("min_length",), ("temperature", "top_k", "top_p"))


def test_families_join_in_order_with_the_widest_bucket():
    joined = join(("top_p", "bad_words_ids:128x8"), ("temperature", "bad_words_ids:64x16"), ())
    assert joined == ("bad_words_ids:128x16", "temperature", "top_p")
    assert settings_columns(joined)["bad_words_ids"].shape == (128, 16)
    assert neutral(joined, 3)["bad_words_ids"].shape == (3, 128, 16)
    with pytest.raises(UnknownNameError):
        join(("top_q",))


def test_lists_take_the_next_power_of_two():
    many = [[token % 40, token // 40] for token in range(65)]
    values, families = bind_all({"bad_words_ids": many, "suppress_tokens": list(range(5))}, vocab=VOCAB)
    assert families == ("bad_words_ids:128x8", "suppress_tokens")
    wide = fit(values, ("bad_words_ids:256x16", "suppress_tokens:128", "top_k"))
    assert wide["bad_words_ids"].shape == (256, 16)
    assert wide["bad_words_ids"][0].tolist() == [-1] * 14 + [0, 0]
    assert wide["suppress_tokens"][:6].tolist() == [0, 1, 2, 3, 4, -1]
    assert wide["top_k"].item() == 0
    with pytest.raises(InvariantError, match="bad_words_ids"):
        fit(values, ("suppress_tokens",))


def test_transformers_forms_are_taken():
    pairs = bind_all({"sequence_bias": [[[1, 2], 1.5], [[3], -2.0]]}, vocab=VOCAB)[0]
    table = bind_all({"sequence_bias": {(1, 2): 1.5, (3,): -2.0}}, vocab=VOCAB)[0]
    assert all(torch.equal(pairs[name], table[name]) for name in table)
    assert bind_all({"suppress_tokens": torch.tensor([4, 4])}, vocab=VOCAB)[0]["suppress_tokens"][1] == -1
    kept = bind_all({"bad_words_ids": [[1], [1, 2], []]}, vocab=VOCAB, eos=(1,))[0]["bad_words_ids"]
    assert (kept[:, -1] >= 0).sum() == 1
