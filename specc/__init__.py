"""A compiler for speculative decoding: draft, verify, accept and commit as one graph.

Importing this package is light: no torch, no transformers, no environment read. The names below are
looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specc.errors import (
    ArtifactError,
    InputError,
    InvariantError,
    SpeccError,
    UnknownNameError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from specc.api import Compiled, Generation, bench, check, compile, train, verify
    from specc.loading import inspect_package, load

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "Compiled",
    "Generation",
    "InputError",
    "InvariantError",
    "SpeccError",
    "UnknownNameError",
    "UnsupportedError",
    "bench",
    "check",
    "compile",
    "inspect_package",
    "load",
    "train",
    "verify",
]

# No module or folder of specc may have one of these names: importing it would replace the attribute.
# `load` lives apart from the rest: running a package imports nothing that compiling needs.
LAZY = {
    "Compiled": "specc.api", "Generation": "specc.api", "bench": "specc.api", "check": "specc.api",
    "compile": "specc.api", "inspect_package": "specc.loading", "load": "specc.loading",
    "train": "specc.api", "verify": "specc.api",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module 'specc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})
