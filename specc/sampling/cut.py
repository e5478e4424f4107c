"""Where a row of scores is cut: the kth largest score, and the best ids whose probability reaches a mass.

Three operators find thresholds without sorting the vocabulary; the mask that follows is elementwise and
fuses with its neighbours. On the CPU each looks at the best 64 scores, checks on the host that these
decide the row, and sorts only the rows where they do not: sorted rows use the very arithmetic of the
published processors, and a row whose cut lies within rounding of a boundary counts as undecided, so
kept sets agree to the last id. Elsewhere a bisection over the bits of a float32 finds the same cut with
no host read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIB: Any = torch.library.Library("specc", "FRAGMENT")
_LIB.define("kth_largest(Tensor scores, Tensor k) -> Tensor")
_LIB.define("nucleus_cut(Tensor scores, Tensor mass) -> (Tensor, Tensor)")
_LIB.define("typical_cut(Tensor shift, Tensor scores, Tensor mass) -> Tensor")

_BEST = 64  # how many of the best scores the CPU looks at first: 0.7 ms, a sort 64 ms (design.md 5)
_ROUNDING = 1e-5  # far above the error of a float32 softmax and its running sum over a vocabulary
_NEVER = float("-inf")


def kth_largest(scores: Tensor, k: Tensor) -> Tensor:
    """Return the kth largest score of each row; -inf where k is 0, the smallest where k exceeds the row.

    Args:
        scores: float32 [rows, vocab].
        k: int64 [rows].
    """
    found: Tensor = torch.ops.specc.kth_largest(scores, k)
    return found


def nucleus_cut(scores: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the smallest set of best ids whose probability reaches ``mass`` ends.

    An id belongs to the set when its score is above the threshold, or equal to it and the id is not below
    the first id: among equal scores the higher ids are taken first, as by a stable ascending sort.

    Args:
        scores: float32 [rows, vocab].
        mass: float64 [rows]; at 1 or more everything belongs to the set.

    Returns:
        threshold float32 [rows] and first id int64 [rows].
    """
    threshold, first = torch.ops.specc.nucleus_cut(scores, mass)
    return threshold, first


def typical_cut(shift: Tensor, scores: Tensor, mass: Tensor) -> Tensor:
    """Return the largest ``shift`` among the ids of smallest shift whose probability reaches ``mass``.

    Args:
        shift: float32 [rows, vocab], distance of an id's surprise from the entropy.
        scores: float32 [rows, vocab].
        mass: float64 [rows]; at 1 or more the result is infinite.
    """
    found: Tensor = torch.ops.specc.typical_cut(shift, scores, mass)
    return found


# --- on the host ---------------------------------------------------------------------------------------


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``index``, without a copy where these are all."""
    return rows if len(index) == len(rows) else rows[index]


def _kth_host(scores: Tensor, k: Tensor) -> Tensor:
    k = k.clamp(max=scores.shape[1])
    out = torch.full_like(scores[:, 0], _NEVER)
    for rows, limit in ((k <= _BEST, _BEST), (k > _BEST, int(k.max()))):
        index = (rows & (k > 0)).nonzero()[:, 0]
        if len(index):
            best = _take(scores, index).topk(min(limit, scores.shape[1]), dim=1).values
            out[index] = best.gather(1, k[index, None] - 1)[:, 0]
    return out


def _nucleus_host(scores: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    threshold = torch.full_like(scores[:, 0], _NEVER)
    first = torch.zeros_like(mass, dtype=torch.int64)
    index = (mass < 1).nonzero()[:, 0]
    if not len(index):
        return threshold, first
    rows, want = _take(scores, index), mass[index]
    best, ids = rows.topk(min(_BEST, rows.shape[1]), dim=1)
    weight = rows.softmax(1).gather(1, ids).double()
    running = weight.cumsum(1)
    place = (running < want[:, None]).sum(1)
    decided = place < best.shape[1]
    place = place.clamp(max=best.shape[1] - 1)[:, None]
    edge, one = best.gather(1, place), weight.gather(1, place)[:, 0]
    above = torch.where(best > edge, weight, 0.0).sum(1)
    steps = (want - above) / one  # how many ids of the edge's score are needed
    decided &= ((steps - steps.round()).abs() * one > _ROUNDING) & edge[:, 0].isfinite()
    if best.shape[1] < rows.shape[1]:
        decided &= best[:, -1] < edge[:, 0]  # else more ids of that score may lie beyond the best
    threshold[index] = edge[:, 0]
    ties = best == edge
    needed = torch.where(decided, steps, 1.0).ceil().long().clamp(min=1)
    for row in (decided & (ties.sum(1) > needed)).nonzero()[:, 0].tolist():
        first[index[row]] = ids[row][ties[row]].sort(descending=True).values[needed[row] - 1]
    for row in (~decided).nonzero()[:, 0].tolist():
        ordered, order = rows[row].sort(stable=True)
        removed = ordered.softmax(0).cumsum(0) <= (1 - want[row]).float()
        removed[-1] = False
        count = int(removed.sum())
        threshold[index[row]], first[index[row]] = ordered[count], order[count]
    return threshold, first


def _typical_host(shift: Tensor, scores: Tensor, mass: Tensor) -> Tensor:
    out = torch.full_like(scores[:, 0], -_NEVER)
    index = (mass < 1).nonzero()[:, 0]
    if not len(index):
        return out
    rows, want = _take(shift, index), mass[index]
    best, ids = rows.topk(min(_BEST, rows.shape[1]), dim=1, largest=False)
    logits = _take(scores, index)
    running = logits.softmax(1).gather(1, ids).double().cumsum(1)
    place = (running < want[:, None]).sum(1).clamp(max=best.shape[1] - 1)[:, None]
    near = ((running - want[:, None]).abs() <= _ROUNDING).any(1)
    out[index] = best.gather(1, place)[:, 0]
    # NaN and unreached masses are undecided as well.
    for row in (~((running[:, -1] >= want) & ~near)).nonzero()[:, 0].tolist():
        ordered, order = rows[row].sort(stable=True)
        short = (logits[row][order].softmax(0).cumsum(0) < want[row].float()).sum()
        out[index[row]] = ordered[short.clamp(max=ordered.shape[0] - 1)]
    return out


# --- on a device ---------------------------------------------------------------------------------------


def _bisect(holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, turns: int) -> Tensor:
    """Return the largest value in [low, high) where ``holds``, which is true of low and monotone."""
    for _ in range(turns):
        middle = (low + high) >> 1
        true = holds(middle)
        low, high = torch.where(true, middle, low), torch.where(true, high, middle)
    return low


def _order(scores: Tensor) -> Tensor:
    """Return int64 keys that order as the float32 scores do; both zeros get one key."""
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _score_of(key: Tensor) -> Tensor:
    bits = key.to(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)


def _reach(keys: Tensor, weight: Tensor, want: Tensor) -> Tensor:
    """Return the largest key such that the weight of keys not below it reaches ``want``, int64 [rows]."""
    low = keys.amin(1)
    return _bisect(
        lambda middle: torch.where(keys >= middle[:, None], weight, 0.0).sum(1, dtype=torch.float64) >= want,
        low, keys.amax(1) + 1, 33,
    )  # fmt: skip


def _kth_device(scores: Tensor, k: Tensor) -> Tensor:
    want = k.clamp(max=scores.shape[1]).double()
    found = _score_of(_reach(_order(scores), torch.ones_like(scores), want))
    return torch.where(k > 0, found, _NEVER)


def _nucleus_device(scores: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    keys, weight = _order(scores), scores.softmax(1).double()
    edge = _reach(keys, weight, mass)
    above = torch.where(keys > edge[:, None], weight, 0.0).sum(1)
    equal = keys == edge[:, None]
    one = torch.where(equal, weight, 0.0).amax(1)
    needed = ((mass - above) / one).ceil().clamp(min=1).minimum(equal.sum(1).double()).nan_to_num(1.0)
    index = torch.arange(scores.shape[1], device=scores.device)
    first = _bisect(
        lambda middle: (equal & (index >= middle[:, None])).sum(1) >= needed,
        torch.zeros_like(edge), torch.full_like(edge, scores.shape[1]), scores.shape[1].bit_length(),
    )  # fmt: skip
    cut = mass < 1
    return torch.where(cut, _score_of(edge), _NEVER), torch.where(cut, first, 0)


def _typical_device(shift: Tensor, scores: Tensor, mass: Tensor) -> Tensor:
    found = -_score_of(_reach(_order(-shift), scores.softmax(1), mass))
    return torch.where(mass < 1, found, -_NEVER)


_LIB.impl("kth_largest", _kth_host, "CPU")
_LIB.impl("nucleus_cut", _nucleus_host, "CPU")
_LIB.impl("typical_cut", _typical_host, "CPU")
_LIB.impl("kth_largest", _kth_device, "CUDA")
_LIB.impl("nucleus_cut", _nucleus_device, "CUDA")
_LIB.impl("typical_cut", _typical_device, "CUDA")
torch.library.register_fake(
    "specc::kth_largest", lambda scores, k: scores.new_empty(scores.shape[0]), lib=_LIB
)
torch.library.register_fake(
    "specc::nucleus_cut",
    lambda scores, mass: (scores.new_empty(scores.shape[0]), mass.new_empty(mass.shape, dtype=torch.int64)),
    lib=_LIB,
)
torch.library.register_fake(
    "specc::typical_cut", lambda shift, scores, mass: scores.new_empty(scores.shape[0]), lib=_LIB
)
