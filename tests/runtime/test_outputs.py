"""What a call returns beside tokens: reasons, rows of logits, scores and hidden states, chunks of a stream."""

from __future__ import annotations

import io
import itertools
from contextlib import redirect_stdout

import pytest
import torch
from transformers import TextStreamer

from tests.serving import (
    CAPACITY,
    PROMPTS,
    VOCAB,
    compiled,
    letters_tokenizer,
    plain_text,
    reference_text,
    target,
)

NEW = 14
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # float32, rows computed in other batches


def run(prompt, block=3, method="draft_model", **settings):
    given = {"max_new_tokens": NEW, "return_dict_in_generate": True, **settings}
    return compiled(method, block).generate(torch.tensor([prompt]), **given)


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_stop_strings_end_where_transformers_ends(prompt):
    """Parts of the text as stop strings: inside a token, over its edge, over several, and one that never comes."""
    tokenizer = letters_tokenizer()
    text = tokenizer.decode(plain_text(prompt, max_new_tokens=NEW))
    strings = [text[i : i + n] for n in (1, 3, 5) for i in range(n, len(text) - n, 6)]
    for string in [*strings, [text[9:12], text[4:6]], "qqqq"]:
        want = plain_text(prompt, max_new_tokens=NEW, stop_strings=string, tokenizer=tokenizer)
        out = run(prompt, stop_strings=string, tokenizer=tokenizer)
        assert out.sequences[0, len(prompt) :].tolist() == want, string
        ended = any(s in tokenizer.decode(want) for s in ([string] if isinstance(string, str) else string))
        assert out.finish_reasons == ("stop" if ended else "length",)
        assert out.stats.tokens == len(want)
        assert sum(out.stats.accepted_at) == out.stats.accepted <= len(want)


def test_the_first_of_several_stops_wins():
    """End ids, the cap and stop strings at every distance from each other, inside one step and across."""
    prompt, tokenizer = PROMPTS[0], letters_tokenizer()
    text = plain_text(prompt, max_new_tokens=NEW)
    for end in (1, 3, 4, 7):
        for cap in (end, end + 1, end + 2):
            for stop in (end - 1, end, end + 1):
                string = tokenizer.decode([text[stop]])
                ends = [text[end], text[end + 1]]
                out = run(
                    prompt,
                    eos_token_id=ends,
                    max_new_tokens=cap,
                    stop_strings=string,
                    tokenizer=tokenizer,
                    pad_token_id=0,
                )
                first = min(text.index(token) for token in ends)
                said = next(i for i in range(NEW) if string in tokenizer.decode(text[: i + 1]))
                length = min(first + 1, said + 1, cap)
                assert out.sequences[0, len(prompt) :].tolist() == text[:length]
                reason = "stop" if min(first, said) < cap else "length"
                assert out.finish_reasons == (reason,), (end, cap, stop)


def test_a_text_may_fill_the_object_to_its_end():
    out = run(PROMPTS[0], max_new_tokens=None)
    assert out.sequences.shape[1] == CAPACITY
    assert out.finish_reasons == ("length",)
    assert out.sequences[0, len(PROMPTS[0]) :].tolist() == plain_text(PROMPTS[0], max_length=CAPACITY)


def test_several_sequences_of_each_prompt():
    given = {
        "do_sample": True,
        "seed": 30,
        "num_return_sequences": 2,
        "max_new_tokens": NEW,
        "pad_token_id": 0,
    }
    rows = compiled().generate(**padded(PROMPTS), **given)
    width = max(map(len, PROMPTS))
    assert rows.shape[0] == 6
    for index, row in enumerate(rows):
        want = reference_text(PROMPTS[index // 2], NEW, seed=30 + index, do_sample=True)
        assert row[width:].tolist()[: len(want)] == want
    assert len({tuple(row.tolist()) for row in rows}) == 6


SETTINGS = {
    "plain": {},
    "processed": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "suppress_tokens": [30]},
    "ended": {"eos_token_id": plain_text(PROMPTS[0], max_new_tokens=8)[5], "pad_token_id": 0},
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_rows_belong_to_the_emitted_tokens(name):
    setting = SETTINGS[name]
    extras = {"output_logits": True, "output_scores": True, "output_hidden_states": True}
    out = compiled().generate(
        **padded(PROMPTS), max_new_tokens=NEW, return_dict_in_generate=True, **extras, **setting
    )
    longest = 0
    for index, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        theirs = target().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, return_dict_in_generate=True,
            **{"pad_token_id": 0, **extras, **setting},
        )  # fmt: skip
        count = len(theirs.logits)
        longest = max(longest, count)
        for at in range(count):
            torch.testing.assert_close(out.logits[at][index], theirs.logits[at][0], **CLOSE)
            torch.testing.assert_close(out.scores[at][index], theirs.scores[at][0], **CLOSE)
            torch.testing.assert_close(
                out.hidden_states[at][index], theirs.hidden_states[at][-1][0, -1], **CLOSE
            )
        assert all(
            not row[index].any()
            for rows in (out.logits, out.scores, out.hidden_states)
            for row in rows[count:]
        )
    assert len(out.logits) == len(out.scores) == len(out.hidden_states) == longest


def test_rows_end_with_a_stop_string_and_with_the_hosts_judgement():
    tokenizer = letters_tokenizer()
    text = plain_text(PROMPTS[0], max_new_tokens=NEW)
    given = {"output_logits": True, "output_scores": True, "output_hidden_states": True}
    whole = run(PROMPTS[0], **given)
    cut = run(PROMPTS[0], stop_strings=tokenizer.decode(text[3:5]), tokenizer=tokenizer, **given)
    judged = run(PROMPTS[0], logits_processor=[lambda ids, scores: scores + 1.0], **given)
    assert len(cut.logits) == cut.sequences.shape[1] - len(PROMPTS[0]) < NEW
    for name in ("logits", "scores", "hidden_states"):
        for first, second in zip(getattr(cut, name), getattr(whole, name), strict=False):
            torch.testing.assert_close(first, second, **CLOSE)
        for first, second in zip(getattr(judged, name), getattr(whole, name), strict=True):
            torch.testing.assert_close(first, second + (1.0 if name == "scores" else 0.0), **CLOSE)


def test_scores_of_a_sampled_text_give_its_log_probabilities():
    out = run(PROMPTS[1], do_sample=True, temperature=0.8, top_p=0.9, seed=5, output_scores=True)
    new = out.sequences[0, len(PROMPTS[1]) :]
    scores = torch.cat(out.scores)
    assert scores.shape == (len(new), VOCAB)
    chosen = scores.log_softmax(-1).gather(1, new[:, None])
    assert chosen.isfinite().all()
    assert (scores == float("-inf")).any()


class Chunks:
    def __init__(self):
        self.chunks, self.ended = [], False

    def put(self, value):
        assert not self.ended
        self.chunks.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_chunks_end_where_ids_end():
    tokenizer = letters_tokenizer()
    text = plain_text(PROMPTS[2], max_new_tokens=NEW)
    assert run(PROMPTS[2]).stats.accepted > 0
    for settings in (
        {},
        {"stop_strings": tokenizer.decode(text[4:6]), "tokenizer": tokenizer},
        {"eos_token_id": text[6]},
    ):
        chunks = Chunks()
        out = run(PROMPTS[2], streamer=chunks, **settings)
        assert chunks.ended
        assert chunks.chunks[0] == PROMPTS[2]
        assert list(itertools.chain(*chunks.chunks)) == out.sequences[0].tolist()
        assert len(chunks.chunks) - 1 == out.stats.steps


def test_the_streamer_of_transformers_prints_the_text():
    tokenizer = letters_tokenizer()
    printed = io.StringIO()
    with redirect_stdout(printed):
        out = run(PROMPTS[0], streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert printed.getvalue().strip() == tokenizer.decode(out.sequences[0, len(PROMPTS[0]) :])
