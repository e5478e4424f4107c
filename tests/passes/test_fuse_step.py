"""The stages become one graph that gives what they give one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.errors import InvariantError
from specc.graph import StepGraph
from specc.ops import store
from specc.passes.fuse_step import fuse_step
from specc.pipeline import run_passes
from specc.step import StepKey
from specc.stitch import stitch
from specc.trace import Tracer
from tests.toy import CPU, f32, i64, run, targets, toy


def stages() -> list[StepGraph]:
    tracer, kinds = Tracer(CPU), {"draft.tokens": "value", "verify.logits": "value", "accept.count": "value"}
    common: dict[str, Any] = {"tracer": tracer, "kinds": kinds}
    return [
        toy(lambda v: {"draft.tokens": v["state.length"] * 2, "draft.unused": v["state.length"] - 1},
            stage="draft", state__length=i64(3), **common),
        toy(lambda v: {"verify.logits": v["draft.tokens"][:, None] * v["target.weight"]},
            stage="verify", draft__tokens=i64(3), target__weight=f32(1, 4), **common),
        toy(lambda v: {"accept.count": v["verify.logits"].argmax(1), "record": v["verify.logits"].argmax(1) + 7},
            stage="accept", verify__logits=f32(3, 4), **common),
        toy(lambda v: store(v["state.length"], v["state.length"] + v["accept.count"]) or {},
            stage="commit", state__length=i64(3), accept__count=i64(3), **common),
    ]  # fmt: skip


def stitched() -> StepGraph:
    return stitch(stages(), StepKey(1, 0, "ratio"))


def test_equals_reference():
    length, weight = torch.tensor([3, -2, 5]), torch.tensor([[0.5, 2.0, -3.0, 1.0]])
    best = (length[:, None] * 2 * weight).argmax(1)
    expected = length + best
    found = run(fuse_step.run(stitched()), state__length=length, target__weight=weight)
    assert torch.equal(found["record"], best + 7)
    assert torch.equal(length, expected), "the commit did not write the state"


def test_golden(golden):
    golden("fuse_step", fuse_step.run(stitched()).render())


def test_rewrites():
    before, after = stitched(), fuse_step.run(stitched())
    assert [n.target for n in before.graph.find_nodes(op="call_module")] == [
        "draft",
        "verify",
        "accept",
        "commit",
    ]
    assert not after.graph.find_nodes(op="call_module")
    assert "getitem" not in str(targets(after))
    order = [node.meta["stage"] for node in after.call_nodes()]
    assert order == sorted(order, key=("draft", "verify", "accept", "commit").index)
    assert set(order) == {"draft", "verify", "accept", "commit"}
    assert "aten.sub.Tensor" not in targets(after), "a value that nothing reads is still made"


def test_leaves_the_stages_alone():
    made = stages()
    before = [stage.render() for stage in made]
    run_passes(stitch(made, StepKey(1, 0, "ratio")), (fuse_step,))
    assert [stage.render() for stage in made] == before


def test_nothing_to_fuse_is_a_fault():
    with pytest.raises(InvariantError, match="found nothing"):
        run_passes(stages()[0], (fuse_step,))
