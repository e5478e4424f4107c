"""Prompts are cleaned, near duplicates and evaluation prompts kept out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specc.errors import InputError
from specc.training.prompts import (
    Evaluation,
    Seen,
    code_source,
    fault,
    prose_source,
    read_conversations,
    read_evaluation,
    text_of,
)

QUESTION = "How do I keep tomato plants alive through a long dry summer in the south"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Tell me now", "short"),
        ("Tell me <end> about the sea", "special token"),
        ("Cuéntame áéíóú ñññ por fávór señóráá", "not ASCII"),
        ("go on and on " * 4, "repeats"),
        ("Write to bob@example.org about the sea", "address"),
        ("Summarize the following text in one sentence", "no source text"),
        ("Summarize the following:\n\nThe sea is wide and very deep.", None),
        (QUESTION, None),
    ],
)
def test_fault(text: str, why: str | None) -> None:
    assert fault(text, ["<end>"]) == why


def test_seen_refuses_what_is_nearly_there() -> None:
    seen = Seen([QUESTION])
    assert seen.fault(QUESTION.upper() + "?") == "duplicate"
    assert seen.fault(QUESTION + " of the country") == "near duplicate"
    assert seen.fault("Why does bread rise when it is left in a warm place?") is None


def test_seen_limits_equal_starts() -> None:
    seen = Seen(f"What is the colour of number {n} and its brother {n + 500}" for n in range(40))
    assert seen.fault("What is the tallest hill that one can see from here?") == "same start"
    assert seen.fault("Where is the tallest hill that one can see from here?") is None


def test_sources_are_whole_paragraphs() -> None:
    one, two = " ".join(["word"] * 13), " ".join(["more"] * 20)
    assert prose_source(f"{one}\n\n{two}", 40) == f"{one}\n\n{two}"
    assert prose_source(f"{one}\n\n{two}", 30) == one
    assert prose_source(f"{one}\n\n```\ncode\n```", 40) == one
    assert prose_source("too short", 40) is None
    assert prose_source(two, 15) is None


def test_code_is_the_first_block_of_some_lines() -> None:
    block = "```python\ndef f(x):\n    y = x\n    return y\n```"
    assert code_source(f"See:\n\n```\nf(1)\n```\n{block}\nDone.") == block
    assert code_source("no code") is None
    assert code_source("```python\nnever ended") is None


def test_overlap_flags_every_evaluation_prompt(tmp_path: Path) -> None:
    texts = [QUESTION, "Write a function that returns the larger of two numbers"]
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": t}]}) for t in texts))
    evaluation = read_evaluation(tmp_path)
    assert all(evaluation.is_close(text) for text in texts)
    assert evaluation.is_close("Please: write a function, that returns the larger of two numbers now")
    assert evaluation.is_close("numbers two of larger the returns that function a write"), (
        "three fifths of the words"
    )
    assert not evaluation.is_close("Why does bread rise when it is left in a warm place?")
    assert (evaluation.checked, evaluation.flagged) == (5, 4)
    assert not Evaluation(()).is_close(QUESTION)


def test_read_conversations(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a b"}\n\n{"messages": [{"role": "user", "content": "c d"}]}\n')
    assert [text_of(m) for m in read_conversations(file)] == ["a b", "c d"]
    assert [text_of(m) for m in read_conversations(tmp_path)] == ["a b", "c d"]
    file.write_text('{"prompt": "a b"}\n{"id": "x", "messages": [{"role": "assistant", "content": "c"}]}\n')
    with pytest.raises(InputError, match=r"x of .*p\.jsonl"):
        read_conversations(file)
    with pytest.raises(InputError, match="avoid"):
        read_evaluation(tmp_path / "absent")
