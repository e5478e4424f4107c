"""The errors that specc raises: one class per kind of fault, each naming what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class SpeccError(Exception):
    """Base of every error that specc raises on purpose."""


class InputError(SpeccError, ValueError):
    """An argument is wrong: names the argument, what was given and what is allowed."""

    def __init__(self, argument: str, given: object, allowed: str) -> None:
        self.argument, self.given, self.allowed = argument, given, allowed
        super().__init__(f"{argument}: {allowed}; got {given!r}")


class UnknownNameError(SpeccError, KeyError):
    """A name is not known: names it, the nearest known one, and all known ones."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        near = difflib.get_close_matches(str(name), self.known, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        self.message = f"unknown {kind} {name!r}{hint} Known: {', '.join(self.known) or 'none'}"
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


class UnsupportedError(SpeccError):
    """A request cannot be honoured: what was asked, every reason, and what to change."""

    def __init__(self, asked: str, reasons: Sequence[str], change: str = "") -> None:
        self.asked, self.reasons, self.change = asked, tuple(reasons), change
        lines = [f"{asked}:", *(f"  - {reason}" for reason in self.reasons)]
        if change:
            lines.append(change)
        super().__init__("\n".join(lines))


class ArtifactError(SpeccError):
    """A file is wrong: its path, the field, what was found and what was expected."""

    def __init__(self, path: object, field: str, found: object, expected: object) -> None:
        self.path, self.field, self.found, self.expected = str(path), field, found, expected
        super().__init__(f"{path}: {field}: found {found}, expected {expected}")


class InvariantError(SpeccError):
    """specc broke one of its own rules: the node, the rule and the pass. Please report it."""

    def __init__(self, rule: str, node: object = "", where: str = "") -> None:
        self.rule, self.node, self.where = rule, str(node), where
        place = f" in {where}" if where else ""
        at = f" at {node}" if node else ""
        super().__init__(f"{rule}{at}{place}. This is a fault in specc: please report it.")
