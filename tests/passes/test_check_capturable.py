"""A step that would wait for the device, or whose shapes depend on data, is refused; others pass unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specc.contracts import Pass
from specc.errors import InvariantError
from specc.graph import StepGraph
from specc.passes.check_capturable import check_capturable
from specc.pipeline import run_passes
from tests.toy import f32, i64, run, toy

aten = torch.ops.aten


def step() -> StepGraph:
    graph = toy(
        lambda v: {"out": v["target.x"][v["state.index"]] * 2}, target__x=f32(4, 6), state__index=i64(3)
    )
    return replace(graph, facts=frozenset({"one-graph"}))


def with_call(graph: StepGraph, target, *make) -> StepGraph:
    """Append a call whose arguments are made from the graph's output."""
    end = graph.output_node()
    with graph.graph.inserting_before(end):
        node = graph.graph.call_function(target, tuple(m(end.args[0][0]) if callable(m) else m for m in make))
    node.meta = {"stage": "verify", "val": None}
    end.args = ([*end.args[0], node],)
    return replace(graph, outputs=(*graph.outputs, "more"))


def itself(node):
    return node


def test_equals_reference():
    x, index = torch.randn(4, 6), torch.tensor([2, 0, 2])
    graph, _ = run_passes(step(), (check_capturable,))
    assert torch.equal(run(graph, target__x=x, state__index=index)["out"], x[index] * 2)


def test_golden(golden):
    golden("check_capturable", run_passes(step(), (check_capturable,))[0].render())


@pytest.mark.parametrize(
    "target",
    [aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default,
     aten._unique2.default, aten.is_nonzero.default, aten.equal.default],
)  # fmt: skip
def test_refuses_waits(target):
    with pytest.raises(InvariantError, match="must not wait") as caught:
        run_passes(with_call(step(), target, itself), (check_capturable,))
    assert str(target).split(".")[1] in caught.value.node
    assert "in pass check_capturable (after nothing)" in caught.value.__notes__


def test_refuses_boolean_indexing():
    graph = toy(lambda v: {"out": v["target.x"] > 0}, target__x=f32(4))
    graph = replace(graph, facts=frozenset({"one-graph"}))
    with pytest.raises(InvariantError, match="must not wait"):
        run_passes(with_call(graph, aten.index.Tensor, itself, lambda n: [n]), (check_capturable,))


def test_refuses_shapes_that_depend_on_data():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph = step()
    node = graph.call_nodes()[-1]
    size = ShapeEnv().create_unbacked_symint()
    with torch._subclasses.FakeTensorMode(shape_env=size.node.shape_env):
        node.meta["val"] = torch.empty(4).new_empty(size)
    with pytest.raises(InvariantError, match="shapes are static"):
        run_passes(graph, (check_capturable,))


def test_leaves_other_indexing_alone():
    before = step().render()
    after, _ = run_passes(step(), (check_capturable,))
    assert after.render() == before
    assert "aten.index.Tensor" in before


def test_a_later_pass_is_checked_again():
    late = Pass("late", lambda graph: with_call(graph, aten.nonzero.default, itself))
    with pytest.raises(InvariantError, match="must not wait") as caught:
        run_passes(step(), (check_capturable, late))
    assert "in pass late (after check_capturable)" in caught.value.__notes__
