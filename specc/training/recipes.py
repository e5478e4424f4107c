"""Prompts put together from parts, as people write them: a situation, details, a question, a text to work on.

A target's own user turns are short and all of one kind, and a drafter trained on answers to those alone is worse
where people ask. The parts are in ``recipes.toml``.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

_SLOT = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"n([123])")


@cache
def parts() -> Mapping[str, tuple[str, ...]]:
    """Return the texts of every part; ``{name}`` in one stands for a text of that part, ``{n2}`` for two digits."""
    with Path(__file__).with_name("recipes.toml").open("rb") as file:
        return MappingProxyType({name: tuple(texts) for name, texts in tomllib.load(file).items()})


def compose(category: str, chance: random.Random) -> str:
    """Return a prompt of a category; the same state of ``chance`` gives the same one."""
    # What is left empty leaves spaces behind; only code begins lines with them.
    return re.sub(r"[ \t]+(?=\n|$)", "", re.sub(r"(?<=\S) {2,}", " ", _fill(category, chance))).strip()


def _fill(part: str, chance: random.Random) -> str:
    if number := _NUMBER.fullmatch(part):
        digits = int(number[1])
        return str(chance.randint(max(2, 10 ** (digits - 1)), 10**digits - 1))
    return _SLOT.sub(lambda slot: _fill(slot[1], chance), chance.choice(parts()[part]))
