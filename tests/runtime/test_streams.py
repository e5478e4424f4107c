"""Mixed batches: every request equals its own run; broken and abandoned calls leave nothing behind."""

from __future__ import annotations

import functools
import gc
import random
import threading

import pytest
import torch

import specc
from specc import Compiled
from specc.errors import InputError, SpeccError, UnsupportedError
from specc.runtime.engine import Engine
from tests import oracles
from tests.serving import CAPACITY, PROMPTS, compiled, letters_tokenizer, plain_text, serve, target
from tests.tiny import tiny_model

NEW = 14


def mixed_requests(count, seed):
    """Return requests of all kinds: rules, seeds, settings, prompt lengths, new tokens, stops."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        length = rng.choice([1, 2, 5, 11, 20, 34])
        request = {
            "input_ids": [[rng.randrange(2, 96) for _ in range(length)]],
            "max_new_tokens": rng.choice([1, 2, 6, 15, 25]),
        }
        if number % 3:
            request |= {
                "do_sample": True,
                "seed": rng.randrange(1 << 40),
                "accept": rng.choice(["ratio", "coupled"]),
            }
            request |= rng.choice([{}, {"temperature": 1.6}, {"top_p": 0.8}, {"top_k": 4, "min_p": 0.1}])
        request |= rng.choice(
            [{}, {"repetition_penalty": 1.4}, {"eos_token_id": list(range(40, 47))}, {"min_new_tokens": 4}]
        )
        requests.append(request)
    return requests


# A request with every family that `mixed_requests` brings, so that all runs below share their steps.
FAMILIES = {
    "do_sample": True,
    "top_k": 9,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_new_tokens": 1,
}


def test_each_request_equals_its_own_run():
    """Under the ratio rule, too: which rows of a step are a slot's own does not depend on the others."""
    requests = mixed_requests(11, seed=2)
    object_ = compiled(accept="ratio")
    together = serve(object_, requests, FAMILIES)
    assert len({len(text) for text in together}) > 3  # they end at different places
    for request, text in zip(requests, together, strict=True):
        object_.forget()
        assert serve(object_, [request], FAMILIES) == [text]
    order = random.Random(1).sample(range(len(requests)), len(requests))
    shuffled = serve(object_, [requests[i] for i in order], FAMILIES)
    assert shuffled == [together[i] for i in order]


def test_prompts_are_read_while_others_draft():
    object_ = compiled(accept="ratio")
    requests = [{"input_ids": [PROMPTS[0]], "max_new_tokens": 30}]
    requests += [{"input_ids": [[5 + i] * 20], "max_new_tokens": 2} for i in range(6)]
    object_.forget()
    before = len(object_.engine.compiles)
    texts = serve(object_, requests)
    assert texts[0] == plain_text(PROMPTS[0], max_new_tokens=30)
    known = [key for key in object_.engine._runners if key.block == 3 and key.feed]
    assert known
    assert serve(object_, requests) == texts
    assert len(object_.engine.compiles) >= before


def turns(object_, prompt, count, extra, **settings):
    """Return a conversation: each turn's prompt is the whole text so far and a few new ids."""
    said, texts = list(prompt), []
    for turn in range(count):
        out = object_.generate(
            torch.tensor([said]), max_new_tokens=8, return_dict_in_generate=True, **settings
        )
        texts.append((out.sequences[0].tolist(), out.stats.accepted, out.stats.prefill_steps))
        said = [*out.sequences[0].tolist(), *extra[3 * turn : 3 * turn + 3]]
    return texts


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "ratio"])
def test_a_shared_prefix_is_not_read_again_and_changes_nothing(settings):
    object_ = compiled(batch=1, accept="ratio")
    extra = [33, 61, 8, 90, 17, 17, 45, 2, 71]
    object_.forget()
    reused = turns(object_, PROMPTS[2] * 2, 3, extra, **settings)
    said = PROMPTS[2] * 2
    for index, (text, accepted, _) in enumerate(reused):
        object_.forget()
        out = object_.generate(
            torch.tensor([said]), max_new_tokens=8, return_dict_in_generate=True, **settings
        )
        assert out.sequences[0].tolist() == text
        assert out.stats.accepted == accepted, "the drafter's own state is not what a fresh one would be"
        said = [*text, *extra[3 * index : 3 * index + 3]]


def test_what_is_shared_is_not_fed():
    object_ = compiled(batch=1)
    object_.forget()
    fed = []
    set_feed = object_.engine.set_feed
    object_.engine.set_feed = lambda rows: (fed.append(len(rows)), set_feed(rows))[1]
    try:
        first = object_.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=8)
        object_.generate(torch.cat([first, torch.tensor([[5, 6]])], 1), max_new_tokens=4)
    finally:
        del object_.engine.set_feed
    assert fed[0] == len(PROMPTS[2]) - 1
    assert sum(fed[1:]) <= 4


@pytest.mark.parametrize(("method", "name"), [("eagle3", "eagle3-spec"), ("dspark", "dspark-spec-vanilla")])
def test_a_drafters_state_survives_turns_and_company(method, name):
    """Drafters with caches of their own: the accepted counts say whether their state is right."""
    object_ = specc.compile(
        oracles.target("llama"), oracles.folder(f"drafters/{name}"), method=method, batch=2, max_length=96,
        backend="eager",
    )  # fmt: skip
    vocab = object_.info.vocab
    rng = random.Random(5)
    prompts = [[rng.randrange(3, vocab) for _ in range(n)] for n in (9, 24, 3, 15)]
    requests = [{"input_ids": [p], "max_new_tokens": 12} for p in prompts]
    together = serve(object_, requests)
    for prompt, text in zip(prompts, together, strict=True):
        object_.forget()
        assert serve(object_, [{"input_ids": [prompt], "max_new_tokens": 12}]) == [text]
    object_.forget()
    reused = turns(object_, prompts[1], 3, prompts[3])
    said = prompts[1]
    for index, (text, accepted, _) in enumerate(reused):
        object_.forget()
        out = object_.generate(torch.tensor([said]), max_new_tokens=8, return_dict_in_generate=True)
        assert out.sequences[0].tolist() == text
        assert out.stats.accepted == accepted
        said = [*text, *prompts[3][3 * index : 3 * index + 3]]


@functools.cache
def chunky():
    """Return an object that reads prompts 8 rows a step."""
    first = compiled("ngram")
    engine = Engine(first.engine.builder, first.engine.backend, feed=8)
    return Compiled(engine, first.method, 3, "coupled", info=first.info, generation=first.generation_defaults)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["ctrl-c", "error"]
)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_call_that_breaks_off_leaves_the_object_as_new(error, after):
    object_ = chunky()
    long = [PROMPTS[0] * 4, PROMPTS[2] * 2]  # several chunks
    serve(object_, [{"input_ids": [p], "max_new_tokens": 12} for p in long])  # everything is traced
    object_.forget()
    left = [after]

    def interrupted(call):
        def run(*inputs):
            left[0] -= 1
            if left[0] < 0:
                raise error
            return call(*inputs)

        return run

    calls = [(runner, runner.call) for runner in object_.engine._runners.values()]
    for runner, call in calls:
        runner.call = interrupted(call)
    try:
        with pytest.raises(type(error)):
            serve(object_, [{"input_ids": [p], "max_new_tokens": 12} for p in long])
    finally:
        for runner, call in calls:
            runner.call = call
    assert not bool(object_.engine.state.state["running"].any())
    for prompt in long:
        assert serve(object_, [{"input_ids": [prompt], "max_new_tokens": 12}]) == [
            plain_text(prompt, max_new_tokens=12)
        ]


def test_a_stream_left_while_a_prompt_is_half_read():
    """The prompt comes again: rows that had not run must not be taken for read."""
    object_ = chunky()
    object_.forget()
    prompt = (PROMPTS[2] * 4)[:40]
    stream = object_.stream(
        [
            (0, {"input_ids": [PROMPTS[1]], "max_new_tokens": 30}),
            (1, {"input_ids": [prompt], "max_new_tokens": 4}),
        ]
    )
    next(stream)  # the short prompt has a token; of the long one a chunk has run
    out = object_.generate(torch.tensor([prompt]), max_new_tokens=6)  # closes the stream
    assert list(stream) == []
    assert out[0, len(prompt) :].tolist() == plain_text(prompt, max_new_tokens=6)


def test_a_call_from_its_own_streamer_or_processor_is_refused():
    object_ = compiled()

    class Nested:
        def put(self, value):
            object_.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=1)

        def end(self):
            raise AssertionError

    def process(ids, scores):
        object_.without_drafts().generate(torch.tensor([PROMPTS[1]]), max_new_tokens=1)

    for given in ({"streamer": Nested()}, {"logits_processor": [process]}):
        with pytest.raises(UnsupportedError, match="in use"):
            object_.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=5, **given)
    assert object_.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=5)[0, 1:].tolist() == plain_text(
        PROMPTS[1], max_new_tokens=5
    )


def test_coupled_text_is_plain_text_with_the_seed():
    """Whatever rule plain decoding is asked for, or none."""
    ids, sampled = (
        torch.tensor([PROMPTS[2]]),
        {"do_sample": True, "temperature": 1.5, "max_new_tokens": 12, "seed": 5},
    )
    want = compiled().generate(ids, accept="coupled", **sampled)
    plain = specc.compile(target(), method="plain", max_length=CAPACITY, backend="eager")
    for accept in ({}, {"accept": "ratio"}, {"accept": "coupled"}):
        assert torch.equal(plain.generate(ids, **sampled, **accept), want)
        assert torch.equal(compiled().without_drafts().generate(ids, **sampled, **accept), want)
        out = [t for _, ts in plain.stream([(0, {"input_ids": ids, **sampled, **accept})]) for t in ts]
        assert out == want[0, ids.shape[1] :].tolist()
    with pytest.raises(SpeccError, match="accept rule"):
        plain.generate(ids, accept="fair", **sampled)


def test_a_forgotten_stream_frees_the_object():
    object_ = compiled()
    stream = object_.stream((i, {"input_ids": [PROMPTS[0]], "max_new_tokens": 5}) for i in range(100))
    next(stream)
    del stream
    gc.collect()
    assert object_.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=5)[0, 1:].tolist() == plain_text(
        PROMPTS[1], max_new_tokens=5
    )


def test_a_request_made_while_requests_are_read_is_refused():
    object_ = compiled()

    def requests():
        yield 0, {"input_ids": [PROMPTS[0]], "max_new_tokens": 5}
        object_.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=5)

    with pytest.raises(UnsupportedError, match="in use"):
        list(object_.stream(requests()))
    assert serve(object_, [{"input_ids": [PROMPTS[1]], "max_new_tokens": 5}]) == [
        plain_text(PROMPTS[1], max_new_tokens=5)
    ]


class Failing:
    def put(self, value):
        raise OSError("closed pipe")

    def end(self):
        raise AssertionError


def test_a_streamer_or_request_that_fails():
    object_ = compiled()
    with pytest.raises(OSError, match="closed pipe"):
        object_.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=5, streamer=Failing())
    for extra in ({"output_logits": True}, {"return_dict_in_generate": True}, {"streamer": Failing()}):
        with pytest.raises(InputError, match=next(iter(extra)).removeprefix("output_").split("_")[0]):
            list(object_.stream([(0, {"input_ids": [PROMPTS[0]], **extra})]))
    with pytest.raises(SpeccError):
        list(object_.stream([(0, {"input_ids": [PROMPTS[0]], "tempature": 1})]))
    assert serve(object_, [{"input_ids": [PROMPTS[0]], "max_new_tokens": 5}]) == [
        plain_text(PROMPTS[0], max_new_tokens=5)
    ]


def test_a_wrong_request_ends_a_stream_after_those_before_it():
    unread = iter([*[(i, {"input_ids": [PROMPTS[i]], "max_new_tokens": 9}) for i in range(2)],
                   (2, {"input_ids": [[-1]]}), (3, {"input_ids": [PROMPTS[0]], "max_new_tokens": 9})])  # fmt: skip
    texts = {0: [], 1: []}

    def read():
        for name, tokens in compiled().stream(unread):
            texts[name] += tokens

    with pytest.raises(InputError, match="input_ids"):
        read()
    assert texts == {i: plain_text(PROMPTS[i], max_new_tokens=9) for i in range(2)}
    assert [name for name, _ in unread] == [3], "what comes after it is not read"


def test_two_objects_of_one_target_in_two_threads():
    first, second = compiled(), compiled("ngram")
    assert first.engine.builder.weights["target.lm_head.weight"].data_ptr() == (
        second.engine.builder.weights["target.lm_head.weight"].data_ptr()
    )
    requests = [{"input_ids": [p], "max_new_tokens": 20} for p in PROMPTS]
    alone = [serve(first, requests), serve(second, requests)]
    results, errors = {}, []

    def work(name, object_):
        try:
            results[name] = [serve(object_, requests) for _ in range(3)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate((first, second, first))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert results == {0: [alone[0]] * 3, 1: [alone[1]] * 3, 2: [alone[0]] * 3}


def test_changed_weights_are_refused_until_they_are_back():
    model = tiny_model("llama", num_hidden_layers=1)
    object_ = specc.compile(model, method="ngram", block=2, max_length=32, backend="eager")
    ids = torch.tensor([PROMPTS[0]])
    before = object_.generate(ids, max_new_tokens=5)
    weight = model.lm_head.weight
    weight.mul_(1.0)  # the same numbers, but somebody wrote
    for call in (
        lambda: object_.generate(ids, max_new_tokens=5),
        lambda: list(object_.stream([(0, {"input_ids": ids})])),
    ):
        with pytest.raises(UnsupportedError, match=r"weights changed.*\n.*lm_head"):
            call()
    again = specc.compile(model, method="ngram", block=2, max_length=32, backend="eager")
    assert torch.equal(again.generate(ids, max_new_tokens=5), before)
    with torch.inference_mode():
        weight.data[0].add_(0.5)  # does not count as a write for autograd
    with pytest.raises(UnsupportedError, match="weights changed"):
        again.generate(ids, max_new_tokens=5)


def test_stop_strings_in_a_stream_free_the_slot():
    tokenizer = letters_tokenizer()
    object_ = compiled()
    object_.tokenizer = tokenizer
    texts = [plain_text(p, max_new_tokens=NEW) for p in PROMPTS]
    requests = [
        {"input_ids": [p], "max_new_tokens": NEW, "stop_strings": tokenizer.decode(t[3:5])}
        for p, t in zip(PROMPTS * 2, texts * 2, strict=True)
    ]
    for text, got in zip(texts * 2, serve(object_, requests), strict=True):
        assert got == text[: len(got)]
        assert len(got) < NEW
