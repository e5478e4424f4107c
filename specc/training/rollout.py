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
from specc.training.packing import Batch
from specc.training.terms import Embed, LossOptions, Reference, Result

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class _Keys:
    """K/V of a layer: of the first step for all rows, and of each later step for its own row."""

    key: Tensor
    value: Tensor
    later: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def rollout(
    drafter: Eagle3Drafter, features: Tensor, ids: Tensor, embed: Embed, steps: int, start: int = 0
) -> list[Tensor]:
    """Return the output of each step, [batch, rows, hidden] before the norm, for rows from ``start`` on.

    Args:
        drafter: What is trained.
        features: [batch, length, taps * hidden].
        ids: int64 [batch, length]; tokens past the end are read as the last ones.
        embed: The target's embedding.
        steps: How many drafts are made.
        start: The first row that rolls on: rows before it give keys only.
    """
    length = ids.shape[1]
    place = torch.arange(length, device=ids.device)
    keys: dict[int, _Keys] = {}
    feature = drafter.fuse(features)
    outputs: list[Tensor] = []
    for step in range(steps):
        rows = place if step == 0 else place[start:]
        token = ids[:, (rows + 1 + step).clamp(max=length - 1)]
        position = (rows + step).expand(len(ids), -1)
        attend = _first(keys) if step == 0 else _later(keys, rows)
        output = drafter.step(feature, drafter.embed(token, embed), position, attend)
        outputs.append(output[:, start:] if step == 0 else output)
        feature = drafter.carried(outputs[-1])
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
        grouped = torch.unflatten(query, 2, (key.shape[2], groups))  # [batch, rows, kv heads, groups, size]
        scores = torch.einsum("bnhgd,bkhd->bnhgk", grouped, held.key) * scale
        place = torch.arange(held.key.shape[1], device=rows.device)
        scores = scores.masked_fill((place > rows[:, None])[None, :, None, None], float("-inf"))
        own = [torch.einsum("bnhgd,bnhd->bnhg", grouped, k)[..., None] * scale for k, _ in held.later]
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
    start = max(int(batch.first.min()) - 1, 0)
    outputs = rollout(drafter, batch.features, batch.ids, embed, options.steps, start)
    with torch.no_grad():
        chances = reference.probabilities(batch)
    length = batch.ids.shape[1]
    rows = torch.arange(start, length, device=batch.ids.device)
    result = Result()
    prefix: Tensor | None = None
    runs = torch.full_like(batch.ids, -1)
    prefixes, totals, overlaps = [], [], []
    for step, output in enumerate(outputs):
        # Only rows with a label: answers differ in length, and the head is most of the work.
        valid = (rows >= batch.first[:, None] - 1) & (rows + 2 + step < batch.end[:, None])
        sequence, row = valid.nonzero(as_tuple=True)
        column = rows[row] + 1 + step
        p = chances[sequence, column]
        mass = p.sum(-1)
        known = p.amax(-1) >= 1 - mass
        log_q = drafter.head(output[sequence, row]).float().log_softmax(-1)
        within = p / mass.clamp(min=1e-9)[..., None]
        cross = -(within * log_q).sum(-1) * known
        counted = torch.zeros(len(batch.ids), device=cross.device).index_add(0, sequence, known.float())
        per_sequence = torch.zeros_like(counted).index_add(0, sequence, cross) / counted.clamp(min=1)
        result.terms[f"step{step}"] = (
            options.step_decay**step,
            per_sequence.sum(),
            (counted > 0).sum().float(),
        )
        label = reference.draft_index[batch.ids[sequence, column + 1]]
        right = torch.zeros_like(valid)
        right[sequence, row] = log_q.argmax(-1) == label
        prefix = right if prefix is None else prefix & right
        # Row t's anchor is token t + 1, the last that a step knows.
        if step == 0:
            runs[sequence, rows[row] + 1] = 0
        runs[:, rows[:-1] + 1] += prefix[:, :-1]
        prefixes.append(prefix.sum())
        totals.append(valid.sum())
        overlaps.append(torch.minimum(log_q.detach().exp(), p).sum())
    result.prefix, result.total = torch.stack(prefixes), torch.stack(totals)
    result.overlap, result.runs = torch.stack(overlaps), runs
    return result
