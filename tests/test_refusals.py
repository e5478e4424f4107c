"""Requests that cannot be honoured get one typed error before any work; stops and caps are exact."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import specc
from specc import ArtifactError, InputError, UnknownNameError, UnsupportedError
from specc import build as build_module
from tests.rig import Rig, generate, loaded, own_text, recorded
from tests.tiny import noisy_copy, tiny_model, tiny_tokenizer

PROMPT = [5, 17, 40, 41, 17, 40]
BLOCK = 3


@pytest.fixture
def untraced(monkeypatch):
    """Let tracing fail the test: what is refused is refused before it."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(build_module, "trace_model", work)


def tiny(model_type: str, **values: Any) -> Any:
    config = AutoConfig.for_model(model_type, **values)
    return AutoModelForCausalLM.from_config(config).eval()


def broken(value: float) -> Any:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    return model


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
COMPILES: list[tuple[dict[str, Any], Any, str]] = [
    ({"method": "ngramm"}, UnknownNameError, "unknown method 'ngramm'; did you mean 'ngram'"),
    ({"method": "eagle"}, UnknownNameError, "did you mean 'eagle3'"),
    ({"method": 3}, InputError, "method: "),
    ({"backend": "inductr"}, UnknownNameError, "did you mean 'inductor'"),
    ({"accept": "coupld"}, UnknownNameError, "did you mean 'coupled'"),
    ({"block": -1}, InputError, "block: a whole number from 0 to 64; got -1"),
    ({"block": 65}, InputError, "block: .*got 65"),
    ({"block": 10**9}, InputError, "block: "),
    ({"block": 2.0}, InputError, "block: .*got 2.0"),
    ({"block": True}, InputError, "block: .*got True"),
    ({"method": "plain", "block": 2}, UnsupportedError, "block must be 0, not 2"),
    ({"batch": 0}, InputError, "batch: "),
    ({"batch": 10**6}, InputError, "batch: "),
    ({"max_length": 1}, InputError, "max_length: "),
    ({"max_length": 257}, InputError, "max_length: at most 256, the positions this model has; got 257"),
    ({"dtype": "int7"}, InputError, "dtype: "),
    ({"dtype": torch.bfloat16}, InputError, "dtype: .*float32"),
    ({"device": "cuda:99"}, (InputError, UnsupportedError), "cuda:99|device"),
    ({"method": "ngram", "drafter": "somewhere"}, InputError, "drafts without one"),
    ({"method": "draft_model"}, InputError, "needs a smaller causal LM"),
    ({"method": "eagle3"}, InputError, "needs a drafter"),
    ({"method": "eagle3", "drafter": "/no/such/folder"}, (ArtifactError, InputError), "no/such/folder"),
]


@pytest.mark.parametrize(("options", "error", "said"), COMPILES, ids=lambda v: str(v)[:40])
def test_compile_refuses(options, error, said, untraced):
    with pytest.raises(error, match=said):
        specc.compile(loaded().module, **{"method": "ngram", "max_length": 64, "backend": "eager", **options})


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: "no-such-model-of-specc", UnknownNameError, "unknown model"),
        (lambda: "./no/such/folder", InputError, "no such file or folder"),
        (lambda: 7, InputError, "model: "),
        (lambda: tiny_model("llama").model, UnsupportedError, "no output head"),
        (lambda: tiny_model("llama").train(), UnsupportedError, "training mode"),
        (lambda: broken(float("nan")), ArtifactError, "layers.1.mlp.up_proj.weight: found NaN or Inf"),
        (lambda: broken(float("inf")), ArtifactError, "NaN or Inf"),
        (lambda: tiny_model("llama", rope_parameters=DYNAMIC),
         UnsupportedError, "'dynamic', which depends on the length"),
        (lambda: tiny("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2),
         UnsupportedError, "recurrent"),
        (lambda: tiny("gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=2, add_cross_attention=True),
         UnsupportedError, "cross-attention"),
    ],
)  # fmt: skip
def test_models_that_are_refused(make, error, said, untraced, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(error, match=said):
        specc.compile(make(), method="ngram", max_length=64, backend="eager")


def test_an_encoder_decoder_folder_is_refused(tmp_path, untraced):
    AutoConfig.for_model("t5", d_model=16, num_layers=1, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        specc.compile(tmp_path, method="ngram", backend="eager")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "safetensors|weights"),
        (lambda path: path.write_bytes(path.read_bytes()[:-64]), "model.safetensors"),
        (lambda path: path.write_bytes(b"\xff" * 64), "model.safetensors"),
        (
            lambda path: save_file({"lm_head.weight": torch.zeros(2, 2)}, path),
            r"found lm_head.weight is \[2, 2\]",
        ),
    ],
    ids=["missing", "truncated", "garbage", "other tensors"],
)
def test_broken_files_are_named(damage, said, tmp_path, untraced):
    tiny_model("llama").save_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=said):
        specc.compile(tmp_path, method="ngram", backend="eager")


def test_drafters_of_another_vocabulary_or_tokenizer_are_refused(tmp_path, untraced):
    with pytest.raises(UnsupportedError, match="vocabulary is 64, the target's 96"):
        specc.compile(
            loaded().module,
            tiny_model("llama", vocab_size=64),
            method="draft_model",
            backend="eager",
            max_length=64,
        )
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    for folder, swap in ((target, False), (drafter, True)):
        tiny_model("llama").save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        if swap:
            file = folder / "tokenizer.json"
            file.write_text(
                file.read_text().replace('"w7"', '"w_"').replace('"w8"', '"w7"').replace('"w_"', '"w8"')
            )
    with pytest.raises(UnsupportedError, match=r"tokenizers differ.*w?[78]"):
        specc.compile(target, drafter, method="draft_model", backend="eager", max_length=64)


# --- stops and caps -------------------------------------------------------------------------------------


@functools.cache
def rig() -> Rig:
    """A drafter that is always right: every step emits a whole block, and stops fall inside it."""
    return Rig("llama", "draft_model", loaded().module, slots=2, capacity=48)


def compiled(block: int = BLOCK) -> Any:
    return rig().at(block, loaded().module)


@pytest.mark.parametrize("count", range(BLOCK + 4))
def test_max_new_tokens(count):
    out = compiled().generate([PROMPT], max_new_tokens=count, return_dict_in_generate=True)
    assert out.sequences.tolist() == [[*PROMPT, *own_text("llama", [PROMPT], BLOCK + 4)[0][:count]]]
    assert out.finish_reasons == ("length",)
    assert out.stats.tokens == count


@pytest.mark.parametrize("length", [len(PROMPT), len(PROMPT) + 1, len(PROMPT) + BLOCK + 1, 40, 48])
def test_max_length(length):
    out = compiled().generate([PROMPT], max_length=length)
    text = own_text("llama", [PROMPT], 42)[0]
    assert out[0].tolist() == [*PROMPT, *text[: length - len(PROMPT)]]


def test_capacity_ends_a_text_without_caps():
    out = compiled().generate([PROMPT], eos_token_id=None, return_dict_in_generate=True)
    assert out.sequences.shape[1] == 48
    assert out.finish_reasons == ("length",)
    with pytest.raises(InputError, match=r"a prompt of 49 tokens|at most max_length=48"):
        compiled().generate([[5] * 49])
    assert compiled().generate([[5] * 48]).shape[1] == 48


@pytest.mark.parametrize("where", [0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [(), (95,)])
def test_end_ids_at_every_place_of_a_block(where, more):
    """The first end id stops the text, whichever of several it is, and nothing behind it counts."""
    text = own_text("llama", [PROMPT], 12)[0]
    first = text.index(text[where])
    late = [t for t in text[first + 1 :] if t != text[first]][:2]
    ends = [*late, text[first], *more]
    expected = text[: min(text.index(t) for t in ends if t in text) + 1]
    own = compiled()
    with recorded(own) as steps:
        out = own.generate([PROMPT], max_new_tokens=12, eos_token_id=ends, return_dict_in_generate=True)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected
    assert out.finish_reasons == ("stop",)
    assert out.stats.tokens == len(expected) == sum(len(r.tokens) for _, records in steps for r in records)
    assert out.stats.accepted <= len(expected)
    assert torch.equal(own.engine.history(0), torch.tensor([*PROMPT, *expected]))


def test_the_end_and_the_cap_in_one_step():
    text = own_text("llama", [PROMPT], 6)[0]
    end = text.index(text[3])
    for cap, reason in ((end, "length"), (end + 1, "stop"), (end + 2, "stop")):
        out = compiled().generate(
            [PROMPT], max_new_tokens=cap, eos_token_id=text[3], return_dict_in_generate=True
        )
        assert out.sequences[0, len(PROMPT) :].tolist() == text[: min(cap, end + 1)]
        assert out.finish_reasons == (reason,)


def test_sequences_that_end_apart_are_padded():
    text = own_text("llama", [PROMPT], 8)[0]
    other = [9, 30, 22]
    out = compiled().generate(
        [PROMPT[-3:], other],
        max_new_tokens=8,
        eos_token_id=own_text("llama", [other], 8)[0][1],
        pad_token_id=77,
    )
    assert out.shape == (2, 11)
    assert out[1, 5:].tolist() == [77] * 6
    assert text  # the first text ends elsewhere


@pytest.mark.parametrize("ids", [list(range(60, 69))])
def test_more_end_ids_than_a_slot_holds_are_refused(ids):
    with pytest.raises(InputError, match="at most 8 ids"):
        compiled().generate([PROMPT], eos_token_id=ids)


class Streamer:
    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.chunks.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_then_every_token_once():
    streamer = Streamer()
    out = compiled().generate([PROMPT], max_new_tokens=10, streamer=streamer)
    assert streamer.chunks[0] == PROMPT
    assert [t for chunk in streamer.chunks for t in chunk] == out[0].tolist()
    assert max(len(chunk) for chunk in streamer.chunks[1:]) == BLOCK + 1
    assert streamer.ended == 1
    with pytest.raises(InputError, match="one sequence at a time"):
        compiled().generate([PROMPT, PROMPT], streamer=Streamer())
    with pytest.raises(InputError, match="streamer"):
        compiled().generate([PROMPT], streamer=object())


def test_a_streamer_gets_nothing_behind_the_end():
    text = own_text("llama", [PROMPT], 8)[0]
    streamer = Streamer()
    out = compiled().generate([PROMPT], max_new_tokens=8, eos_token_id=text[2], streamer=streamer)
    assert [t for chunk in streamer.chunks for t in chunk] == out[0].tolist()
    assert out[0, -1] == text[2]


def test_statistics_count_emitted_tokens_only():
    noisy = rig().at(BLOCK, noisy_copy(loaded().module))
    with recorded(noisy) as steps:
        out = noisy.generate([PROMPT, [*PROMPT[:4], 9, 8]], max_new_tokens=21, return_dict_in_generate=True)
    records = [r for _, per_slot in steps for r in per_slot if r.tokens]
    stats = out.stats
    assert stats.tokens == 42 == sum(len(r.tokens) for r in records)
    assert stats.steps == len(records)
    assert stats.device_steps == len(steps)
    assert stats.prefill_steps == sum(bool(key.feed) for key, _ in steps)
    assert stats.accepted == sum(r.accepted for r in records) == sum(stats.accepted_at) < stats.drafted
    assert stats.drafted == sum(r.drafted for r in records) == sum(stats.drafted_at)
    assert stats.mean_accepted_length == 42 / stats.steps
    assert all(0 <= share <= 1 for share in stats.acceptance_by_position)
    assert 0 < stats.first_token_s <= stats.seconds


# --- random numbers -------------------------------------------------------------------------------------


def test_the_global_generator_is_left_alone_when_a_seed_is_given():
    own = Rig("llama", "ngram", slots=2, capacity=48).at(2)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "top_k": 0}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = own.generate([PROMPT, PROMPT], seed=9, **settings)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(own.generate([PROMPT, PROMPT], seed=9, **settings), first)
    assert not torch.equal(first[0], first[1]), "sequences of one call share their random numbers"
    assert torch.equal(own.generate([PROMPT], seed=10, **settings)[0], first[1])
    drawn = own.generate([PROMPT], **settings)
    assert not torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(own.generate([PROMPT], **settings), drawn)
    assert generate(own, [PROMPT], 4, seed=9, do_sample=False) == own_text("llama", [PROMPT], 4)
