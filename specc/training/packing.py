"""Batches of recorded sequences, and blocks at many anchors of a sequence packed into one pass.

A block sees its sequence's context before its anchor and itself, nothing of other blocks: the mask says so,
and one attention call over [context, all blocks] does the work of as many inference steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.drafters.block import Attend, BlockConfig, BlockDrafter
from specc.training.shards import Example


@dataclass(frozen=True)
class Batch:
    """Sequences padded to the longest; positions are columns.

    Attributes:
        ids: int64 [batch, length].
        first: int64 [batch], the first answer position.
        end: int64 [batch], the sequence's length.
        features: [batch, length, taps * hidden]; column end - 1 and on is zero: no state is known there.
        final: [batch, length, hidden], what the target's head reads, likewise.
        log_total: [batch, length], logsumexp of the target's logits, right on answer rows only.
        number: Where each sequence stands in the run's order: seeds what is drawn for it.
    """

    ids: Tensor
    first: Tensor
    end: Tensor
    features: Tensor
    final: Tensor
    log_total: Tensor
    number: tuple[int, ...]

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.ids.to(device),
            self.first.to(device),
            self.end.to(device),
            self.features.to(device),
            self.final.to(device),
            self.log_total.to(device),
            self.number,
        )


def collate(examples: Sequence[Example], numbers: Sequence[int]) -> Batch:
    """Pad sequences into a batch, in float32."""
    length = max(len(e.ids) for e in examples)

    def padded(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        out = torch.zeros(len(parts), length, *parts[0].shape[1:], dtype=dtype)
        for row, part in zip(out, parts, strict=True):
            row[: len(part)] = part
        return out

    return Batch(
        padded([e.ids for e in examples], torch.int64),
        torch.tensor([e.prompt for e in examples]),
        torch.tensor([len(e.ids) for e in examples]),
        padded([e.features for e in examples], torch.float32),
        padded([e.final for e in examples], torch.float32),
        padded([e.log_total for e in examples], torch.float32),
        tuple(numbers),
    )


def take(values: Tensor, columns: Tensor) -> Tensor:
    """Return [batch, *columns, ..] of [batch, length, ..]: each sequence's values at int64 [batch, *columns]."""
    batch = torch.arange(len(values), device=values.device)
    return values[batch.view(-1, *[1] * (columns.dim() - 1)), columns]


def draw_anchors(batch: Batch, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw ``count`` anchors per sequence, sorted; returns them int64 [batch, count] and which are real.

    An anchor is an answer position that has a next token: what a step starts from. What is drawn depends on
    the seed and the sequence's number alone, so neither a resumed run nor the number of processes changes it.
    """
    anchors = torch.zeros(len(batch.number), count, dtype=torch.int64)
    real = torch.zeros(len(batch.number), count, dtype=torch.bool)
    for row, (number, first, end) in enumerate(
        zip(batch.number, batch.first.tolist(), batch.end.tolist(), strict=True)
    ):
        generator = torch.Generator().manual_seed((seed << 32) ^ number)
        there = end - 1 - first
        picked = (torch.randperm(there, generator=generator)[:count] + first).sort().values
        anchors[row, : len(picked)] = picked
        real[row, : len(picked)] = True
    return anchors.to(batch.ids.device), real.to(batch.ids.device)


@dataclass(frozen=True)
class Blocks:
    """Drafting rows at anchors: row r of a block predicts the token at ``anchor + 1 + r``.

    ``hidden`` [batch, anchors, rows, hidden] after the final norm; ``label`` and ``previous`` int64 [batch,
    anchors, rows]; ``column`` is where the target's own prediction of the label is; ``valid`` is cumulative.
    """

    hidden: Tensor
    label: Tensor
    previous: Tensor
    column: Tensor
    valid: Tensor

    def gather(self, values: Tensor) -> Tensor:
        """Return [batch, anchors, rows, ..] of [batch, length, ..]: each row's target values."""
        return take(values, self.column)


def run_blocks(
    drafter: BlockDrafter, batch: Batch, anchors: Tensor, real: Tensor, embed: Callable[[Tensor], Tensor]
) -> Blocks:
    """Run whole blocks at all anchors in one pass."""
    config = drafter.config
    rows, drafts = config.block, config.drafts
    context = drafter.context(batch.features)
    place = torch.arange(batch.ids.shape[1], device=anchors.device).expand(len(anchors), -1)
    known = drafter.context_key_value(context, place)
    position = anchors[:, :, None] + torch.arange(rows, device=anchors.device)
    token = torch.full_like(position, config.mask_token)
    token[:, :, 0] = batch.ids.gather(1, anchors)
    hidden = drafter(
        drafter.embed(token, embed),
        position,
        _attend(config, known, position, anchors),
    )
    index = torch.arange(drafts, device=anchors.device)
    column = anchors[:, :, None] + index
    valid = (column + 1 < batch.end[:, None, None]) & real[:, :, None]
    column = torch.where(valid, column, 0)
    batches = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    return Blocks(
        hidden[:, :, rows - drafts :],
        batch.ids[batches, column + 1],
        batch.ids[batches, column],
        column,
        valid,
    )


def _attend(
    config: BlockConfig, known: list[tuple[Tensor, Tensor]], position: Tensor, anchors: Tensor
) -> Attend:
    """Return attention of [batch, anchors, rows] queries over the context and their own block."""
    count, rows = position.shape[1:]
    anchor = anchors[:, :, None].expand_as(position)
    end = anchor + rows - 1
    owner = torch.arange(count, device=position.device).repeat_interleave(rows)
    same = (owner[:, None] == owner)[None]

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first, last = (t.flatten(1)[:, :, None] for t in config.visible(index, position, anchor, end))
        context_key, context_value = known[index]
        place = torch.arange(context_key.shape[1], device=position.device)
        before = (place >= first) & (place < anchor.flatten(1)[:, :, None])
        own = position.flatten(1)[:, None, :]
        mask = torch.cat([before, same & (own >= first) & (own <= last)], dim=-1)[:, None]
        keys = torch.cat([context_key, key.flatten(1, 2)], dim=1).transpose(1, 2)
        values = torch.cat([context_value, value.flatten(1, 2)], dim=1).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(
            query.flatten(1, 2).transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            scale=config.layer.scale,
            enable_gqa=config.layer.kv_heads != config.layer.heads,
        )
        return torch.unflatten(out.transpose(1, 2), 1, (count, rows))

    return attend
