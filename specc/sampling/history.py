"""What several warpers ask of the history: counts of ids, sequences about to be completed, sets of ids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specc.sampling.warper import SamplingContext


def change_by_count(
    logits: Tensor, context: SamplingContext, start: Tensor | None, change: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return ``change(logits, count)``, count being how often the history before a row holds the id.

    The committed history is counted once per slot, [slots, vocab]. What drafts add is worked out only at
    the ids drafted, so there are no counts of every row and id.

    Args:
        logits: [slots, rows, vocab].
        context: Where the history is.
        start: int64 [slots], the first position that counts; None = 0.
        change: Elementwise; logits and counts (float32) broadcast.
    """
    tokens, vocab = context.tokens, logits.shape[2]
    index = torch.arange(tokens.shape[1], device=tokens.device)
    counted = (index < context.length[:, None]) & (tokens >= 0) & (tokens < vocab)
    if start is not None:
        counted = counted & (index >= start[:, None])
    base = logits.new_zeros(logits.shape[0], vocab).scatter_add(
        1, torch.where(counted, tokens, 0), counted.to(logits.dtype)
    )
    out = change(logits, base[:, None])
    if not context.draft.shape[1]:
        return out
    drafted = (context.draft >= 0) & (context.draft < vocab)
    ids = torch.where(drafted, context.draft, 0)
    order = torch.arange(ids.shape[1], device=ids.device)
    row = torch.arange(context.rows, device=ids.device)
    # Draft j adds to draft i's id in the rows after j. Drafts of one id get one value: the scatter agrees.
    same = (ids[:, :, None] == ids[:, None, :]) & drafted[:, None, :]
    adds = same[:, None] & (order < row[:, None])[:, None]  # [slots, rows, i, j]
    count = base.gather(1, ids)[:, None] + adds.sum(-1)
    where = ids[:, None].expand(-1, context.rows, -1)
    return out.scatter(2, where, change(logits.gather(2, where), count))


def id_mask(ids: Tensor, vocab: int) -> Tensor:
    """Return which ids are listed, bool [slots, vocab], from int64 [slots, count] with -1 = none."""
    listed = (ids >= 0) & (ids < vocab)
    hits = torch.zeros((ids.shape[0], vocab), dtype=torch.float32, device=ids.device)
    return hits.scatter_add(1, torch.where(listed, ids, 0), listed.float()) > 0


def ban(logits: Tensor, ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return logits with -inf at the listed ids, in the given rows.

    Args:
        logits: [slots, rows, vocab].
        ids: int64 [slots, count], -1 = none.
        rows: bool [slots, rows]; None = all.
    """
    banned = id_mask(ids, logits.shape[2])[:, None]
    if rows is not None:
        banned = banned & rows[..., None]
    return logits.masked_fill(banned, float("-inf"))


def completes(sequences: Tensor, context: SamplingContext) -> Tensor:
    """Return whether a row's next token would complete a sequence: bool [slots, rows, count].

    ``sequences`` is int64 [slots, count, length], aligned to the right and padded with -1.
    """
    prefix = sequences[:, None, :, :-1]
    matched = (prefix == context.last(sequences.shape[2] - 1)[:, :, None]) | (prefix < 0)
    return matched.all(-1) & (sequences[:, None, :, -1] >= 0)
