"""Wrong input of every kind, at every public entry: a typed error that names the argument, before any work is done."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import specc
from specc import SpeccError, api
from tests.serving import PROMPTS, compiled, plain_text, target

IDS = torch.tensor([PROMPTS[0]])


class Half:
    """Has some of a method's members."""

    name = "half"
    default_block = 3


GENERATE = [
    {"input_ids": None},
    {"input_ids": "some text"},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"input_ids": [[1, 2], [3]]},
    {"input_ids": [["a"]]},
    {"input_ids": {"a": 1}},
    {"input_ids": 5},
    {"input_ids": object()},
    {"input_ids": [[1.0, 2.0]]},
    {"input_ids": torch.ones(1, 3)},
    {"input_ids": torch.ones(1, 3, dtype=torch.bool)},
    {"input_ids": torch.ones(1, 1, 3, dtype=torch.int64)},
    {"input_ids": torch.zeros(0, 3, dtype=torch.int64)},
    {"input_ids": torch.tensor(3)},
    {"input_ids": [[-1]]},
    {"input_ids": [[96]]},
    {"input_ids": [[2**40]]},
    {"input_ids": [[2**70]]},
    {"input_ids": [[None]]},
    {"input_ids": IDS.repeat(1, 40)},
    {"inputs": IDS, "input_ids": IDS},
    {"attention_mask": [1]},
    {"attention_mask": "all"},
    {"attention_mask": object()},
    {"attention_mask": IDS},
    {"attention_mask": torch.zeros_like(IDS)},
    {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])},
    {"attention_mask": torch.tensor([[0, 1, 0, 1, 1, 1]])},
    {"attention_mask": torch.full((1, 6), 0.5)},
    {"max_new_tokens": -1},
    {"max_new_tokens": 1.5},
    {"max_new_tokens": "3"},
    {"max_new_tokens": True},
    {"max_new_tokens": None, "max_length": "x"},
    {"max_new_tokens": None, "max_length": -2},
    {"max_new_tokens": None, "max_length": 2.5},
    {"seed": "x"},
    {"seed": 1.5},
    {"seed": True},
    {"seed": [1, 2]},
    {"seed": ["1"]},
    {"seed": []},
    {"accept": "maybe"},
    {"accept": 3},
    {"streamer": object()},
    {"streamer": 3},
    {"num_return_sequences": 0},
    {"num_return_sequences": "2"},
    {"num_return_sequences": None},
    {"num_return_sequences": 1.0},
    {"eos_token_id": "x"},
    {"eos_token_id": -1},
    {"eos_token_id": 1.5},
    {"eos_token_id": [1, -1]},
    {"eos_token_id": [[1]]},
    {"eos_token_id": list(range(9))},
    {"eos_token_id": True},
    {"eos_token_id": {}},
    {"eos_token_id": object()},
    {"pad_token_id": "x"},
    {"pad_token_id": [0]},
    {"stop_strings": 3},
    {"stop_strings": ""},
    {"stop_strings": ["a", ""]},
    {"stop_strings": [3]},
    {"stop_strings": "a"},  # no tokenizer
    {"do_sample": "yes"},
    {"do_sample": 2},
    {"output_scores": "yes"},
    {"return_dict_in_generate": 3},
    {"do_sample": True, "temperature": "hot"},
    {"do_sample": True, "temperature": -1.0},
    {"do_sample": True, "top_k": -1},
    {"do_sample": True, "top_p": 2.0},
    {"repetition_penalty": "x"},
    {"bad_words_ids": 3},
    {"sequence_bias": [1]},
    {"no_repeat_ngram_size": 9},
    {"logits_processor": 3},
    {"logits_processor": "abc"},
    {"constraint": 3},
    {"constraint": [None, None]},
    {"generation_config": 3},
    {"generation_config": "greedy"},
    {"generation_config": [("top_k", 3)]},
    {"num_beams": 2},
    {"num_beams": "many"},
    {"guidance_scale": 2.0},
    {"prefix_allowed_tokens_fn": lambda *_: [1]},
    {"max_time": 3.0},
    {"tempature": 1.0},
    {"past_key_values": (1,)},
]


def name(case):
    """Name a case without addresses: the processes of a run must collect the same names."""
    return ",".join(f"{k}={re.sub(r'0x[0-9a-f]+', '', str(v))[:24]!r}" for k, v in case.items())


@pytest.mark.parametrize("case", GENERATE, ids=map(name, GENERATE))
def test_generate(case):
    with pytest.raises(SpeccError) as caught:
        compiled().generate(**{"input_ids": IDS, "max_new_tokens": 3, "accept": "coupled", **case})
    words = str(caught.value)
    assert any(key in words for key in case) or "input_ids" in words or "do_sample" in words


STREAMS = [
    3,
    [3],
    [(1,)],
    [(1, 2)],
    [(1, {})],
    [(1, {"input_ids": [[1], [2]]})],
    [(1, {"input_ids": IDS, "num_return_sequences": 2})],
    [(1, {"input_ids": IDS, "tempature": 1})],
    [(1, {"input_ids": "x"})],
    [(1, {"input_ids": IDS, "streamer": 3})],
    [(1, {"input_ids": IDS, "accept": "x"})],
    None,
]


@pytest.mark.parametrize("requests", STREAMS, ids=str)
def test_stream(requests):
    with pytest.raises(SpeccError):
        list(compiled().stream(requests))


def test_the_object_works_after_all_that():
    out = compiled().generate(IDS, max_new_tokens=5)
    assert out[0, IDS.shape[1] :].tolist() == plain_text(PROMPTS[0], max_new_tokens=5)


COMPILE = [
    {"model": None},
    {"model": 3},
    {"model": object()},
    {"model": nn.Linear(2, 2)},
    {"model": ""},
    {"model": Path("no") / "such" / "folder"},
    {"method": None},
    {"method": 5},
    {"method": "dsprak"},
    {"method": Half()},
    {"method": "eagle3"},
    {"method": "draft_model"},
    {"drafter": "somewhere"},
    {"method": "dspark", "drafter": Path("no") / "such"},
    {"method": "dspark", "drafter": nn.Linear(2, 2)},
    {"method": "draft_model", "drafter": nn.Linear(2, 2)},
    {"method": "draft_model", "drafter": 3},
    {"block": -1},
    {"block": 65},
    {"block": 1.5},
    {"block": True},
    {"block": "many"},
    {"block": [3]},
    {"batch": 0},
    {"batch": -3},
    {"batch": "2"},
    {"batch": True},
    {"batch": 100000},
    {"batch": None},
    {"max_length": 0},
    {"max_length": 1},
    {"max_length": 100000},
    {"max_length": "long"},
    {"max_length": 20.0},
    {"accept": "maybe"},
    {"accept": None},
    {"accept": []},
    {"backend": "fast"},
    {"backend": None},
    {"backend": 3},
    {"exact": "bit"},
    {"exact": True},
    {"exact": "bitwise", "method": "plain", "block": None},
    {"weights": "int4"},
    {"device": "nowhere"},
    {"device": 1.5},
    {"dtype": "float3"},
    {"dtype": torch.int8},
    {"dtype": 3},
    {"disable_passes": ("no_pass",)},
    {"disable_passes": 3},
    {"dump": 3},
]


@pytest.mark.parametrize("case", COMPILE, ids=map(name, COMPILE))
def test_compile(case):
    given = {"model": target(), "method": "ngram", "block": 2, "max_length": 32, "backend": "eager", **case}
    with pytest.raises(SpeccError):
        specc.compile(given.pop("model"), given.pop("drafter", None), **given)


@pytest.mark.parametrize("entry", ["compile", "inspect", "verify", "bench"])
def test_a_model_that_is_none(entry):
    with pytest.raises(SpeccError):
        getattr(api, entry)(None, **({"methods": ["plain"]} if entry == "bench" else {"method": "ngram"}))


LOAD = [
    (None, {}),
    (3, {}),
    ("no/such.specc", {}),
    (".", {}),
    (__file__, {}),
    ("no/such.specc", {"device": "nowhere"}),
    ("no/such.specc", {"sha256": "zz"}),
    ("no/such.specc", {"sha256": 3}),
]


@pytest.mark.parametrize(("path", "options"), LOAD, ids=str)
def test_load(path, options):
    with pytest.raises(SpeccError):
        specc.load(path, **options)


@functools.cache
def written(tmp):
    path = Path(tmp) / "prompts.jsonl"
    path.write_text('{"prompt": 3}\n')
    return path


@pytest.mark.parametrize(
    "prompts", [3, [], [[]], [""], [3], [[1.5]], [[-1]], [[96]], "no/such.jsonl", [[1] * 200], ["text"]]
)
def test_verify(prompts):
    with pytest.raises(SpeccError):
        specc.verify(compiled(), prompts, max_new_tokens=3)


def test_verify_reads_files_strictly(tmp_path):
    with pytest.raises(SpeccError):
        specc.verify(compiled(), written(tmp_path), max_new_tokens=3)
    for settings in ({"tempature": 1}, {"do_sample": True}, {"num_return_sequences": 2}):
        with pytest.raises(SpeccError):
            specc.verify(compiled(), PROMPTS, max_new_tokens=3, settings=settings)


BENCH = [
    {"methods": ()},
    {"methods": ("fast",)},
    {"methods": ("plain",), "repeats": 0},
    {"methods": ("plain",), "speed": 1},
]


@pytest.mark.parametrize("case", BENCH, ids=map(name, BENCH))
def test_bench(case):
    with pytest.raises(SpeccError):
        specc.bench(target(), **case)


def test_check_raises_nothing():
    for case in ({"method": "dspark"}, {"method": "draft_model", "drafter": nn.Linear(2, 2)}):
        report = specc.check(target(), case.pop("drafter", None), probe=False, **case)
        assert not report.works
