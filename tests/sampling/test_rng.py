"""The random numbers: published answers, independence of streams, one noise in all its forms."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from specc.sampling.rng import Stream, gumbel, gumbel_all, philox, uniform
from tests import reference

# Known answers of Random123's philox4x32-10: counter, key, result.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = torch.tensor([0, 7, -1, -(2**63), 2**63 - 1, 2**40 + 3])


def _words(values: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_answers(counter, key, expected):
    assert tuple(int(word) for word in philox(_words(counter), _words(key))) == expected
    assert reference.philox_block(counter, key) == expected


def test_equals_integer_arithmetic():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 2**32, (200, 6), generator=generator)
    got = torch.stack(philox(tuple(numbers[:, :4].T), tuple(numbers[:, 4:].T)), 1)
    assert got.tolist() == [list(reference.philox_block(row[:4], row[4:])) for row in numbers.tolist()]


def test_uniform_is_keyed_by_seed_position_and_stream():
    position = torch.tensor([[0, 1, 5]]).expand(len(SEEDS), -1)
    for stream in Stream:
        got = uniform(SEEDS, position, stream)
        assert got.dtype == torch.float64
        assert got.tolist() == [
            [reference.uniform(seed, p, stream) for p in (0, 1, 5)] for seed in SEEDS.tolist()
        ]
    assert len({float(uniform(SEEDS, position[:, 0], stream)[1]) for stream in Stream}) == len(Stream)


def test_high_half_of_the_seed_counts():
    position = torch.zeros(2, dtype=torch.int64)
    low, high = uniform(torch.tensor([3, 3 + 2**32]), position, Stream.COIN).tolist()
    assert low != high


def test_streams_are_uniform_and_independent():
    draws = 20_000
    seeds = torch.arange(draws)
    columns = {stream: uniform(seeds, torch.full_like(seeds, 9), stream) for stream in Stream}
    columns["next"] = uniform(seeds, torch.full_like(seeds, 10), Stream.DRAFT)
    limit = 1e-4 / 16  # Bonferroni over all tests below
    bins = {name: (column * 8).long() for name, column in columns.items()}
    names = list(bins)
    for index, name in enumerate(names):
        assert 0 < columns[name].min() < columns[name].max() < 1
        assert stats.chisquare(torch.bincount(bins[name], minlength=8)).pvalue > limit
        for other in names[:index]:
            table = torch.bincount(bins[name] * 8 + bins[other], minlength=64).view(8, 8)
            assert stats.chi2_contingency(table.numpy()).pvalue > limit


@pytest.mark.parametrize("vocab", [1, 3, 4, 130])
def test_sparse_noise_equals_dense(vocab):
    position = torch.arange(12).view(len(SEEDS), 2)
    dense = gumbel_all(SEEDS, position, vocab)
    assert dense.shape == (len(SEEDS), 2, vocab)
    assert torch.equal(gumbel(SEEDS, position, torch.arange(vocab)), dense)
    ids = torch.randint(0, vocab, (len(SEEDS), 2, 7), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel(SEEDS, position, ids), dense.gather(2, ids))
    for slot, token in ((0, 0), (3, vocab - 1)):
        expected = reference.gumbel(int(SEEDS[slot]), int(position[slot, 1]), token)
        assert float(dense[slot, 1, token]) == pytest.approx(expected, rel=1e-5)


def test_noise_is_gumbel():
    noise = gumbel_all(torch.tensor([11]), torch.tensor([[4]]), 50_000)[0, 0]
    assert noise.isfinite().all()
    assert stats.kstest(noise.double().numpy(), "gumbel_r").pvalue > 1e-4


def test_tails_are_finite():
    from specc.sampling.rng import _to_gumbel

    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    noise = _to_gumbel(words)
    assert noise.isfinite().all()
    assert float(noise[0]) == pytest.approx(22.87, abs=0.01)  # 2**-33 is the rarest winner
    assert float(noise[0]) > float(noise[1])


@pytest.mark.slow
def test_inductor_gives_the_same_bits():
    def step(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.zeros_like(position)
        words = philox((position, zero + 1, zero + 2, zero), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
        return torch.stack(words), uniform(seed, position, Stream.COIN)

    position = torch.arange(len(SEEDS)) * 1_000_003
    words, uniforms = torch.compile(step, fullgraph=True)(SEEDS, position)
    expected, plain = step(SEEDS, position)
    assert torch.equal(words, expected)
    assert torch.equal(uniforms, plain)
