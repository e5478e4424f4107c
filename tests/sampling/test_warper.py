"""Every setting against transformers' own processors, row by row, on histories that include the drafts."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation.logits_process import SequenceBiasLogitsProcessor
from transformers.generation.utils import GenerationMixin

from specc.sampling import WARPERS, SamplingContext, bind_all, fit, join, neutral, process
from tests import reference

NEVER = float("-inf")
VOCAB, CAPACITY, BLOCK = 12, 20, 3
EOS = (2, 5)
PROFILE = settings(max_examples=100, derandomize=True, deadline=None)
OURS = ("logit_bias", "presence_penalty", "frequency_penalty")  # transformers has no such setting


def _theirs(scores, history, values, prompt_length, max_length, do_sample):
    """Return transformers' processed scores of one row."""
    config = GenerationConfig(
        do_sample=True, top_k=None, max_length=max_length,
        eos_token_id=list(EOS), **{k: v for k, v in values.items() if k not in ("top_k", *OURS)},
    )  # fmt: skip
    config.top_k, config.do_sample = values.get("top_k"), do_sample
    config._eos_token_tensor = torch.tensor(EOS)
    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    model._merge_criteria_processor_list = lambda default, custom: default
    processors = GenerationMixin._get_logits_processor(
        model, config, input_ids_seq_length=prompt_length, device="cpu", model_kwargs={}
    )
    return processors(torch.tensor([history]), scores[None].clone())[0]


def _context(histories, drafts, prompts, columns, max_length):
    slots = len(histories)
    tokens = torch.full((slots, CAPACITY + 1), 10**6)  # what lies beyond the length may be anything
    for row, history in zip(tokens, histories, strict=True):
        row[: len(history)] = torch.tensor(history)
    return SamplingContext(
        tokens, torch.tensor([len(h) for h in histories]), torch.tensor(prompts), torch.tensor(drafts),
        columns, torch.tensor([[*EOS, -1]]).expand(slots, -1), torch.tensor(max_length),
    )  # fmt: skip


TOKENS = st.integers(0, 5)  # few ids, so that n-grams and sequences do repeat
SEQUENCE = st.lists(TOKENS, min_size=1, max_size=4)
OPTIONS = {
    "sequence_bias": st.dictionaries(
        SEQUENCE.map(tuple), st.sampled_from([-8.0, 0.5, 2.25, NEVER]), min_size=1, max_size=5),
    "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
    "no_repeat_ngram_size": st.integers(0, 4),
    "bad_words_ids": st.lists(SEQUENCE, min_size=1, max_size=4),
    "min_length": st.integers(0, 12),
    "min_new_tokens": st.integers(0, 8),
    "forced_eos_token_id": st.sampled_from([3, [3, 7]]),
    "suppress_tokens": st.lists(st.integers(0, VOCAB + 2), max_size=4),
    "begin_suppress_tokens": st.lists(st.integers(0, VOCAB - 1), max_size=4),
    "temperature": st.sampled_from([0.5, 1.0, 1.7]),
    "top_k": st.sampled_from([0, 1, 4, 30]),
    "top_p": st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.2, 1.0]),
    "typical_p": st.sampled_from([0.2, 0.9, 1.0]),
    "epsilon_cutoff": st.sampled_from([0.0, 0.05, 0.2]),
    "eta_cutoff": st.sampled_from([0.0, 0.05, 0.3]),
}  # fmt: skip
SETTINGS = st.fixed_dictionaries({}, optional=OPTIONS)
SLOT = st.tuples(
    SETTINGS, st.booleans(), st.lists(TOKENS, min_size=1, max_size=10),
    st.lists(TOKENS, min_size=BLOCK, max_size=BLOCK),    st.integers(1, 10), st.integers(0, 4),
)  # fmt: skip


# Some versions of transformers pass over a sequence that is one token longer than the text before it.
_MATCHES_WHOLE = "multi_token_biases" in inspect.getsource(SequenceBiasLogitsProcessor)
_SEQUENCES = {"sequence_bias", "bad_words_ids"}


def _forces_only_suppressed(values):
    forced = values.get("forced_eos_token_id", [])
    forced = {forced} if isinstance(forced, int) else set(forced)
    return bool(forced) and forced <= set(values.get("suppress_tokens", []))


@PROFILE
@given(slots=st.lists(SLOT, min_size=1, max_size=3), seed=st.integers(0, 10**6), coarse=st.booleans())
def test_rows_equal_transformers(slots, seed, coarse):
    """Slots of different settings in one batch: each row is what transformers makes of its own history."""
    raw = torch.randn(len(slots), BLOCK + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    raw = raw.round() if coarse else raw
    raw[..., 8] = NEVER
    assume(not any(_forces_only_suppressed(slot[0]) for slot in slots))  # refused, as transformers does
    assume(_MATCHES_WHOLE or not any(_SEQUENCES & set(slot[0]) for slot in slots))
    bound = [bind_all(slot[0], vocab=VOCAB, eos=EOS, do_sample=slot[1]) for slot in slots]
    families = join(*(names for _, names in bound))
    fitted = [fit(values, families) for values, _ in bound]
    columns = {name: torch.stack([values[name] for values in fitted]) for name in fitted[0]}
    prompts = [min(slot[4], len(slot[2])) for slot in slots]
    ends = [len(slot[2]) + 1 + slot[5] for slot in slots]
    context = _context([s[2] for s in slots], [s[3] for s in slots], prompts, columns, ends)
    got = process(raw, context, families)
    for index, (values, do_sample, history, draft, *_) in enumerate(slots):
        for row in range(BLOCK + 1):
            now = history + draft[:row]
            expected = _theirs(raw[index, row], now, values, prompts[index], ends[index], do_sample)
            if bool((expected == NEVER).all()):
                assert bool((got[index, row] == NEVER).all() | got[index, row].isnan().any())
                continue
            torch.testing.assert_close(
                got[index, row], expected, rtol=1e-6, atol=1e-6, msg=lambda m: f"{slots}: {m}"
            )
            ours = reference.process(
                raw[index, row], now, values, prompt_length=prompts[index], eos=EOS,
                max_length=ends[index], do_sample=do_sample,
            )  # fmt: skip
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@PROFILE
@given(
    slot=SLOT, seed=st.integers(0, 10**6), bias=st.dictionaries(TOKENS, st.sampled_from([-3.0, 1.5, NEVER])),
    presence=st.sampled_from([-1.0, 0.0, 0.75]), frequency=st.sampled_from([-0.5, 0.0, 2.0]),
)  # fmt: skip
def test_our_own_settings_equal_the_reference(slot, seed, bias, presence, frequency):
    assume(not _forces_only_suppressed(slot[0]))
    values = {"logit_bias": bias, "presence_penalty": presence, "frequency_penalty": frequency, **slot[0]}
    history, draft, prompt = slot[2], slot[3], min(slot[4], len(slot[2]))
    raw = torch.randn(1, BLOCK + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    bound, families = bind_all(values, vocab=VOCAB, eos=EOS)
    columns = {name: value[None] for name, value in fit(bound, families).items()}
    got = process(raw, _context([history], [draft], [prompt], columns, [99]), families)
    for row in range(BLOCK + 1):
        expected = reference.process(
            raw[0, row], history + draft[:row], values, prompt_length=prompt, eos=EOS, max_length=99
        )
        torch.testing.assert_close(got[0, row], expected, rtol=1e-6, atol=1e-6)


def test_every_setting_is_tried_above():
    assert {warper.name for warper in WARPERS} == {*OPTIONS, *OURS}
    assert [warper.name for warper in WARPERS if warper.name not in OURS] == list(OPTIONS)


def test_neutral_columns_change_nothing():
    families = tuple(warper.name for warper in WARPERS)
    columns = neutral(families, 2)
    raw = torch.randn(2, BLOCK + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    raw[0, 1, 4] = NEVER
    context = _context([[1, 1, 1], [2]], [[1, 1, 1], [3, -1, -1]], [1, 1], columns, [4, 99])
    assert torch.equal(process(raw, context, families), raw)
    assert torch.equal(process(raw.bfloat16(), context, ()), raw.bfloat16().float())


def test_missing_drafts_do_not_disturb_earlier_rows():
    values, families = bind_all(
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "no_repeat_ngram_size": 1}, vocab=VOCAB
    )
    columns = {name: value[None] for name, value in fit(values, families).items()}
    raw = torch.randn(1, BLOCK + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    cut = process(raw, _context([[3, 4]], [[0, -1, -1]], [1], columns, [99]), families)
    full = process(raw, _context([[3, 4]], [[0, 6, 0]], [1], columns, [99]), families)
    assert torch.equal(cut[:, :2], full[:, :2])


def test_long_lists_and_the_end_of_the_cache():
    """Histories that fill the cache, and lists beyond the smallest bucket."""
    history = [token % 5 for token in range(CAPACITY)]
    long = {
        tuple(history[-9:]): 2.0,
        **{(token, token + 1): -1.0 for token in range(10)},
        (1,): 0.5,
        (4, 1): 7.0,
    }
    values, families = bind_all({"sequence_bias": long}, vocab=VOCAB)
    assert families == ("sequence_bias:64x16",)
    columns = {name: value[None] for name, value in fit(values, families).items()}
    raw = torch.zeros(1, BLOCK + 1, VOCAB)
    got = process(raw, _context([history], [[1, 4, 1]], [1], columns, [99]), families)
    for row in range(BLOCK + 1):
        expected = reference.process(raw[0, row], history + [1, 4, 1][:row], {"sequence_bias": long})
        assert torch.equal(got[0, row], expected)


@pytest.mark.parametrize("family", [warper.name for warper in WARPERS])
def test_traces_once_for_all_values(family):
    from torch.fx.experimental.proxy_tensor import make_fx

    some = {
        "sequence_bias": {(1, 2): 3.0}, "logit_bias": {3: 1.0}, "bad_words_ids": [[1, 2]],
        "suppress_tokens": [3], "begin_suppress_tokens": [3], "forced_eos_token_id": 3,
        "no_repeat_ngram_size": 2, "min_length": 9,
        "min_new_tokens": 9, "top_k": 2,
    }  # fmt: skip
    values = {family: some.get(family, 0.5), "temperature": 0.5}
    bound, families = bind_all(values, vocab=VOCAB, eos=EOS, do_sample=True)
    off = neutral(families, 1)
    on = {name: value[None] for name, value in fit(bound, families).items()}
    raw = torch.randn(1, BLOCK + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    base = _context([[1, 2, 1]], [[2, 1, 2]], [3], off, [5])

    def step(logits, tokens, length, prompt, draft, columns, eos, end):
        return process(logits, SamplingContext(tokens, length, prompt, draft, columns, eos, end), families)

    def inputs(columns):
        return (
            raw,
            base.tokens,
            base.length,
            base.prompt_length,
            base.draft,
            columns,
            base.eos,
            base.max_length,
        )

    traced = make_fx(step, tracing_mode="fake")(*inputs(off))
    assert torch.equal(traced(*inputs(on)), step(*inputs(on)))
    assert not torch.equal(traced(*inputs(on)), traced(*inputs(off)))
