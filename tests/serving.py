"""Compiled tiny models that tests of several files share, and what their text is compared with."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import specc
from specc import Compiled
from tests import reference
from tests.tiny import EOS, noisy_copy, tiny_model

CAPACITY = 64
VOCAB = 96
PROMPTS = ([5, 17, 40, 41, 17, 40], [9], [60, 61, 62, 60, 61, 62, 60, 61, 33, 60, 61])

# Every family that a request may bring: a stream that begins with this request builds one step for all others.
EVERYTHING: Mapping[str, Any] = {
    "do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9,
    "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4, "sequence_bias": {(7,): 1.0}, "logit_bias": {7: 1.0},
    "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "no_repeat_ngram_size": 3,
    "bad_words_ids": [[8]], "min_length": 2, "min_new_tokens": 1, "forced_eos_token_id": EOS,
    "suppress_tokens": [9], "begin_suppress_tokens": [10], "seed": 1,
}  # fmt: skip


@functools.cache
def target() -> Any:
    return tiny_model("llama", num_hidden_layers=2)  # the second layer's K/V depend on the first one's


@functools.cache
def _first(method: str, batch: int) -> Compiled:
    drafter = noisy_copy(target()) if method == "draft_model" else None
    block = 0 if method == "plain" else 3
    return specc.compile(
        target(),
        drafter,
        method=method,
        block=block,
        batch=batch,
        max_length=CAPACITY,
        backend="eager",
        accept="coupled",
    )


def compiled(
    method: str = "draft_model", block: int = 3, batch: int = 3, accept: Any = "coupled"
) -> Compiled:
    """Return a compiled tiny llama; the drafter of ``draft_model`` is a noisy copy, often right.

    Those of one method and batch share an engine, and so what was traced.
    """
    first = _first(method, batch)
    return Compiled(
        first.engine, first.method, block, accept, info=first.info, generation=first.generation_defaults
    )


def plain_text(prompt: Sequence[int], **settings: Any) -> list[int]:
    """Return the new tokens of transformers' generate on the unpadded prompt."""
    ids = torch.tensor([list(prompt)])
    out = target().generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
    return [int(token) for token in out[0, len(prompt) :]]


def reference_text(prompt: Sequence[int], new: int, *, seed: int = 0, **settings: Any) -> list[int]:
    """Return the new tokens of the slow loop of tests/reference.py, coupled where it samples."""
    given = dict(settings)
    do_sample = bool(given.pop("do_sample", False))
    eos = given.pop("eos_token_id", EOS)
    if do_sample:
        given.setdefault("top_k", 50)  # transformers' default
    return reference.generate(
        next_logits, prompt, new, rule="coupled", seed=seed, settings=given, do_sample=do_sample,
        eos=[eos] if isinstance(eos, int) else list(eos or ()),
    ).tokens  # fmt: skip


def next_logits(history: list[int]) -> torch.Tensor:
    return _next_logits(tuple(history))


@functools.lru_cache(20_000)
def _next_logits(history: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = target()(torch.tensor([history])).logits[0, -1].float()
    return logits


def serve(
    object_: Compiled, requests: Sequence[Mapping[str, Any]], first: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Run requests through `Compiled.stream`; return each one's new tokens.

    ``first`` is a request put before them, whose tokens are left out: its families are in all steps then.
    """
    given = [(index, dict(request)) for index, request in enumerate(requests)]
    if first is not None:
        given.insert(0, (-1, {"input_ids": [list(PROMPTS[0])], "max_new_tokens": 1, **first}))
    texts: list[list[int]] = [[] for _ in requests]
    for name, tokens in object_.stream(given):
        if name >= 0:
            texts[name].extend(tokens)
    return texts


@functools.cache
def letters_tokenizer() -> Any:
    """Return a byte-level tokenizer of 96 ids: a to z, then pairs of letters; texts have no spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = [(letters[i % 26], letters[(7 * i + i // 26) % 26]) for i in range(VOCAB - 3 - 26)]
    words = ["<pad>", "<eos>", "<bos>", *letters, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(words[:3])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
