"""Drafting methods: one file each, all named in METHODS."""

from __future__ import annotations

from types import MappingProxyType

from specc.contracts import Method
from specc.errors import UnknownNameError
from specc.methods.dflash import DFlash
from specc.methods.dflash2 import DFlash2
from specc.methods.draft_model import DraftModel
from specc.methods.dspark import DSpark
from specc.methods.eagle3 import Eagle3
from specc.methods.eagle3_tree import Eagle3Tree
from specc.methods.mtp import Mtp
from specc.methods.ngram import Ngram
from specc.methods.plain import Plain

_ALL: tuple[Method, ...] = (
    Plain(), Ngram(), DraftModel(), Eagle3(), Eagle3Tree(), Mtp(), DFlash(), DSpark(), DFlash2(),
)  # fmt: skip
METHODS = MappingProxyType({m.name: m for m in _ALL})


def get(name: str) -> Method:
    """Return the method called ``name``; UnknownNameError if there is none."""
    if name not in METHODS:
        raise UnknownNameError("method", name, METHODS)
    return METHODS[name]
