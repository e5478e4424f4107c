"""EAGLE-3's objective: the drafter is trained on its own outputs, as it will run (methods.md 2.8).

Row t pairs the feature of position t with token t + 1. Step 0 reads true features, each later step the
output of the one before, tokens moved on by one; it attends to step 0's keys up to t and, of later steps, to
its own row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.drafters.eagle3 import Eagle3Drafter
from specc.training.packing import Batch, take
from specc.training.soft_cross import soft_cross
from specc.training.terms import Embed, LossOptions, Reference, Result

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class _Keys:
    """K/V of a layer: of the first step for all rows, and of each later step for its own row."""

    key: Tensor
    value: Tensor
    later: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def rollout(
    drafter: Eagle3Drafter, features: Tensor, ids: Tensor, embed: Embed, steps: int, rows: Tensor
) -> list[Tensor]:
    """Return the output of each step, [batch, rows, hidden] before the norm.

    Args:
        drafter: What is trained.
        features: [batch, length, taps * hidden].
        ids: int64 [batch, length]; tokens past the end are read as the last ones.
        embed: The target's embedding.
        steps: How many drafts are made.
        rows: int64 [batch, rows], the rows that roll on; all others give keys only.
    """
    length = ids.shape[1]
    everywhere = torch.arange(length, device=ids.device).expand(len(ids), -1)
    keys: dict[int, _Keys] = {}
    outputs: list[Tensor] = []
    for step in range(steps):
        here = everywhere if step == 0 else rows
        token = ids.gather(1, (here + 1 + step).clamp(max=length - 1))
        feature = drafter.fuse(features) if step == 0 else drafter.carried(outputs[-1])
        attend = _first(keys) if step == 0 else _later(keys, rows)
        output = drafter.step(feature, drafter.embed(token, embed), here + step, attend)
        outputs.append(take(output, rows) if step == 0 else output)
    return outputs


def _first(keys: dict[int, _Keys]) -> Attend:
    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys[index] = _Keys(key, value)
        return torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=key.shape[2] != query.shape[2],
        ).transpose(1, 2)

    return attend


def _later(keys: dict[int, _Keys], rows: Tensor) -> Attend:
    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        held = keys[index]
        held.later.append((key, value))
        groups, scale = query.shape[2] // key.shape[2], query.shape[3] ** -0.5
        grouped = torch.unflatten(
            query * scale, 2, (key.shape[2], groups)
        )  # [batch, rows, kv heads, groups, size]
        scores = torch.einsum("bnhgd,bkhd->bnhgk", grouped, held.key)
        place = torch.arange(held.key.shape[1], device=rows.device)
        scores = scores.masked_fill((place > rows[:, :, None])[:, :, None, None], float("-inf"))
        own = [torch.einsum("bnhgd,bnhd->bnhg", grouped, k)[..., None] for k, _ in held.later]
        share = torch.cat([scores, *own], dim=-1).softmax(-1)
        count = held.key.shape[1]
        out = torch.einsum("bnhgk,bkhd->bnhgd", share[..., :count], held.value)
        for step, (_, value_of) in enumerate(held.later):
            out = out + share[..., count + step, None] * value_of[:, :, :, None]
        return out.flatten(2, 3)

    return attend


def eagle3(
    drafter: Eagle3Drafter, batch: Batch, reference: Reference, embed: Embed, options: LossOptions, seed: int
) -> Result:
    """Soft cross-entropy with the target over the draft vocabulary, step s weighing 0.8 ** s.

    A row counts when its label is an answer token and no token outside the draft vocabulary can be likelier
    than all inside; each sequence's mean counts once.
    """
    assert options.steps is not None, "the trainer knows how many drafts are trained for"
    length, device = batch.ids.shape[1], batch.ids.device
    # Only rows with a label, each sequence's from its own first on: prompts are long and differ in length.
    first = (batch.first - 1).clamp(min=0)
    count = max(int((batch.end - first).max()) - 2, 1)
    rows = first[:, None] + torch.arange(count, device=device)
    outputs = rollout(drafter, batch.features, batch.ids, embed, options.steps, rows.clamp(max=length - 1))
    with torch.no_grad():
        chances = reference.probabilities(batch, (rows + 1).clamp(max=length - 1))
    known = chances.amax(-1) >= 1 - chances.sum(-1)
    labels = chances.flatten(0, 1)
    result = Result()
    prefix: Tensor | None = None
    result.runs = torch.full_like(batch.ids, -1)
    prefixes, totals, overlaps = [], [], []
    for step, output in enumerate(outputs):
        valid = rows + 2 + step < batch.end[:, None]
        sequence, row = valid.nonzero(as_tuple=True)
        column = row + step
        cross, likeliest, inside = soft_cross(
            drafter.norm(output[sequence, row]), drafter.lm_head.weight, labels, sequence * count + column
        )
        told = known[sequence, column].float()
        counted = torch.zeros(len(batch.ids), device=device).index_add(0, sequence, told)
        per_sequence = torch.zeros_like(counted).index_add(0, sequence, cross * told) / counted.clamp(min=1)
        result.terms[f"step{step}"] = (
            options.step_decay**step,
            per_sequence.sum(),
            (counted > 0).sum().float(),
        )
        place = rows[sequence, row]
        label = reference.draft_index[batch.ids[sequence, place + 2 + step]]
        right = torch.zeros_like(valid)
        right[sequence, row] = likeliest == label
        prefix = right if prefix is None else prefix & right
        # Row t's anchor is token t + 1, the last that a step knows.
        result.runs[sequence, place + 1] += prefix[sequence, row] + int(step == 0)
        prefixes.append(prefix.sum())
        totals.append(valid.sum())
        overlaps.append(inside.sum())
    result.prefix, result.total = torch.stack(prefixes), torch.stack(totals)
    result.overlap = None if torch.is_grad_enabled() else torch.stack(overlaps)
    return result
