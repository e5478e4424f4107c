"""Drafting methods: one file each, all named in METHODS."""

from __future__ import annotations

from types import MappingProxyType

from specc.contracts import Method
from specc.errors import UnknownNameError

_ALL: tuple[Method, ...] = ()
METHODS = MappingProxyType({m.name: m for m in _ALL})


def get(name: str) -> Method:
    """Return the method called ``name``; UnknownNameError if there is none."""
    if name not in METHODS:
        raise UnknownNameError("method", name, METHODS)
    return METHODS[name]
