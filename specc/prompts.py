"""Prompts for checks and measurements: built in, from a JSON-lines file, or written by the target itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.errors import ArtifactError, InputError
from specc.models.generation import encode_prompt


@dataclass(frozen=True)
class Prompt:
    """One prompt: a user's message, a list of messages, or token ids int64 [tokens]."""

    name: str
    content: str | tuple[Mapping[str, Any], ...] | Tensor
    category: str = ""
    max_new_tokens: int | None = None

    def encode(self, tokenizer: Any) -> Tensor:
        """Return the ids, int64 [tokens]; the tokenizer's chat template is applied where it has one."""
        if isinstance(self.content, Tensor):
            return self.content
        content = self.content if isinstance(self.content, str) else list(self.content)
        return encode_prompt(tokenizer, content)[0]


_BUILT_IN = (
    ("chat", "Why is the sky blue during the day and red in the evening?"),
    ("chat", "Give me three tips for learning a new language as an adult."),
    ("code", "Write a Python function that returns the n-th Fibonacci number without recursion."),
    (
        "rewrite",
        "Correct the mistakes in this text and repeat it: Yesterday we goes to the market and buyed apples, "
        "pears and a bread. It were raining, so we runned home.",
    ),
    ("list", "List the months of the year together with the number of days each of them has."),
    ("maths", "A train leaves at 9:40 and arrives at 13:15. How long is the journey? Explain step by step."),
)
SELF_WRITTEN_TOKENS = 12  # long enough that a drafter has a context to read
SELF_WRITTEN_COUNT = 8


def built_in_prompts() -> tuple[Prompt, ...]:
    """Return a few English messages of several kinds."""
    return tuple(Prompt(f"{kind}-{index}", text, kind) for index, (kind, text) in enumerate(_BUILT_IN))


def read_prompts(prompts: str | Path | Sequence[Any]) -> tuple[Prompt, ...]:
    """Return prompts from a JSON-lines file, a folder of such files, or a list.

    Args:
        prompts: A file with one object a line, {"messages": [...]} or {"prompt": "..."}, and optionally "id",
            "category" and "max_new_tokens"; a folder whose ``*.jsonl`` are all read, in the order of their
            names; or a list of messages, message lists, token ids or `Prompt`.

    Raises:
        InputError: The list holds something else, or there is no such file.
        ArtifactError: A line of a file is wrong.
    """
    if isinstance(prompts, str | Path):
        path = Path(prompts)
        if not path.is_dir():
            return _from_file(path)
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise InputError("prompts", str(path), "a folder with at least one .jsonl file")
        return tuple(prompt for file in files for prompt in _from_file(file))
    if not isinstance(prompts, Sequence):
        raise InputError("prompts", type(prompts).__name__, "a file's path or a list")
    found = tuple(_from_value(index, value) for index, value in enumerate(prompts))
    if not found:
        raise InputError("prompts", "an empty list", "at least one prompt")
    return found


def first_of_each(prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """Return the first ``count`` prompts of every category, in the order given."""
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= count:
            kept.append(prompt)
    return tuple(kept)


def _from_value(index: int, value: object) -> Prompt:
    name = f"prompt-{index}"
    if isinstance(value, Prompt):
        return value
    if isinstance(value, str) and value.strip():
        return Prompt(name, value)
    if isinstance(value, Tensor) and value.dtype == torch.int64 and value.numel():
        return Prompt(name, value.flatten())
    if isinstance(value, Sequence) and value and not isinstance(value, str):
        if all(isinstance(item, int) for item in value):
            return Prompt(name, torch.tensor(value))
        if all(isinstance(item, Mapping) and {"role", "content"} <= set(item) for item in value):
            return Prompt(name, tuple(value))
    raise InputError("prompts", value, "messages, lists of messages with role and content, or token ids")


def _from_file(path: Path) -> tuple[Prompt, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("prompts", str(path), f"must be a readable UTF-8 file ({error})") from None
    prompts = [_from_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ArtifactError(path, "content", "no prompts", "one JSON object a line")
    return tuple(prompts)


def _from_line(path: Path, number: int, line: str) -> Prompt:
    where = f"line {number}"
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ArtifactError(path, where, str(error), "one JSON object") from error
    content = values.get("messages") or values.get("prompt") if isinstance(values, dict) else None
    try:
        prompt = _from_value(number, content)
    except InputError as error:
        expected = '"messages" with role and content, or "prompt" with a text'
        raise ArtifactError(path, where, line[:80], expected) from error
    limit = values.get("max_new_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ArtifactError(path, f"{where} max_new_tokens", limit, "a whole number, 1 or more")
    return Prompt(str(values.get("id", prompt.name)), prompt.content, str(values.get("category", "")), limit)


def suits(tokenizer: Any) -> bool:
    """Whether English messages make sense for a model with this tokenizer: it has a chat template."""
    return tokenizer is not None and bool(getattr(tokenizer, "chat_template", None))


def starts(first: Iterable[int], vocab: int, count: int = SELF_WRITTEN_COUNT) -> list[Tensor]:
    """Return one-token prompts for a target to go on from: its own start tokens, else spread over its ids."""
    ids = [token for token in first if 0 <= token < vocab]
    spread = [(index * vocab) // (count + 1) for index in range(1, count + 1)]
    return [torch.tensor([ids[0] if ids else token]) for token in spread]
