"""User turns written by the target itself: openers and topics, cleaning, near duplicates, evaluation overlap.

An instruct model has learnt what stands in a user turn. Given its own chat template up to the user header,
and perhaps the first words, it goes on; no data set is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from specc.errors import InputError
from specc.prompts import Prompt, read_prompts

OPENERS: dict[str, tuple[str, ...]] = {
    "chat": (
        "Explain", "Why", "How do I", "Can you tell me about", "What is the best way to", "Translate",
        "Write an email to", "Write a story about", "Compare", "Describe", "What does", "Is it true that",
        "I am", "My", "Should I", "Write a poem about", "What would happen if", "Give me advice on", "How does",
        "What is the difference between", "Tell me", "Help me", "Write a letter to", "Imagine",
    ),
    "code": (
        "Write a Python", "Write a function that", "Fix the bug in", "Write a program that",
        "Write a Python function to", "How can I use Python to", "Write a class", "Complete this function:\n\ndef ",
        "Finish the body of this Python function.\n\n```python\ndef ",
        "Here is a function and its docstring. Write its body.\n\n```python\ndef ",
        "What does this code print?\n\n```python\n", "Write a test for this function:\n\n```python\ndef ",
        "Write an SQL query", "In JavaScript,", "Write a bash",
    ),
    "maths": (
        "A shop sells", "If a car", "Calculate", "What is the sum of", "A farmer has", "A train", "Solve",
        "How many", "What is the area of", "A class has", "Find the", "There are", "Tom has", "A recipe",
    ),
    "rewrite": (
        "Rewrite the following", "Make this text shorter", "Correct the grammar", "Rewrite this sentence",
        "Correct the spelling in the following", "Make this email more polite:\n\n", "Change the following",
    ),
    "summary": ("Summarize the following", "What are the main points of", "Summarize this", "Give a summary of this"),
    "list": (
        "List", "Give me a checklist", "List five", "What are some", "Name three", "Give me ten ideas for",
        "Make a table of", "What do I need for", "Write a shopping list for", "Give me a numbered list of",
    ),
}  # fmt: skip
TOPICS = (
    "cooking", "gardens", "sport", "music", "history", "animals", "weather", "health", "school", "money", "travel",
    "tools", "machines", "the sea", "space", "law", "language", "family", "work", "art", "computers", "farming",
    "games", "the city", "small talk",
)  # fmt: skip
# Tasks whose source is one of the target's own answers: a small model seldom writes a source by itself.
TASKS: dict[str, tuple[str, ...]] = {
    "rewrite": (
        "Rewrite the following text in simpler words:\n\n{}", "Make this text shorter:\n\n{}",
        "Correct the grammar and spelling in this text:\n\n{}", "Rewrite the text below in a formal tone.\n\n{}",
        "{}\n\nRewrite this for a child.", "Change this text to the past tense:\n{}",
        "Fix the punctuation and keep everything else as it is:\n\n{}", "Say this more politely:\n\n{}",
        "Please polish this draft without changing what it says.\n\n{}", "{}\n\nWrite that again as a letter.",
        "Replace every 'we' and 'I' with 'they' in this passage:\n\n{}", "Make the following sound friendlier:\n{}",
        "Copy this text and put each sentence on a line of its own:\n\n{}", "Rewrite in the future tense: {}",
        "Paraphrase this paragraph:\n\n{}", "Expand this text by one or two sentences:\n\n{}",
    ),
    "summary": (
        "Summarize the following text:\n\n{}", "What are the main points of this text?\n\n{}",
        "{}\n\nSummarize the above in one sentence.", "Give a short summary of this passage: {}",
        "Write a headline and two sentences for this article.\n\n{}", "What does this text say? Be brief.\n\n{}",
        "{}\n\nWhat should I remember of this?", "Sum up the text below in your own words:\n\n{}",
        "Who or what is this about, and what happens?\n\n{}", "Give the key facts of this note:\n\n{}",
    ),
    "list": (
        "Turn this text into a bulleted list:\n\n{}", "List the steps that this text describes:\n\n{}",
        "{}\n\nName the things mentioned above, one on each line.", "Which questions does this text answer?\n\n{}",
        "Sort the points of this text by importance:\n\n{}", "Make a checklist from this:\n\n{}",
    ),
    "chat": (
        "{}\n\nDo you agree? Why?", "I found this text. Can you explain it to me?\n\n{}",
        "Answer with the help of the text below: what is it good for?\n\n{}", "Continue this text:\n\n{}",
        "{}\n\nWrite three questions about this, with answers.", "What is missing in this answer?\n\n{}",
    ),
}  # fmt: skip
# The same with a piece of code from one of its answers.
CODE_TASKS = (
    "Explain what this code does:\n\n{}", "Add comments to this code:\n\n{}", "Is there a bug in this code?\n\n{}",
    "{}\n\nRewrite this code with clearer names.", "Add type hints and a docstring:\n\n{}",
    "Make this code shorter if you can.\n\n{}", "Write a test for the following code.\n\n{}",
    "Add error handling to this code and show all of it:\n\n{}", "Rename every variable to one letter:\n\n{}",
    "{}\n\nShow me how to call this.", "Turn this into a class:\n\n{}", "Translate this code to JavaScript:\n\n{}",
)  # fmt: skip
_BLOCK = re.compile(r"```\w*\n.*?\n```", re.DOTALL)
CATEGORIES = tuple(OPENERS)
_CONTACT = re.compile(r"\S@\S|https?:|www\.|\d{3}[-. )]+\d{3}[-. ]+\d{4}")
_FAMILIAR_STARTS = 40  # prompts before the limit on equal first words means anything


def words(text: str) -> list[str]:
    """Return the lower-case words of a text, as all comparisons use them."""
    return re.findall(r"[a-z0-9']+", text.lower())


def runs(sequence: Sequence[str], length: int) -> set[tuple[str, ...]]:
    """Return every run of ``length`` words."""
    return {tuple(sequence[i : i + length]) for i in range(len(sequence) - length + 1)}


def fault(text: str, specials: Iterable[str] = ()) -> str | None:
    """Return why a prompt is of no use, or None."""
    found = text.split()
    if len(found) < 4:
        return "short"
    if any(token in text for token in specials):
        return "special token"
    if sum(not c.isascii() for c in text) > len(text) / 10:
        return "not ASCII"
    if any(found[i : i + 4] == found[i + 4 : i + 8] == found[i + 8 : i + 12] for i in range(len(found) - 11)):
        return "repeats"
    if _CONTACT.search(text):
        return "address"
    source = re.match(r"(?i)(rewrite|summari[sz]e|make this|correct the|fix the bug)", text)
    following = re.search(r"(?i)\b(following|this text|the grammar|this sentence)\b", text)
    if source and following and len(" ".join(re.split(r"\n|: ", text)[1:]).split()) < 4:
        return "no source text"
    return None


class Seen:
    """The prompts kept so far: refuses duplicates, near duplicates and too many that begin alike."""

    def __init__(self, kept: Iterable[str] = ()) -> None:
        self._exact: set[tuple[str, ...]] = set()
        self._runs: set[tuple[str, ...]] = set()
        self._starts: Counter[tuple[str, ...]] = Counter()
        for text in kept:
            self.add(text)

    def __len__(self) -> int:
        return len(self._exact)

    def __contains__(self, text: str) -> bool:
        return tuple(words(text)) in self._exact

    def add(self, text: str) -> None:
        found = words(text)
        self._exact.add(tuple(found))
        self._runs |= runs(found, 5)
        self._starts[tuple(found[:3])] += 1

    def fault(self, text: str) -> str | None:
        """Return why the prompt adds nothing to those kept, or None."""
        found = words(text)
        if tuple(found) in self._exact:
            return "duplicate"
        own = runs(found, 5)
        if own and len(own & self._runs) > len(own) / 2:
            return "near duplicate"
        if self._starts[tuple(found[:3])] >= max(0.02 * len(self), _FAMILIAR_STARTS):
            return "same start"
        return None


class Evaluation:
    """The evaluation prompts, which nothing trained on may resemble."""

    def __init__(self, texts: Iterable[str]) -> None:
        found = [words(text) for text in texts]
        self._runs: set[tuple[str, ...]] = set().union(*(runs(w, 8) for w in found)) if found else set()
        self._sets = [set(w) for w in found]
        self.flagged = 0  # since whoever reads them last set them back
        self.checked = 0

    def is_close(self, text: str) -> bool:
        """Return whether a prompt shares 8 words in a row, or three fifths of its words, with one of them."""
        found = words(text)
        own = set(found)
        close = bool(runs(found, 8) & self._runs) or any(
            len(own & other) >= 0.6 * len(own | other) for other in self._sets
        )
        self.checked += 1
        self.flagged += close
        return close


def prose_source(answer: str, longest: int) -> str | None:
    """Return the paragraphs at an answer's start that ``longest`` words hold, as a task's source; None = too few."""
    kept: list[str] = []
    count = 0
    for paragraph in answer.split("\n\n"):
        count += len(paragraph.split())
        if count > longest or "```" in paragraph:
            break
        kept.append(paragraph.strip())
    text = "\n\n".join(kept)
    return text if len(text.split()) >= 12 else None


def code_source(answer: str) -> str | None:
    """Return an answer's first fenced block of 3 to 40 lines."""
    for found in _BLOCK.findall(answer):
        if 5 <= found.count("\n") + 1 <= 42:
            return str(found)
    return None


def read_conversations(path: str | Path) -> list[list[dict[str, str]]]:
    """Return the conversations of a file or folder that `specc.prompts.read_prompts` reads; each ends with a user turn.

    Raises:
        InputError: No such file, or a conversation that the target cannot answer.
        ArtifactError: A line of a file is wrong.
    """
    return [_messages(prompt, path) for prompt in read_prompts(path)]


def _messages(prompt: Prompt, path: str | Path) -> list[dict[str, str]]:
    content = prompt.content
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if isinstance(content, Tensor) or content[-1]["role"] != "user":
        wanted = "a text, or messages that end with a user turn"
        raise InputError("prompts", f"{prompt.name} of {path}", wanted)
    return [{"role": str(m["role"]), "content": str(m["content"])} for m in content]


def text_of(messages: Sequence[dict[str, str]]) -> str:
    """Return all user turns joined: what the overlap check reads."""
    return " ".join(m["content"] for m in messages if m["role"] == "user")


def read_evaluation(path: str | Path | None) -> Evaluation:
    """Return the evaluation set of a JSONL file or a folder of them; None = nothing to keep out."""
    if path is None:
        return Evaluation(())
    try:
        return Evaluation(text_of(messages) for messages in read_conversations(path))
    except InputError as error:
        raise InputError("avoid", str(path), f"prompts in JSON lines: {error}") from error
