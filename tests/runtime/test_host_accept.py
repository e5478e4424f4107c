"""A user's own processors and constraints: judged on the host, call by call as plain decoding would."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MinLengthLogitsProcessor

from specc.errors import InputError
from specc.sampling.constraint import Constraint, mask_rows
from tests.serving import PROMPTS, VOCAB, compiled, letters_tokenizer, plain_text

NEW = 14
SAMPLED = {"do_sample": True, "temperature": 1.1, "top_p": 0.95, "top_k": 30}


class Recorder(LogitsProcessor):
    """Favours an id that depends on the whole history, and writes down every history it was asked about."""

    def __init__(self, strength: float = 6.0) -> None:
        self.calls: list[list[int]] = []
        self._strength = strength

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.calls.append(input_ids[0].tolist())
        out = scores.clone()
        out[0, (7 * int(input_ids.sum()) + input_ids.shape[1]) % VOCAB] += self._strength
        return out


def run(object_: Any, prompt: list[int], **settings: Any) -> list[int]:
    out = object_.generate(torch.tensor([prompt]), **{"max_new_tokens": NEW, **settings})
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_and_calls_equal_those_of_transformers(method, prompt):
    theirs, ours = Recorder(), Recorder()
    text = plain_text(prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([theirs]))
    assert text != plain_text(prompt, max_new_tokens=NEW)
    result = compiled(method).generate(
        torch.tensor([prompt]), max_new_tokens=NEW, logits_processor=LogitsProcessorList([ours]),
        return_dict_in_generate=True,
    )  # fmt: skip
    assert result.sequences[0, len(prompt) :].tolist() == text
    assert ours.calls == theirs.calls
    if method == "draft_model":
        assert result.stats.accepted > 0


def test_processors_come_between_the_settings_as_in_transformers():
    prompt = PROMPTS[0]
    ends = plain_text(prompt, max_new_tokens=5)[-1:]
    settings = {"repetition_penalty": 1.7, "bad_words_ids": [[30]], "eos_token_id": ends, "min_new_tokens": 7}
    theirs, ours = Recorder(-4.0), Recorder(-4.0)
    text = plain_text(prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([theirs]), **settings)
    assert run(compiled(), prompt, logits_processor=[ours], **settings) == text
    assert ours.calls == theirs.calls


def double(ids: Tensor, scores: Tensor) -> Tensor:
    return scores * 1.5


def test_of_several_each_gets_what_the_one_before_returned():
    theirs, ours = Recorder(), Recorder()
    both = [double, theirs]
    text = plain_text(PROMPTS[1], max_new_tokens=NEW, logits_processor=LogitsProcessorList(both))
    assert run(compiled(), PROMPTS[1], logits_processor=[double, ours]) == text


@pytest.mark.parametrize("accept", ["ratio", "coupled"])
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_one_that_changes_nothing_changes_nothing(accept, settings):
    object_ = compiled(accept=accept)
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    given = {"attention_mask": (ids > 0).long(), "max_new_tokens": NEW, "seed": [5, 6, 7], **settings}
    expected = object_.generate(ids, **given)
    assert torch.equal(
        object_.generate(ids, logits_processor=[lambda ids, scores: scores], **given), expected
    )


@pytest.mark.parametrize("accept", ["ratio", "coupled"])
def test_sampling_comes_after_it(accept):
    """A processor that adds a bias is the setting that adds it, draw for draw."""
    bias = torch.zeros(VOCAB)
    bias[40:60] = 2.0
    object_ = compiled(accept=accept)
    given = {**SAMPLED, "seed": 9}
    setting = run(object_, PROMPTS[2], logit_bias=dict.fromkeys(range(40, 60), 2.0), **given)
    assert run(object_, PROMPTS[2], logits_processor=[lambda ids, scores: scores + bias], **given) == setting
    assert setting != run(object_, PROMPTS[2], **given)


def test_nothing_is_asked_behind_a_stop():
    tokenizer, prompt = letters_tokenizer(), PROMPTS[0]
    free = plain_text(prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([Recorder()]))
    histories = [prompt + free[:i] for i in range(NEW)]
    for end in range(1, 8):
        string = tokenizer.decode(free[end : end + 2])
        said = next(i for i in range(NEW) if string in tokenizer.decode(free[: i + 1]))
        cases = [({"eos_token_id": free[end]}, free.index(free[end])), ({"stop_strings": string}, said)]
        for settings, last in [*cases, ({"max_new_tokens": end}, end - 1)]:
            ours = Recorder()
            run(compiled(), prompt, logits_processor=[ours], tokenizer=tokenizer, **settings)
            assert ours.calls == histories[: last + 1], settings


def test_only_the_requests_that_bring_one_are_changed():
    recorder = Recorder()
    requests = [
        (0, {"input_ids": [PROMPTS[0]], "max_new_tokens": NEW}),
        (1, {"input_ids": [PROMPTS[1]], "max_new_tokens": NEW, "logits_processor": [recorder]}),
        (2, {"input_ids": [PROMPTS[2]], "max_new_tokens": NEW, "seed": 3, **SAMPLED}),
    ]
    texts: dict[Any, list[int]] = {0: [], 1: [], 2: []}
    for name, tokens in compiled().stream(requests):
        texts[name].extend(tokens)
    assert texts[0] == plain_text(PROMPTS[0], max_new_tokens=NEW)
    assert texts[1] == plain_text(
        PROMPTS[1], max_new_tokens=NEW, logits_processor=LogitsProcessorList([Recorder()])
    )
    assert texts[2] == run(compiled(), PROMPTS[2], seed=3, **SAMPLED)
    assert all(call[0] == PROMPTS[1][0] for call in recorder.calls)


class Switch:
    """A toy regex: ``.*? [trigger] ([low] [high]){2}``, over and over; it binds only behind the trigger."""

    LOW, HIGH = set(range(20, 28)), set(range(50, 55))

    def __init__(self, trigger: int) -> None:
        self.trigger, self.tokens = trigger, []

    def left(self) -> int:
        """Return how many bound tokens are still to come."""
        left = 0
        for token in self.tokens:
            left = left - 1 if left else 4 if token == self.trigger else 0
        return left

    def mask(self) -> Tensor:
        left = self.left()
        allowed = torch.ones(VOCAB, dtype=torch.bool)
        if left:
            allowed[:] = False
            allowed[list(self.LOW if left % 2 == 0 else self.HIGH)] = True
        return allowed

    def advance(self, token: int) -> None:
        assert self.mask()[token]
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.tokens)
        del self.tokens[-count:]


def as_processor(trigger: int, prompt: int) -> Any:
    def process(ids: Tensor, scores: Tensor) -> Tensor:
        toy = Switch(trigger)
        toy.tokens = ids[0, prompt:].tolist()
        return scores.masked_fill(~toy.mask(), float("-inf"))

    return process


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_constraint_may_begin_anywhere_in_a_block(method, prompt):
    free = plain_text(prompt, max_new_tokens=NEW)
    for trigger in dict.fromkeys(free[:8]):
        toy = Switch(trigger)
        assert isinstance(toy, Constraint)
        text = run(compiled(method), prompt, constraint=toy)
        processor = LogitsProcessorList([as_processor(trigger, len(prompt))])
        assert text == plain_text(prompt, max_new_tokens=NEW, logits_processor=processor)
        assert text == toy.tokens
        at = text.index(trigger)
        assert set(text[at + 1 : at + 5 : 2]) <= Switch.LOW
        assert set(text[at + 2 : at + 5 : 2]) <= Switch.HIGH


def test_a_constraint_when_sampling_and_one_per_sequence():
    ids = torch.tensor([PROMPTS[0]])
    settings = {**SAMPLED, "seed": 21, "max_new_tokens": NEW, "num_return_sequences": 3}
    free = compiled().generate(ids, **settings)[:, ids.shape[1] :].tolist()
    triggers = [row[2] for row in free]
    toys = [Switch(triggers[0]), None, Switch(triggers[2])]
    out = compiled().generate(ids, constraint=toys, **settings)[:, ids.shape[1] :].tolist()
    assert out[1] == free[1]
    settings["num_return_sequences"] = 1
    for index in (0, 2):
        processor = as_processor(triggers[index], ids.shape[1])
        alone = run(compiled(), PROMPTS[0], **{**SAMPLED, "seed": 21 + index, "logits_processor": processor})
        assert out[index] == alone == toys[index].tokens
        assert alone != free[index]


def test_rows_end_with_the_first_illegal_draft_and_the_state_stays():
    toy = Switch(5)
    toy.tokens = [9]
    before = copy.copy(toy.tokens)
    rows = mask_rows(toy, [5, 20, 20, 50], VOCAB + 4)
    assert rows.shape == (3, VOCAB + 4)
    assert rows.sum(1).tolist() == [VOCAB, len(Switch.LOW), len(Switch.HIGH)]
    assert toy.tokens == before
    assert mask_rows(toy, [5, 20, 50], VOCAB).shape[0] == 4


class Stuck(Switch):
    def mask(self) -> Tensor:
        return torch.zeros(VOCAB, dtype=torch.bool)


class Wordy(Switch):
    def mask(self) -> Any:
        return torch.zeros(2, VOCAB)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"logits_processor": [3]}, "callables"),
        ({"logits_processor": [lambda ids, scores: scores[0]]}, "shape"),
        ({"logits_processor": [lambda ids, scores: None]}, "shape"),
        ({"logits_processor": [MinLengthLogitsProcessor(3, 1)], "min_length": 4}, "min_length"),
        ({"constraint": object()}, "mask"),
        ({"constraint": [Switch(3), Switch(4)]}, "one per sequence"),
        ({"constraint": Switch(3), "num_return_sequences": 2}, "one per sequence"),
        ({"constraint": [Switch(3)] * 2, "num_return_sequences": 2}, "different"),
        ({"constraint": Stuck(3)}, "an id left"),
        ({"constraint": Wordy(3)}, "bool"),
    ],
)
def test_wrong_ones_are_refused_and_the_object_stays_usable(settings, what):
    with pytest.raises(InputError, match=what):
        run(compiled(), PROMPTS[0], **settings)
    assert run(compiled(), PROMPTS[0]) == plain_text(PROMPTS[0], max_new_tokens=NEW)


def test_an_exception_of_the_users_own_comes_through():
    class BoomError(Exception):
        pass

    calls = []

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise BoomError
        return scores

    with pytest.raises(BoomError):
        run(compiled(), PROMPTS[0], logits_processor=fail)
    assert run(compiled(), PROMPTS[0]) == plain_text(PROMPTS[0], max_new_tokens=NEW)
