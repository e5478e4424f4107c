"""The slow, obvious way to do what specc does in one graph: plain Python, one sequence, one token at a time.

Models are callables from the history (a list of ids) to logits [vocab] of the next token. Nothing here is
shared with specc, random numbers included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DRAFT, COIN, FINAL, NOISE = range(4)
Model = Callable[[list[int]], Tensor]
Drafter = Callable[[list[int]], "Tensor | int | None"]  # logits, a point mass, or no draft


def philox_block(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the block of Philox4x32-10 in Python integers."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        even, odd = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (odd >> 32) ^ b ^ first, odd % 2**32, (even >> 32) ^ d ^ second, even % 2**32
        first, second = (first + 0x9E3779B9) % 2**32, (second + 0xBB67AE85) % 2**32
    return a, b, c, d


def _word(seed: int, position: int, stream: int, index: int) -> int:
    counter = (position % 2**32, stream, index // 4, position >> 32)
    return philox_block(counter, (seed % 2**32, (seed >> 32) % 2**32))[index % 4]


def uniform(seed: int, position: int, stream: int) -> float:
    return (_word(seed, position, stream, 0) + 0.5) / 2**32


def gumbel(seed: int, position: int, token: int) -> float:
    small = (_word(seed, position, NOISE, token) + 0.5) / 2**32
    return -math.log(-math.log1p(-small))


def pick(weights: Sequence[float], coin: float) -> int:
    """Return the index where the running sum of weights passes coin times the total."""
    total, bar = 0.0, coin * math.fsum(weights)
    for index, weight in enumerate(weights):
        total += weight
        if weight > 0 and total > bar:
            return index
    return max(index for index, weight in enumerate(weights) if weight > 0)


def process(
    logits: Tensor, history: list[int], settings: Mapping[str, Any], *, prompt_length: int = 0,
    eos: Sequence[int] = (), max_length: int = 1 << 30, do_sample: bool = False,
) -> Tensor:  # fmt: skip
    """Return logits [vocab] after the settings of `generate`, in transformers' order."""
    scores = logits.float().clone()
    get = {name: value for name, value in settings.items() if value is not None}.get
    generated = history[prompt_length:]

    def ends_with(prefix: list[int]) -> bool:
        return len(prefix) <= len(history) and history[len(history) - len(prefix) :] == prefix

    biases = get("sequence_bias", {})
    for ids, amount in biases.items() if isinstance(biases, Mapping) else biases:
        if ends_with(list(ids)[:-1]):
            scores[ids[-1]] += amount
    for token, amount in get("logit_bias", {}).items():
        scores[token] += amount
    for token in set(history):
        penalty = get("repetition_penalty", 1.0)
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token in set(generated):
        scores[token] -= get("presence_penalty", 0.0)
    for token in set(generated):
        scores[token] -= get("frequency_penalty", 0.0) * generated.count(token)
    size = get("no_repeat_ngram_size", 0)
    for end in range(size - 1, len(history)) if size else ():
        if ends_with(history[end - size + 1 : end]):
            scores[history[end]] = -math.inf
    for ids in get("bad_words_ids", []):
        if ids and not (len(ids) == 1 and ids[0] in eos) and ends_with(ids[:-1]):
            scores[ids[-1]] = -math.inf
    if len(history) < get("min_length", 0) or len(generated) < get("min_new_tokens", 0):
        scores[list(eos)] = -math.inf
    forced = get("forced_eos_token_id", [])
    forced = [forced] if isinstance(forced, int) else list(forced)
    if forced and len(history) == max_length - 1:
        scores[:] = -math.inf
        scores[forced] = 0.0
    scores[[token for token in get("suppress_tokens", []) if token < len(scores)]] = -math.inf
    if not generated:
        scores[[token for token in get("begin_suppress_tokens", []) if token < len(scores)]] = -math.inf
    return _warp(scores, get) if do_sample and get("temperature", 1.0) > 0 else scores


def _warp(scores: Tensor, get: Callable[..., Any]) -> Tensor:
    scores = scores / get("temperature", 1.0)
    if get("top_k", 0):
        scores[scores < scores.sort(descending=True).values[min(get("top_k"), len(scores)) - 1]] = -math.inf
    if get("top_p", 1.0) < 1:
        ordered, ids = scores.sort(stable=True)
        removed = ordered.softmax(0).cumsum(0) <= 1 - get("top_p")
        removed[-1] = False
        scores[ids[removed]] = -math.inf
    probs = scores.softmax(0)
    scores[probs < get("min_p", 0.0) * probs.max()] = -math.inf
    if get("typical_p", 1.0) < 1:
        logs = scores.log_softmax(0)
        shift = (-logs + (logs * logs.exp()).nansum()).abs()
        ordered, ids = shift.sort(stable=True)
        short = int((scores[ids].softmax(0).cumsum(0) < get("typical_p")).sum())
        scores[shift > ordered[min(short, len(scores) - 1)]] = -math.inf
    for name in ("epsilon_cutoff", "eta_cutoff"):
        floor = get(name, 0.0)
        probs = scores.softmax(0)
        if name == "eta_cutoff":
            entropy = -(probs * probs.clamp(min=1e-45).log()).sum()
            floor = min(floor, math.sqrt(floor) * math.exp(-float(entropy)))
        scores[(probs < floor) & (scores < scores.max())] = -math.inf
    return scores


@dataclass
class Generation:
    """What a reference run produced."""

    tokens: list[int]  # new tokens only
    drafted: int = 0
    accepted: int = 0
    counts: list[int] = field(default_factory=list)  # accepted drafts per step


def generate(
    target: Model, prompt: Sequence[int], max_new_tokens: int, *, drafter: Drafter | None = None,
    block: int = 0, rule: str = "ratio", seed: int = 0, settings: Mapping[str, Any] | None = None,
    eos: Sequence[int] = (), do_sample: bool = False,
) -> Generation:  # fmt: skip
    """Generate with draft, verify, accept written out; block 0 is plain decoding.

    The random numbers are keyed as specc keys them, so tokens are equal, not only alike.
    """
    history, prompt_length, end = list(prompt), len(prompt), len(prompt) + max_new_tokens
    settings = dict(settings or {})
    heat = settings.get("temperature")
    temperature = 1.0 if heat is None else float(heat)
    hot = do_sample and temperature > 0
    result = Generation([])

    def scores(now: list[int]) -> Tensor:
        return process(target(now), now, settings, prompt_length=prompt_length, eos=eos, max_length=end,
                       do_sample=do_sample)  # fmt: skip

    def own(now: list[int], taken: Tensor | int | None = None) -> int:
        """Return the target's token; ``taken`` is q of a rejected draft."""
        logits, position = scores(now), len(now)
        if not hot:
            return int(logits.argmax())
        if rule == "coupled":
            return _coupled(logits, seed, position)
        probs = logits.softmax(0)
        if isinstance(taken, int):
            taken = torch.eye(len(probs))[taken]
        left = probs if taken is None else (probs - taken).clamp(min=0)
        return pick((left if left.sum() > 1e-8 else probs).tolist(), uniform(seed, position, FINAL))

    while len(result.tokens) < max_new_tokens and not (result.tokens and result.tokens[-1] in eos):
        drafts: list[tuple[int, Tensor | int]] = []
        for _ in range(block):
            guess = drafter(history + [token for token, _ in drafts]) if drafter else None
            if guess is None:
                break
            position = len(history) + len(drafts)
            if isinstance(guess, int):
                drafts.append((guess, guess))
            elif not hot:
                drafts.append((int(guess.argmax()), guess))
            elif rule == "coupled":
                drafts.append((_coupled(guess.float() / temperature, seed, position), guess))
            else:
                q = (guess.float() / temperature).softmax(0)
                drafts.append((pick(q.tolist(), uniform(seed, position, DRAFT)), q))
        emitted: list[int] = []
        for token, q in drafts:
            now = history + emitted
            if hot and rule == "ratio":
                share = 1.0 if isinstance(q, int) else float(q[token])
                kept = uniform(seed, len(now), COIN) * share < float(scores(now).softmax(0)[token])
            else:
                kept = own(now) == token
            if not kept:
                emitted.append(own(now, q))
                break
            emitted.append(token)
        else:
            emitted.append(own(history + emitted))
        result.drafted += len(drafts)
        result.counts.append(len(emitted) - 1)
        for token in emitted:
            if len(result.tokens) == max_new_tokens or (result.tokens and result.tokens[-1] in eos):
                break
            history.append(token)
            result.tokens.append(token)
    result.accepted = sum(result.counts)
    return result


def _coupled(logits: Tensor, seed: int, position: int) -> int:
    noisy = [score + gumbel(seed, position, token) for token, score in enumerate(logits.tolist())]
    return max(range(len(noisy)), key=noisy.__getitem__)
