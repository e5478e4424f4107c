"""The CPU kernel of attend against the reference operator."""

from __future__ import annotations

import pytest
import torch

from specc.backends.kernels.attend_cpu import attend_cpu
from specc.ops import attend

FP32_SUMS = 2e-6  # another order of additions
BF16_STEP = 1.6e-2  # two steps of bfloat16 at the size of these outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equals_reference(dtype, softcap, with_sinks):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    slots, heads, kv_heads, size, value_size, cache = 3, 6, 2, 20, 12, 40
    keys, values = random(slots, kv_heads, cache, size), random(slots, kv_heads, cache, value_size)
    keys[:, :, 30:], values[:, :, 30:] = float("nan"), float("nan")  # nobody may read these
    slot = torch.tensor([0, 0, 0, 2, 2, 1, 0])
    row = torch.tensor([20, 21, 22, 9, 10, 0, cache - 1])
    first, last = torch.tensor([0, 3, 5, 0, 10, 0, 0]), torch.tensor([20, 22, 22, 9, 10, 0, cache - 1])
    query, key, value = random(7, heads, size), random(7, kv_heads, size), random(7, kv_heads, value_size)
    sinks = random(heads) if with_sinks else None
    caches = [(keys.clone(), values.clone()) for _ in range(2)]
    want = attend(query, key, value, *caches[0], slot, row, first, last, 0.2, softcap, sinks)
    got = attend_cpu(query, key, value, *caches[1], slot, row, first, last, 0.2, softcap, sinks)
    torch.testing.assert_close(got, want, atol=FP32_SUMS if dtype is torch.float32 else BF16_STEP, rtol=0)
    assert not got[-1].any(), "a garbage row attends to nothing"
    for a, b in zip(caches[0], caches[1], strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_denormals_survive_loading_the_kernel():
    """A library linked with -ffast-math would flush them in the whole process."""
    attend(*_one_row())
    attend_cpu(*_one_row())
    assert (torch.tensor([1e-40]) * 1.0).item() > 0.0


def _one_row():
    zero = torch.zeros(1, dtype=torch.int64)
    return (
        torch.ones(1, 1, 8),
        torch.ones(1, 1, 8),
        torch.ones(1, 1, 8),
        torch.zeros(1, 1, 2, 8),
        torch.zeros(1, 1, 2, 8),
        zero,
        zero,
        zero,
        zero,
        1.0,
    )
