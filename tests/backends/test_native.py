"""The native backend gives the reference's tokens, with the device's kernels in the graph."""

from __future__ import annotations

import torch

import specc
from specc.backends.lowering import with_kernels
from specc.step import StepKey
from tests.tiny import tiny_model


def test_equals_eager_and_uses_the_kernels():
    model = tiny_model("gpt_oss")
    ids = torch.tensor([[5, 9, 33, 7, 12, 4, 9, 33], [0, 0, 8, 6, 7, 5, 30, 9]])
    mask = torch.tensor([[1] * 8, [0] * 2 + [1] * 6])
    built = [
        specc.compile(model, method="ngram", block=3, backend=name, batch=2, max_length=48)
        for name in ("eager", "native")
    ]
    eager, native = (
        c.generate(ids, mask, max_new_tokens=24, do_sample=False, eos_token_id=None) for c in built
    )
    assert torch.equal(eager, native)
    step = built[1].engine.builder.step(StepKey(3, 0, "ratio")).graph
    before = step.render()
    assert "specc.attend_cpu" in with_kernels(step).render()
    assert step.render() == before, "the portable graph is left as it was"
