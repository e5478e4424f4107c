"""The tokenizer of a package answers as the one that was saved, or is not saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.fields import read_json
from specc.artifact.tokenizer import CONFIG, TOKENIZER, PackageTokenizer, read_tokenizer, write_tokenizer
from specc.errors import InputError, UnsupportedError
from specc.models.generation import encode_prompt
from tests.tiny import tiny_tokenizer

PATH = Path("x.specc")
TURNS = [
    {"role": "user", "content": "w9 w8"},
    {"role": "assistant", "content": "w7"},
    {"role": "user", "content": "w10"},
]


def packed(tokenizer: Any) -> PackageTokenizer:
    files = write_tokenizer(tokenizer)
    config = read_json(PATH, CONFIG, memoryview(files[CONFIG]))
    return read_tokenizer(PATH, memoryview(files[TOKENIZER]), config)


def byte_tokenizer(**config: Any) -> Any:
    """Return a byte-level tokenizer of transformers with a template that uses what templates use."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", **config)


TEMPLATE = """
{%- for m in messages %}
    {%- if m.role == 'tool' %}{% continue %}{% endif %}
    {%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}
{{ bos_token }}{{ m | tojson }}{% generation %}{{ m.content | trim }}{% endgeneration %}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}>{{ mood | default('plain') }}{% endif %}
"""


def test_encodes_and_decodes_alike() -> None:
    text = "Ünï <s> code\n 日本 </s>  don't ."
    for old in (tiny_tokenizer(), byte_tokenizer(), byte_tokenizer(clean_up_tokenization_spaces=True)):
        new = packed(old)
        assert len(new) == len(old)
        for special in (True, False):
            ids = old(text, add_special_tokens=special)["input_ids"]
            assert new(text, add_special_tokens=special)["input_ids"] == ids
            for skip in (True, False):
                for given in (ids, torch.tensor(ids)):
                    assert new.decode(given, skip_special_tokens=skip) == old.decode(
                        given, skip_special_tokens=skip
                    )
        for name in ("eos_token_id", "bos_token_id", "pad_token_id", "chat_template"):
            assert getattr(new, name) == getattr(old, name)
        assert new.convert_ids_to_tokens([3, 5]) == old.convert_ids_to_tokens([3, 5])
        assert new.batch_decode([[3], [5]]) == old.batch_decode([[3], [5]])


def test_batches_are_padded_left() -> None:
    old = tiny_tokenizer()
    new = packed(old)
    texts = ["w9", "w8 w7 w10"]
    one = old(texts, return_tensors="pt", padding=True)
    other = new(texts, return_tensors="pt", padding=True)
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert torch.equal(one["attention_mask"], other["attention_mask"])
    with pytest.raises(InputError, match="padding=True"):
        new(texts, return_tensors="pt")


@pytest.mark.parametrize("generate", [True, False])
def test_chat_templates_render_alike(generate: bool) -> None:
    for old in (tiny_tokenizer(), byte_tokenizer(chat_template=TEMPLATE)):
        new = packed(old)
        for given in ({}, {"mood": "good"}):
            one, other = (
                t.apply_chat_template(TURNS, add_generation_prompt=generate, tokenize=False, **given)
                for t in (old, new)
            )
            assert one == other
        assert torch.equal(encode_prompt(new, TURNS), encode_prompt(old, TURNS))
        ids = new.apply_chat_template(TURNS, return_tensors="pt")["input_ids"]
        assert torch.equal(
            ids, old.apply_chat_template(TURNS, return_tensors="pt", return_dict=True)["input_ids"]
        )


def test_named_templates() -> None:
    old = byte_tokenizer(chat_template={"default": "plain", "tool_use": "tools {{ tools | length }}"})
    new = packed(old)
    for given in ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        assert new.apply_chat_template(TURNS, tokenize=False, **given) == old.apply_chat_template(
            TURNS, tokenize=False, **given
        )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_templates_stay_in_the_sandbox(template: str) -> None:
    tokenizer = packed(byte_tokenizer())
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="what the chat template takes"):
        tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_no_template() -> None:
    with pytest.raises(InputError, match="no such chat template"):
        packed(byte_tokenizer()).apply_chat_template(TURNS)


def test_the_last_call_leaves_no_trace() -> None:
    old = tiny_tokenizer()
    before = write_tokenizer(old)
    old("w9 w8 w7", truncation=True, max_length=2, padding="max_length")
    assert write_tokenizer(old) == before
    assert json.loads(before[TOKENIZER])["padding"] is None


def test_what_is_not_a_file_of_the_tokenizers_library_is_not_saved() -> None:
    class Own:
        chat_template = None

    with pytest.raises(UnsupportedError, match="Own is not backed by the tokenizers library"):
        write_tokenizer(Own())


def test_python_code_around_a_tokenizer_is_noticed() -> None:
    tokenizer = byte_tokenizer()
    plain = type(tokenizer)

    class Shouting(plain):  # type: ignore[valid-type, misc]  # a class made at run time
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    tokenizer.__class__ = Shouting
    with pytest.raises(UnsupportedError, match="Shouting decodes otherwise"):
        write_tokenizer(tokenizer)
