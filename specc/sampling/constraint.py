"""``constraint=``: what a grammar must offer so that specc can keep generated text inside it.

A constraint belongs to one sequence and starts behind its prompt. It is asked on the host, between verifying and
committing, for one mask per row: drafts that leave the grammar are rejected at the row where they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specc.errors import InputError


@runtime_checkable
class Constraint(Protocol):
    """The state of a grammar over the new tokens of one sequence."""

    def mask(self) -> Tensor:
        """Return which ids may come next, bool [vocab]; ids past its end are not allowed."""

    def advance(self, token: int) -> None:
        """Take ``token``, which the mask allowed, as the next one."""

    def rollback(self, count: int) -> None:
        """Take back the ``count`` newest tokens."""


def mask_rows(constraint: Constraint, drafts: Sequence[int], vocab: int) -> Tensor:
    """Return the mask of each verify row, bool [rows, vocab]; the constraint is left where it was.

    Row i follows drafts 0..i - 1. The rows end with the first one whose draft it does not allow: nothing behind that
    draft can be emitted.

    Raises:
        InputError: A mask is not one.
    """
    rows: list[Tensor] = []
    taken = 0
    try:
        for draft in (*drafts, None):
            row = _checked(constraint.mask(), vocab)
            rows.append(row)
            if draft is None or not bool(row[draft]) or not bool(row.any()):
                break
            constraint.advance(draft)
            taken += 1
    finally:
        if taken:
            constraint.rollback(taken)
    return torch.stack(rows)


def _checked(mask: Any, vocab: int) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.dim() != 1:
        given = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError("constraint", f"a mask of {given}", "masks of bool [vocab]")
    mask = mask[:vocab].cpu()
    return torch.nn.functional.pad(mask, (0, vocab - mask.shape[0]))
