"""Drawing draft tokens: what a method's `draw` does with its logits.

A draft token of a ratio slot comes from q = softmax(logits / temperature) by inverse CDF, and q is kept
for the ratio test. One of a coupled slot is argmax(log q + g) with the same Gumbel noise g that the
target uses at that position. One of a greedy slot (temperature 0) is the argmax. The draft is warped by
temperature only: any q is lossless as long as the draft was drawn from it (methods.md 1.5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specc.contracts import AcceptRule, Draft, Proposal
from specc.errors import InvariantError
from specc.sampling.rng import Stream, gumbel, gumbel_all, uniform

_CHUNK = 256  # about the square root of a vocabulary
_NO_ID = torch.iinfo(torch.int64).max


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the index where the running sum of ``weights`` passes ``uniform`` of the total.

    Args:
        weights: [slots, candidates], not negative, not necessarily normalised.
        uniform: float64 [slots] in (0, 1).

    Returns:
        int64 [slots]: an index of positive weight, or -1 where there is none.
    """
    count = weights.shape[-1]
    if count <= 2 * _CHUNK:
        double = weights.double()
        return _passed(double, uniform * double.sum(-1))
    # Two short running sums, over chunks and inside one, instead of a long one.
    chunks = torch.nn.functional.pad(weights, (0, -count % _CHUNK)).reshape(weights.shape[0], -1, _CHUNK)
    sums = chunks.sum(-1, dtype=torch.float64)
    bar = uniform * sums.sum(-1)
    chunk = _passed(sums, bar)
    safe = chunk.clamp(min=0)[:, None]
    before = (sums.cumsum(-1) - sums).gather(-1, safe)[:, 0]
    inside = _passed(chunks.gather(1, safe[..., None].expand(-1, 1, _CHUNK))[:, 0].double(), bar - before)
    return torch.where(chunk >= 0, safe[:, 0] * _CHUNK + inside, -1)


def _passed(weights: Tensor, bar: Tensor) -> Tensor:
    """Return the first index of positive weight whose running sum exceeds ``bar`` [slots].

    Rounding may leave the whole sum below the bar; then it is the last one of positive weight, or -1.
    """
    possible = weights > 0
    index = torch.arange(weights.shape[-1], device=weights.device)
    # A parallel running sum may rise where the weight is 0, hence the condition beside it.
    over = (weights.cumsum(-1) > bar[..., None]) & possible
    first = torch.where(over, index, weights.shape[-1]).amin(-1)
    return torch.minimum(first, torch.where(possible, index, -1).amax(-1))


def best_id(scores: Tensor, ids: Tensor | None) -> Tensor:
    """Return the target id of the highest score, the lowest one of equals, or -1 in a broken row."""
    if ids is None:
        index = scores.argmax(-1)
        value = scores.gather(-1, index[..., None])[..., 0]
        return torch.where(value > float("-inf"), index, -1)  # false for NaN, too
    value = scores.amax(-1)
    lowest = torch.where(scores == value[..., None], ids, _NO_ID).amin(-1)
    return torch.where(value > float("-inf"), lowest, -1)


class Drawer:
    """Implements `contracts.Draw` for one step: draws in order of index and remembers the distributions.

    Args:
        vocab: Number of target ids; candidates beyond it are never drawn.
        temperature: float32 [slots], 0 = greedy. None in a build without sampling, as are the next two.
        seed: int64 [slots].
        position: int64 [slots], the absolute position of draft 0, which is the length n.
        rule: How the draft will be judged; a bool tensor [slots] means coupled where true.
    """

    def __init__(
        self, vocab: int, temperature: Tensor | None = None, seed: Tensor | None = None,
        position: Tensor | None = None, rule: AcceptRule | Tensor = "ratio",
    ) -> None:  # fmt: skip
        self._vocab = vocab
        self._temperature, self._seed, self._position = temperature, seed, position
        self._rule = rule
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._drawn: list[Tensor] = []
        self._ids: list[Tensor | None] = []

    def __call__(self, logits: Tensor, index: int, ids: Tensor | None = None) -> Tensor:
        """Draw draft token ``index``; see `contracts.Draw`. A broken row returns id 0 and drafts nothing."""
        if index != len(self._tokens):
            raise InvariantError(f"draft tokens are drawn in order, {len(self._tokens)} next", index, "draw")
        scores = logits.float()
        if ids is None:
            scores = scores[:, : self._vocab]
        else:
            scores = scores.masked_fill((ids < 0) | (ids >= self._vocab), float("-inf"))
        token = best_id(scores, ids) if self._temperature is None else self._sample(scores, index, ids)
        self._tokens.append(token)
        return token.clamp(min=0)  # the method embeds it, so it must be an id

    def _sample(self, scores: Tensor, index: int, ids: Tensor | None) -> Tensor:
        temperature, seed, position = self._temperature, self._seed, self._position
        if temperature is None or seed is None or position is None:
            raise InvariantError("sampling needs temperature, seed and position", where="draw")
        at = position + index
        greedy = temperature == 0
        scaled = scores / torch.where(greedy, 1.0, temperature)[:, None]
        rule = self._rule
        if isinstance(rule, str) and rule == "coupled":
            return best_id(coupled_scores(scaled, seed, at, ~greedy, ids), ids)
        probs = scaled.softmax(-1)  # as `accept` takes p: equal logits give bit-equal p and q
        place = inverse_cdf(probs, uniform(seed, at, Stream.DRAFT))
        safe = place.clamp(min=0)[:, None]
        self._probs.append(probs)
        self._ids.append(ids)
        self._drawn.append(probs.gather(1, safe)[:, 0])
        drawn = place if ids is None else ids.expand_as(probs).gather(1, safe)[:, 0]
        drawn = torch.where(place >= 0, drawn, -1)
        if isinstance(rule, Tensor):
            exact = best_id(coupled_scores(scaled, seed, at, ~greedy & rule, ids), ids)
            return torch.where(greedy | rule, exact, drawn)
        return torch.where(greedy, best_id(scores, ids), drawn)

    def draft(self, confidence: Tensor | None = None, valid: Tensor | None = None) -> Draft:
        """Return the draft of all tokens drawn so far; nothing after the first missing one counts."""
        tokens = torch.stack(self._tokens, 1)
        there = tokens >= 0
        if valid is not None:
            there = there & valid
        tokens = torch.where(there.long().cumprod(1) > 0, tokens, -1)
        if not self._probs:
            return Draft(tokens, confidence=confidence)
        return Draft(
            tokens, Proposal(torch.stack(self._probs, 1), self._proposal_ids()), torch.stack(self._drawn, 1),
            confidence,
        )  # fmt: skip

    def _proposal_ids(self) -> Tensor | None:
        first = self._ids[0]
        if all(ids is first for ids in self._ids) and (first is None or first.dim() == 1):
            return first
        if any(ids is None for ids in self._ids):
            raise InvariantError(
                "all draft tokens of a block name their candidates or none does", where="draw"
            )
        shape = self._probs[0].shape
        return torch.stack([ids.expand(shape) for ids in self._ids if ids is not None], 1)


def coupled_scores(
    scaled: Tensor, seed: Tensor, position: Tensor, noisy: Tensor, ids: Tensor | None = None
) -> Tensor:
    """Return scores whose argmax is the coupled draw: log-probabilities up to a constant, plus noise.

    Args:
        scaled: [slots, ..., candidates], logits after temperature.
        seed: int64 [slots].
        position: int64 [slots, ...], of the token each row decides.
        noisy: bool [slots]; elsewhere no noise is added, which leaves the greedy choice.
        ids: target ids of the candidates; None = identity.
    """
    everyone = scaled.shape[-1]
    noise = gumbel_all(seed, position, everyone) if ids is None else gumbel(seed, position, ids.clamp(min=0))
    centred = scaled - scaled.amax(-1, keepdim=True)  # small numbers keep the noise's low bits
    noisy = noisy.reshape(noisy.shape + (1,) * (scaled.dim() - 1))
    return centred + torch.where(noisy, noise, 0.0)
