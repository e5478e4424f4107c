"""Checks of setting values on the host. Every refusal is an `InputError` naming the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from specc.errors import InputError


def real(
    argument: str, value: object, allowed: str, low: float, high: float = math.inf, *,
    open_low: bool = False, open_high: bool = False,
) -> float:  # fmt: skip
    """Return ``value`` as a float inside the interval, whose ends may be excluded, and within float32."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(argument, value, allowed)
    number = float(value)
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below and abs(number) <= torch.finfo(torch.float32).max):
        raise InputError(argument, value, allowed)
    return number


def whole(argument: str, value: object, allowed: str) -> int:
    """Return ``value`` as a non-negative int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(argument, value, allowed)
    if not 0 <= int(value) <= torch.iinfo(torch.int64).max:
        raise InputError(argument, value, allowed)
    return int(value)


def bias(argument: str, value: object, given: object) -> float:
    """Return a bias: any real number or minus infinity."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(argument, given, "a bias is a real number")
    number = float(value)
    if math.isnan(number) or number == math.inf:
        raise InputError(argument, given, "a bias is finite or minus infinity")
    return number


def token_ids(argument: str, value: object, vocab: int | None, given: object = None) -> tuple[int, ...]:
    """Return ``value`` as token ids, each not negative and, where ``vocab`` is given, below it."""
    given = value if given is None else given
    allowed = "token ids are non-negative integers" + ("" if vocab is None else f" below {vocab}")
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InputError(argument, given, allowed)
    if isinstance(value, Tensor):
        value = value.tolist() if value.dim() == 1 else [None]
    ids = tuple(value)
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, Integral) or int(item) < 0:
            raise InputError(argument, given, allowed)
        if vocab is not None and int(item) >= vocab:
            raise InputError(argument, given, allowed)
    return tuple(int(item) for item in ids)


def bucket_size(count: int, smallest: int) -> int:
    """Return ``smallest``, or the next power of two that holds ``count``."""
    return max(smallest, 1 << max(count - 1, 0).bit_length())


def pad_ids(ids: Sequence[int], smallest: int) -> Tensor:
    """Return token ids as int64 [bucket], padded with -1."""
    out = torch.full((bucket_size(len(ids), smallest),), -1, dtype=torch.int64)
    out[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return out


def pad_sequences(sequences: Sequence[Sequence[int]], smallest: tuple[int, ...]) -> Tensor:
    """Return sequences as int64 [bucket count, bucket length], aligned to the right, padded with -1."""
    longest = max(map(len, sequences), default=0)
    out = torch.full((bucket_size(len(sequences), smallest[0]), bucket_size(longest, smallest[1])), -1)
    for row, sequence in zip(out, sequences, strict=False):
        row[len(row) - len(sequence) :] = torch.tensor(sequence, dtype=torch.int64)
    return out
