"""Paths that a user gives: refused by name before any work is done, and not by a traceback after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specc.errors import InputError

_SHOWN = 200


def read_path(argument: str, given: object) -> Path:
    """Return a path; InputError if it is none, or one that this system cannot have."""
    if not isinstance(given, str | os.PathLike) or not str(given) or "\0" in str(given):
        raise InputError(argument, given, "a path")
    try:
        path = Path(given).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            argument, str(given)[:_SHOWN], f"a path that can be read ({_reason(error)})"
        ) from None
    return path


def check_new_file(argument: str, given: object, *, force: bool) -> Path:
    """Return the path of a file to write; InputError if it cannot be written, or is there and ``force`` is not."""
    path = read_path(argument, given)
    if path.is_dir():
        raise InputError(argument, str(path), "a file, not a folder")
    if path.exists() and not force:
        raise InputError(argument, str(path), "a new file; pass force=True (--force) to replace one")
    if not path.parent.is_dir():
        raise InputError(argument, str(path), "a file in a folder that exists")
    if not os.access(path.parent, os.W_OK):
        raise InputError(argument, str(path), "a file in a folder that can be written to")
    return path


@contextmanager
def writing(argument: str, path: Path) -> Iterator[None]:
    """Turn a fault of the file system into an InputError that names the place."""
    try:
        yield
    except OSError as error:
        raise InputError(argument, str(path), f"a place that can be written to ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
