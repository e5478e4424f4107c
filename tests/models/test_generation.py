"""Settings merge as transformers merges them; prompts, tokenizers and streamers are what specc needs."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import GenerationConfig, TextStreamer

from specc.errors import InputError
from specc.models.generation import (
    GLOBAL_DEFAULTS,
    check_streamer,
    encode_prompt,
    eos_ids,
    generation_defaults,
    generation_lengths,
    merge_generation,
    pad_id,
    tokenizer_difference,
    tokenizer_facts,
)
from tests.tiny import tiny_model, tiny_tokenizer


def _model(**values):
    model = tiny_model("llama")
    for key, value in values.items():
        setattr(model.generation_config, key, value)
    return model


def test_global_defaults_are_transformers_own():
    theirs = GenerationConfig._get_default_generation_params()
    assert {key: theirs[key] for key in GLOBAL_DEFAULTS} == dict(GLOBAL_DEFAULTS)


_ASSISTANT = re.compile("assistant|lookbehind")
CASES = [
    ({}, None, {}),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20}, None, {}),
    ({"do_sample": True, "temperature": 0.6}, None, {"temperature": 0.9}),
    ({"temperature": 0.6, "top_p": 0.8}, {"top_p": 0.5}, {}),
    ({"temperature": 0.6, "top_p": 0.8}, {"top_p": 0.5}, {"top_p": 0.7, "do_sample": True}),
    ({"top_k": 20, "eos_token_id": [1, 3]}, None, {"top_k": None, "eos_token_id": None}),
    ({"max_length": 50}, {"max_new_tokens": 4}, {"min_new_tokens": 2}),
]


@pytest.mark.parametrize(("of_model", "of_config", "given"), CASES)
def test_precedence_is_transformers(of_model, of_config, given):
    model = _model(**of_model)
    config = None if of_config is None else GenerationConfig(**of_config)
    theirs, _ = model._prepare_generation_config(config, **given)
    ours = merge_generation(generation_defaults(model), config, given)
    for key, value in theirs.to_dict().items():
        # lengths have their own rules, tested below; assistants are what specc replaces
        if not key.startswith(("_", "transformers", "max_length", "min_length")) and not _ASSISTANT.search(
            key
        ):
            assert ours.get(key) == value or (value is None and not ours.get(key)), key
    assert ours == merge_generation(generation_defaults(model), of_config, given)


@pytest.mark.parametrize(
    ("of_model", "given"),
    [
        ({}, {}),
        ({}, {"max_new_tokens": 7}),
        ({}, {"max_length": 30}),
        ({"max_length": 40}, {}),
        ({"max_length": 40}, {"max_new_tokens": 3}),
        ({"max_new_tokens": 9}, {"max_length": 40}),
        ({}, {"max_length": 3}),
    ],
)
def test_lengths_are_transformers(of_model, given):
    model = _model(**of_model)
    prompt = torch.tensor([[5, 9, 20, 7, 33]])
    settings = merge_generation(generation_defaults(model), None, given)
    largest, smallest = generation_lengths(settings, 5, 256)
    if largest > 5:
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **given)
        assert out.shape[1] == largest  # the tiny model does not stop by itself
    else:
        assert largest == given["max_length"]
    assert smallest == 0


def test_smallest_length():
    assert generation_lengths({"min_new_tokens": 3, "min_length": 50}, 5, 256)[1] == 8
    assert generation_lengths({"min_length": 50}, 5, 256)[1] == 50
    assert generation_lengths({}, 250, 256)[0] == 256


def test_defaults_are_plain_json():
    model = _model(eos_token_id=[1, 3], suppress_tokens=[4])
    assert json.loads(json.dumps(generation_defaults(model)))["suppress_tokens"] == [4]
    assert merge_generation({}, None, {"eos_token_id": torch.tensor([4, 5])})["eos_token_id"] == [4, 5]


def test_end_and_pad_ids():
    assert eos_ids({}) == ()
    assert eos_ids({"eos_token_id": 3}) == (3,)
    assert eos_ids({"eos_token_id": [3, 4]}) == (3, 4)
    assert pad_id({"pad_token_id": 0, "eos_token_id": 3}) == 0
    assert pad_id({"eos_token_id": [3, 4]}) == 3
    assert pad_id({}) is None
    for wrong in (-1, [3, -2], ["x"], [True]):
        with pytest.raises(InputError, match="eos_token_id"):
            eos_ids({"eos_token_id": wrong})


def test_streamers_are_duck_typed():
    class Mine:
        def put(self, value):
            pass

        def end(self):
            pass

    mine, theirs = Mine(), TextStreamer(tiny_tokenizer())
    assert check_streamer(mine) is mine
    assert check_streamer(theirs) is theirs
    with pytest.raises(InputError, match="streamer"):
        check_streamer(print)


class TestTokenizers:
    def test_facts(self):
        facts = tokenizer_facts(tiny_tokenizer())
        assert (facts.vocab, facts.eos, facts.bos, facts.pad, facts.has_chat_template) == (96, 1, 2, 0, True)

    def test_same(self):
        assert tokenizer_difference(tiny_tokenizer(), tiny_tokenizer()) is None

    def test_the_first_differing_id_is_named(self):
        other = tiny_tokenizer()
        vocabulary = json.loads(other.backend_tokenizer.to_str())
        words = vocabulary["model"]["vocab"]
        words["w40"], words["w41"] = 41, 40
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        swapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(vocabulary)))
        said = tokenizer_difference(tiny_tokenizer(), swapped)
        assert said == "id 40 is 'w40' in one tokenizer and 'w41' in the other"

    def test_another_count(self):
        said = tokenizer_difference(tiny_tokenizer(96), tiny_tokenizer(100))
        assert said is not None
        assert "id 96 is 'w96'" in said


class TestPrompts:
    def test_chat(self):
        ids = encode_prompt(tiny_tokenizer(), "w9 w10")
        assert ids.dtype is torch.int64
        assert ids.tolist() == [[2, 5, 9, 10, 1, 6]]

    def test_messages(self):
        messages = [{"role": "system", "content": "w8"}, {"role": "user", "content": "w9"}]
        assert encode_prompt(tiny_tokenizer(), messages).tolist() == [[2, 4, 8, 1, 5, 9, 1, 6]]

    def test_raw(self):
        assert encode_prompt(tiny_tokenizer(), "w9 w10", chat=False).tolist() == [[9, 10]]

    def test_without_a_template(self):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        assert encode_prompt(tokenizer, "w9 w10").tolist() == [[9, 10]]
        with pytest.raises(InputError, match="no chat template"):
            encode_prompt(tokenizer, [{"role": "user", "content": "w9"}])

    def test_wrong(self):
        with pytest.raises(InputError, match="needs a tokenizer"):
            encode_prompt(None, "w9")
        with pytest.raises(InputError, match="no tokens"):
            encode_prompt(tiny_tokenizer(), "", chat=False)
