"""Counter-based random numbers: Philox4x32-10 in int64 tensor operations.

A number depends on (seed, position, stream) and nothing else, so it is the same in any batch, at any
block length, in eager mode, under Inductor and on a GPU: every integer here stays non-negative and
below 2**50, so no operation relies on how a signed overflow behaves.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 4  # words per block
_WORD = 2.0**-32

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Stream(IntEnum):
    """Which use a number is for. Numbers of different streams are independent (methods.md 1.11)."""

    DRAFT = 0  # the draft token at a position
    COIN = 1  # whether the draft at a position is accepted
    FINAL = 2  # the token the target adds: residual, bonus or plain
    NOISE = 3  # Gumbel noise over the vocabulary, shared by drafter and target under coupling


def _multiply(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a 32 x 32 bit product, by 16-bit halves of the factor."""
    low = value * (factor & 0xFFFF)
    high = value * (factor >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _MASK


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return the four 32-bit words of the block ``counter`` under ``key``; all int64 in [0, 2**32)."""
    zero, one, two, three = counter
    first, second = key
    for turn in range(_ROUNDS):
        if turn:
            first = (first + _KEY_STEPS[0]) & _MASK
            second = (second + _KEY_STEPS[1]) & _MASK
        high_zero, low_zero = _multiply(zero, _MULTIPLIERS[0])
        high_two, low_two = _multiply(two, _MULTIPLIERS[1])
        zero, one, two, three = high_two ^ one ^ first, low_two, high_zero ^ three ^ second, low_zero
    return zero, one, two, three


def _words(seed: Tensor, position: Tensor, stream: Stream, block: Tensor) -> Words:
    """Return the words of ``block`` for (seed, position, stream); the tensors broadcast."""
    counter = (
        position & _MASK, torch.full_like(position, int(stream)), block, (position >> 32) & _MASK,
    )  # fmt: skip
    return philox(counter, (seed & _MASK, (seed >> 32) & _MASK))


def _align(seed: Tensor, position: Tensor) -> Tensor:
    """Give ``seed`` [slots] as many dimensions as ``position`` [slots, ...]."""
    return seed.reshape(seed.shape + (1,) * (position.dim() - seed.dim()))


def uniform(seed: Tensor, position: Tensor, stream: Stream) -> Tensor:
    """Return one float64 in (0, 1) per position: a 32-bit word plus one half, so never 0 and never 1.

    Args:
        seed: int64 [slots], all 64 bits count.
        position: int64 [slots, ...], the absolute position of the token that the number decides.
        stream: what the number is for.
    """
    word = _words(_align(seed, position), position, stream, torch.zeros_like(position))[0]
    return (word.double() + 0.5) * _WORD


def _to_gumbel(word: Tensor) -> Tensor:
    """Turn 32-bit words into float32 Gumbel noise.

    The largest noise decides an argmax, and it comes from uniforms near 0 here, where float32 still
    resolves every word; near 1 it does not, and the clamp keeps log1p finite there.
    """
    small = ((word.float() + 0.5) * _WORD).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-small))


def gumbel(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Return float32 Gumbel noise of the target ids ``ids``, keyed by (seed, position, id).

    Args:
        seed: int64 [slots].
        position: int64 [slots, ...].
        ids: int64, non-negative, broadcastable to [slots, ..., candidates].
    """
    lane = ids % _LANES
    where = position[..., None]
    zero, one, two, three = _words(_align(seed, where), where, Stream.NOISE, ids // _LANES)
    word = torch.where(lane < 2, torch.where(lane == 0, zero, one), torch.where(lane == 2, two, three))
    return _to_gumbel(word)


def gumbel_all(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Return `gumbel` of all ids below ``vocab``, [slots, ..., vocab], from vocab / 4 blocks per position."""
    block = torch.arange((vocab + _LANES - 1) // _LANES, device=position.device)
    where = position[..., None]
    words = _words(_align(seed, where), where, Stream.NOISE, block)
    return _to_gumbel(torch.stack(words, -1).flatten(-2)[..., :vocab])
