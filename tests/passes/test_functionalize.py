"""In-place operators on intermediate values are gone, and the values are the same."""

from __future__ import annotations

import pytest
import torch

from specc.errors import UnsupportedError
from specc.graph import StepGraph
from specc.ops import store
from specc.passes.functionalize import functionalize
from specc.pipeline import check_always
from tests.toy import f32, i64, run, targets, toy

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def writes(v):
    y = v["target.x"] * 2
    before = y + 1
    y.add_(1.0)
    y[:, 1:4] = before[:, :3]
    z = y.relu_()
    return {"out": y * 3, "z": z, "before": before}


def traced() -> StepGraph:
    return toy(writes, target__x=f32(4, 6))


def test_equals_reference():
    expected = writes({"target.x": X})
    found = run(functionalize.run(traced()), target__x=X)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_golden(golden):
    golden("functionalize", functionalize.run(traced()).render())


def test_rewrites():
    before, after = targets(traced()), targets(functionalize.run(traced()))
    assert {"aten.add_.Tensor", "aten.copy_.default", "aten.relu_.default"} <= set(before)
    assert not [name for name in after if name.split(".")[1].endswith("_")]
    assert after.count("aten.slice_scatter.default") == 1
    check_always(functionalize.run(traced()))


def test_leaves_declared_writes_alone():
    def function(v):
        store(v["state.length"], v["state.length"] + 1)
        return {"out": v["state.length"] * 2}

    graph = toy(function, state__length=i64(3))
    before = graph.render()
    assert functionalize.run(graph).render() == before
    assert graph.mutated() == ("state.length",)


def through_a_transpose(y):
    y.t().add_(1.0)
    return y


def seen_in_an_earlier_view(y):
    part = y.view(6, 4)
    y.add_(1.0)
    return part


def seen_in_a_view_of_a_view(y):
    part = y.view(6, 4)[1:]
    y.add_(1.0)
    return part


def part_of_a_part(y):
    y[0, 1:3] = 5.0
    return y


def part_of_what_a_view_shows(y):
    part = y.view(6, 4)
    y[:, 1:4] = 5.0
    return part


@pytest.mark.parametrize(
    "write",
    [through_a_transpose, seen_in_an_earlier_view, seen_in_a_view_of_a_view, part_of_a_part,
     part_of_what_a_view_shows],
)  # fmt: skip
def test_refuses_writes_that_a_view_would_show(write):
    with pytest.raises(UnsupportedError, match="writes through a view"):
        functionalize.run(toy(lambda v: {"out": write(v["target.x"] * 2) + 1}, target__x=f32(4, 6)))


def test_a_view_that_nobody_reads_any_more_is_no_obstacle():
    def function(v):
        y = v["target.x"] * 2
        shown = y.view(6, 4) + 1
        y.mul_(3.0)
        return {"out": y, "shown": shown}

    expected = function({"target.x": X})
    found = run(functionalize.run(toy(function, target__x=f32(4, 6))), target__x=X)
    assert torch.equal(found["out"], expected["out"])
    assert torch.equal(found["shown"], expected["shown"])
