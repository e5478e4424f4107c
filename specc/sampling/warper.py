"""What a warper is, what it sees, and how settings live on the device.

A setting of `generate` is a *family*. A family named when a step is built adds one or more *columns*:
tensors [slots, ...] that the step reads, so that values change without tracing again. A list is padded to
its family's *bucket*; a longer list needs a wider bucket, and so another step, whose family key says so:
``bad_words_ids`` or ``bad_words_ids:128x8``. A family that is not named costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specc.errors import InvariantError


@dataclass(frozen=True)
class Column:
    """One setting tensor: its shape per slot, its dtype, and the value that switches the setting off."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    neutral: float | int


@dataclass(frozen=True)
class SamplingContext:
    """What warpers may read. Row i of the logits follows the history tokens[:length] + draft[:i]."""

    tokens: Tensor  # int64 [slots, capacity + 1] committed tokens, never padding; anything beyond the length
    length: Tensor  # int64 [slots] committed tokens
    prompt_length: Tensor  # int64 [slots] how many of them are the prompt
    draft: Tensor  # int64 [slots, block], -1 = none
    settings: Mapping[str, Tensor]  # columns by name
    eos: Tensor  # int64 [slots, count], padded with -1
    max_length: Tensor  # int64 [slots] prompt plus new tokens at most

    @cached_property
    def history(self) -> Tensor:
        """Committed tokens with the draft behind them, int64 [slots, capacity + 1 + block]."""
        if not self.draft.shape[1]:
            return self.tokens
        index = self.length[:, None] + torch.arange(self.draft.shape[1], device=self.draft.device)
        return torch.cat([self.tokens, self.draft], 1).scatter(1, index, self.draft)

    @property
    def rows(self) -> int:
        """The number of logits rows per slot, block + 1."""
        return self.draft.shape[1] + 1

    @cached_property
    def position(self) -> Tensor:
        """The history's length before each row, which is the position of the row's token: [slots, rows]."""
        return self.length[:, None] + torch.arange(self.rows, device=self.length.device)

    def last(self, size: int) -> Tensor:
        """Return the newest ``size`` tokens before each row, oldest first, -2 where there are none.

        int64 [slots, rows, size].
        """
        index = self.position[..., None] - torch.arange(size, 0, -1, device=self.length.device)
        found = self.history.gather(1, index.clamp(min=0).flatten(1)).view(index.shape)
        return torch.where(index >= 0, found, -2)


@runtime_checkable
class Warper(Protocol):
    """One setting of `generate` that changes the logits; stateless."""

    @property
    def name(self) -> str:
        """The argument of `generate`, which is also the family."""

    @property
    def is_sampling(self) -> bool:
        """Whether greedy slots skip it."""

    @property
    def bucket(self) -> tuple[int, ...]:
        """The smallest list sizes; empty for a scalar."""

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        """Return the columns at ``bucket``, which is the shape of the first one."""

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        """Check a value on the host and return one slot's columns, or None where it changes nothing.

        Raises:
            InputError: The value is wrong.
            UnsupportedError: transformers would take it, specc does not.
        """

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        """Return the changed logits, float32 [slots, rows, vocab]; traced."""


def per_slot(context: SamplingContext, name: str) -> Tensor:
    """Return a scalar column shaped to broadcast against logits, [slots, 1, 1]."""
    return context.settings[name][:, None, None]


def per_row(context: SamplingContext, name: str) -> Tensor:
    """Return a scalar column repeated for every row of its slot, [slots * rows]."""
    return context.settings[name][:, None].expand(-1, context.rows).flatten()


def family_key(warper: Warper, bucket: tuple[int, ...]) -> str:
    """Return the family's key: its name, and the bucket where that is not the smallest."""
    return warper.name if bucket == warper.bucket else f"{warper.name}:{'x'.join(map(str, bucket))}"


def family_bucket(warper: Warper, family: str) -> tuple[int, ...]:
    """Return the bucket in a family's key."""
    name, _, sizes = family.partition(":")
    if name != warper.name:
        raise InvariantError(f"family {family!r} belongs to another warper than {warper.name!r}")
    return tuple(int(size) for size in sizes.split("x")) if sizes else warper.bucket
