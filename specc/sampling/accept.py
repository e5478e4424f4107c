"""Judging a draft: the longest valid prefix plus one token of the target's own.

Row i of the target's logits scores the token at absolute position length + i. Greedy slots
(temperature 0) keep drafts equal to the argmax. Coupled slots keep drafts equal to
argmax(log p + g), g keyed by (seed, position): what plain sampling with that seed would emit. Ratio slots
keep draft x while u * q(x) < p(x), then draw from the residual max(p - q, 0) at the first rejection, or
from p where nothing was rejected (methods.md 1.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specc.contracts import AcceptRule, Draft
from specc.errors import InvariantError
from specc.sampling.draw import coupled_scores, inverse_cdf
from specc.sampling.rng import Stream, uniform

_RESIDUAL_FLOOR = 1e-8  # methods.md 1.1: below it the residual is rounding noise, and p itself is drawn from


@dataclass(frozen=True)
class Accepted:
    """What a step emits per slot: ``count`` drafts, then one token of the target's own."""

    count: Tensor  # int64 [slots] accepted drafts a, 0..block
    tokens: Tensor  # int64 [slots, block + 1] the a + 1 emitted tokens, padded with -1
    drafted: Tensor  # int64 [slots] drafts there were: those before the first -1
    broken: Tensor  # bool [slots] the last emitted token comes from a row of NaN or nothing but -inf


@dataclass(frozen=True)
class _Verdict:
    match: Tensor  # bool [slots, block] draft i passes its own test
    choice: Tensor  # int64 [slots, block + 1] the token of greedy and coupled slots
    exact: Tensor | None  # bool [slots] the slot is greedy or coupled; None = all are
    probs: Tensor | None  # float32 [slots, block + 1, vocab] p of the rows, where the ratio test needs it
    sound: Tensor  # bool [slots, block + 1] the row has a distribution


def accept(
    logits: Tensor, draft: Draft | None, *, temperature: Tensor | None = None, seed: Tensor | None = None,
    length: Tensor | None = None, rule: AcceptRule | Tensor = "ratio", raw: Tensor | None = None,
) -> Accepted:  # fmt: skip
    """Keep the longest valid prefix of the draft and add one token.

    Args:
        logits: float32 [slots, block + 1, vocab], after all warpers (temperature included).
        draft: What the drafter proposed; None = nothing (block 0).
        temperature: float32 [slots], 0 = greedy. None in a build without sampling: then neither softmax nor
            random numbers are computed, and ``seed``, ``length`` and ``rule`` are not read.
        seed: int64 [slots].
        length: int64 [slots], the committed tokens n.
        rule: "ratio", "coupled", or a bool tensor [slots] that is true where the slot is coupled.
        raw: the logits before warpers, [slots, block + 1, vocab]: their argmax is emitted where no
            distribution is left (methods.md L6).
    """
    slots, rows, _ = logits.shape
    tokens = draft.tokens if draft is not None else logits.new_zeros((slots, 0), dtype=torch.int64)
    if tokens.shape[1] != rows - 1:
        raise InvariantError(f"{tokens.shape[1]} drafts need {tokens.shape[1] + 1} target rows, not {rows}")
    if temperature is None:
        verdict = _exact(logits, tokens)
    else:
        if seed is None or length is None:
            raise InvariantError("sampling needs seed and length", where="accept")
        verdict = _sampled(logits, tokens, draft, temperature, seed, length, rule)

    there = (tokens >= 0).long().cumprod(1)
    kept = (verdict.match & verdict.sound[:, :-1] & (tokens >= 0)).long().cumprod(1)
    count, drafted = kept.sum(1), there.sum(1)
    last = verdict.choice.gather(1, count[:, None])[:, 0]
    if verdict.probs is not None and seed is not None and length is not None:
        weights = _residual(_row(verdict.probs, count), draft, count, drafted)
        drawn = inverse_cdf(weights, uniform(seed, length + count, Stream.FINAL))
        last = drawn if verdict.exact is None else torch.where(verdict.exact, last, drawn)
    sound = verdict.sound.gather(1, count[:, None])[:, 0] & (last >= 0)
    row = _row(logits if raw is None else raw, count)
    fallback = torch.where(row.isnan(), float("-inf"), row).argmax(1)
    last = torch.where(sound, last, fallback)

    index = torch.arange(rows, device=logits.device)
    padded = torch.cat([tokens, tokens.new_full((slots, 1), -1)], 1)
    emitted = torch.where(index == count[:, None], last[:, None], -1)
    emitted = torch.where(index < count[:, None], padded, emitted)
    return Accepted(count, emitted, drafted, ~sound)


def _row(rows: Tensor, index: Tensor) -> Tensor:
    """Return row ``index`` [slots] of each slot, [slots, vocab]."""
    return rows.gather(1, index[:, None, None].expand(-1, 1, rows.shape[2]))[:, 0]


def _exact(scores: Tensor, tokens: Tensor) -> _Verdict:
    """Judge by equality with the argmax of ``scores``; the lowest id of equals wins, as in `best_id`."""
    choice = scores.argmax(-1)
    sound = scores.gather(-1, choice[..., None])[..., 0].isfinite()
    return _Verdict(tokens == choice[:, :-1], choice, None, None, sound)


def _sampled(
    logits: Tensor, tokens: Tensor, draft: Draft | None, temperature: Tensor,
    seed: Tensor, length: Tensor, rule: AcceptRule | Tensor,
) -> _Verdict:  # fmt: skip
    position = length[:, None] + torch.arange(logits.shape[1], device=logits.device)
    greedy = temperature == 0
    exact = greedy if isinstance(rule, str) else greedy | rule
    if isinstance(rule, str) and rule == "coupled":
        return _exact(coupled_scores(logits, seed, position, ~greedy), tokens)
    scores = coupled_scores(logits, seed, position, ~greedy & rule) if isinstance(rule, Tensor) else logits
    equal = _exact(scores, tokens)
    probs = logits.softmax(-1)
    match, choice = equal.match, equal.choice
    if draft is not None and tokens.shape[1]:
        target = probs[:, :-1].gather(2, tokens.clamp(min=0)[..., None])[..., 0]
        coin = uniform(seed, position[:, :-1], Stream.COIN)
        bar = coin if draft.drawn is None else coin * draft.drawn.double()  # a point mass has q(x) = 1
        match = torch.where(exact[:, None], match, bar < target.double())
    sound = torch.where(exact[:, None], equal.sound, probs[..., 0].isfinite())  # a broken row is NaN all over
    return _Verdict(match, choice, exact, probs, sound)


def _residual(probs: Tensor, draft: Draft | None, count: Tensor, drafted: Tensor) -> Tensor:
    """Return the weights of each slot's own token, [slots, vocab]: the residual after a rejection, else p.

    ``probs`` is p of row ``count``. Where the drafts ran out (block's end, or an id of -1) nothing was
    rejected, so p stays whole.
    """
    if draft is None or not draft.tokens.shape[1]:
        return probs
    index = count.clamp(max=draft.tokens.shape[1] - 1)[:, None]
    rejected = count < drafted
    proposal = draft.proposal
    if proposal is None:
        left = probs.scatter(1, draft.tokens.gather(1, index).clamp(min=0), 0.0)
    else:
        width = proposal.probs.shape[2]
        pick = index[..., None].expand(-1, 1, width)
        q = proposal.probs.gather(1, pick)[:, 0]
        if proposal.ids is None:
            width = min(width, probs.shape[1])
            left = torch.cat([probs[:, :width] - q[:, :width], probs[:, width:]], 1)
        else:
            ids = proposal.ids.expand_as(q) if proposal.ids.dim() == 1 else proposal.ids.gather(1, pick)[:, 0]
            known = (ids >= 0) & (ids < probs.shape[1])
            left = probs.scatter_add(1, torch.where(known, ids, 0), torch.where(known, -q, 0.0))
        left = left.clamp(min=0.0)
    use = rejected & (left.sum(1, dtype=torch.float64) > _RESIDUAL_FLOOR)
    return torch.where(use[:, None], left, probs)
