"""Read JSON that may hold anything: every value is asked for with its type, and nothing is left over."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from specc.errors import ArtifactError

MAX_BYTES = 64 << 20  # of one JSON file in a package


def write_json(document: Any) -> bytes:
    """Return a document as canonical JSON: sorted keys, no spaces, ASCII, one newline at the end."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii") + b"\n"


def read_json(path: Path, name: str, content: memoryview) -> Fields:
    """Parse one JSON object of a package.

    Raises:
        ArtifactError: it is too large, not JSON, names a key twice, or is not an object.
    """
    if len(content) > MAX_BYTES:
        raise ArtifactError(path, name, f"{len(content)} bytes", f"at most {MAX_BYTES}")
    try:
        value = json.loads(bytes(content), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(path, name, f"no JSON: {error}", "a JSON object") from error
    return Fields(path, name, value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """A JSON object being read: each accessor takes a key out, and `done` refuses what nobody asked for."""

    def __init__(self, path: Path, name: str, value: object) -> None:
        self.path, self.name = path, name
        if not isinstance(value, dict):
            raise ArtifactError(path, name, type(value).__name__, "an object")
        self._left: dict[str, Any] = dict(value)

    def fault(self, key: str, found: object, expected: object) -> ArtifactError:
        """Return an error that names the field ``key``."""
        return ArtifactError(self.path, f"{self.name}.{key}", found, expected)

    def take(self, key: str) -> Any:
        """Return a value of any type."""
        if key not in self._left:
            raise self.fault(key, "nothing", "a value")
        return self._left.pop(key)

    def text(self, key: str, *allowed: str) -> str:
        value = self.take(key)
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise self.fault(key, repr(value)[:200], " or ".join(map(repr, allowed)) or "text")
        return value

    def whole(self, key: str, least: int = 0, most: int = 1 << 48) -> int:
        value = self.take(key)
        if type(value) is not int or not least <= value <= most:
            raise self.fault(key, repr(value)[:200], f"a whole number from {least} to {most}")
        return value

    def flag(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise self.fault(key, repr(value)[:200], "true or false")
        return value

    def optional(self, key: str) -> bool:
        """Return whether ``key`` has a value; a null is taken out."""
        if self._left.get(key, 0) is None:
            del self._left[key]
            return False
        return True

    def has(self, key: str) -> bool:
        """Return whether ``key`` is there at all: later versions write some that earlier ones did not."""
        return key in self._left

    def inner(self, key: str) -> Fields:
        """Return an object to be read in turn."""
        return Fields(self.path, f"{self.name}.{key}", self.take(key))

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a plain mapping, its values unchecked."""
        return self.inner(key).rest()

    def rest(self) -> dict[str, Any]:
        """Take out all that is left, unchecked."""
        left, self._left = self._left, {}
        return left

    def items(self, key: str) -> list[Any]:
        value = self.take(key)
        if not isinstance(value, list):
            raise self.fault(key, type(value).__name__, "a list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.items(key)
        if not all(isinstance(v, str) for v in values):
            raise self.fault(key, repr(values)[:200], "a list of texts")
        return tuple(values)

    def wholes(self, key: str, least: int = 0, most: int = 1 << 48) -> tuple[int, ...]:
        values = self.items(key)
        if not all(type(v) is int and least <= v <= most for v in values):
            raise self.fault(key, repr(values)[:200], f"whole numbers from {least} to {most}")
        return tuple(values)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a tensor's shape, of a size that memory could hold."""
        values = self.wholes(key)
        if math.prod(values) > 1 << 50:
            raise self.fault(key, list(values), "whole numbers whose product is at most 2**50")
        return values

    def objects(self, key: str) -> Iterator[Fields]:
        """Yield the objects of a list."""
        for index, value in enumerate(self.items(key)):
            yield Fields(self.path, f"{self.name}.{key}[{index}]", value)

    def named(self, key: str) -> Iterator[tuple[str, Fields]]:
        """Yield the objects of a mapping with their names."""
        for name, value in self.mapping(key).items():
            yield name, Fields(self.path, f"{self.name}.{key}.{name}", value)

    def done(self) -> None:
        """Refuse keys that nobody asked for."""
        if self._left:
            raise self.fault(sorted(self._left)[0], "a field this version does not know", "none")


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
