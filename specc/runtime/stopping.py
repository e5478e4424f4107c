"""Stop strings: found in the decoded text, across token boundaries, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specc.errors import InputError


class StopStrings:
    """Finds the token that completes a stop string, as transformers' ``stop_strings`` does.

    The sequence ends with that token, whole. Text of the prompt does not count.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        if tokenizer is None:
            raise InputError("stop_strings", list(strings), "needs a tokenizer: pass tokenizer=")
        if not callable(getattr(tokenizer, "decode", None)):
            raise InputError("tokenizer", type(tokenizer).__name__, "a tokenizer, with decode(ids)")
        self._strings, self._tokenizer = tuple(strings), tokenizer
        # A stop string of c characters is spelled by at most so many tokens (a token may be a single byte).
        self._reach = max(len(s.encode("utf-8")) for s in self._strings) + 8

    def find(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """Return how many of the ``new`` tokens to keep, or None when no stop string is complete."""
        for count in range(1, len(new) + 1):
            tokens = [*before, *new[:count]][-self._reach :]
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
            if any(s in text for s in self._strings):
                return count
        return None
