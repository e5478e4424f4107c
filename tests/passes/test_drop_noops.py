"""What returns its input is gone, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import torch

from specc.graph import StepGraph
from specc.passes.drop_noops import drop_noops
from tests.toy import f32, run, targets, toy

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(2))


def noops(v):
    y = v["target.x"] * 2
    a = y.to(torch.float32).view(2, 6)[:, 0:].contiguous()
    b = a.expand(2, 6).reshape(2, 6)
    return {"out": torch.dropout(b, 0.5, False) + 1}


def no_noops(v):
    y = v["target.x"] * 2
    return {
        "cast": y.to(torch.float64) + 1, "view": y.view(3, 4) + 1, "slice": y[:, 1:] + 1, "stride": y[:, ::2] + 1,
        "moved": y.t().contiguous() + 1, "expand": y[:, :1].expand(2, 3) + 1,
        "input": v["target.x"].view(2, 6),  # an output must not become an input itself
    }  # fmt: skip


def fused(function) -> StepGraph:
    return replace(toy(function, target__x=f32(2, 6)), facts=frozenset({"one-graph"}))


def test_equals_reference():
    for function in (noops, no_noops):
        found = run(drop_noops.run(fused(function)), target__x=X)
        for name, value in function({"target.x": X}).items():
            assert torch.equal(found[name], value), name


def test_golden(golden):
    golden("drop_noops", drop_noops.run(fused(noops)).render())


def test_rewrites():
    assert len(targets(fused(noops))) >= 7
    assert targets(drop_noops.run(fused(noops))) == ["aten.mul.Tensor", "aten.add.Tensor"]


def test_leaves_what_changes_a_value_alone():
    before = fused(no_noops).render()
    assert drop_noops.run(fused(no_noops)).render() == before
