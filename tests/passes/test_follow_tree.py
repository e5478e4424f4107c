"""With `follow_tree` a row sees up to ``last`` and its path's rows; without a tree it sees what it saw before."""

from __future__ import annotations

import pytest
import torch

from specc.graph import StepGraph
from specc.ops import attend
from specc.passes.follow_tree import follow_tree
from specc.passes.functionalize import functionalize
from specc.pipeline import run_passes
from specc.trace import RowsModel
from tests.rig import traced
from tests.toy import f32, i64, targets, toy

FEW = {"vocab_size": 16}


def test_equals_reference_without_a_tree():
    target = traced("gemma2", **FEW)
    rows = torch.arange(12)
    weights = {f"target.{name}": tensor for name, tensor in target.traced.weights.items()}

    def logits(passes):
        caches = {n: torch.zeros(s.shape, dtype=s.dtype) for n, s in target.traced.cache_specs(1, 14).items()}
        graph = run_passes(target.traced.graph.copy(), passes)[0]
        with torch.no_grad():
            return RowsModel(graph, weights, caches)(rows + 3, rows * 0, rows, rows)["logits"]

    torch.testing.assert_close(
        logits((functionalize, follow_tree)), logits((functionalize,)), rtol=1e-5, atol=1e-6
    )


def small() -> StepGraph:
    """Return a rows graph of one layer that attends, through a window and with sinks."""

    def function(v):
        heads = torch.nn.functional.linear(v["target.embed"][v["token"]], v["target.up"]).view(5, 2, 4)
        first = (v["position"] - 3).clamp(min=0)
        out = attend(
            heads, heads[:, :1], heads[:, :1], v["cache.key.0"], v["cache.value.0"], v["slot"], v["cache_row"],
            first, v["cache_row"], 0.5, None, v["target.sinks"],
        )  # fmt: skip
        return {"logits": out.flatten(1)}

    rows = {name: i64(5) for name in ("token", "slot", "position", "cache_row")}
    caches = {"cache__key__0": f32(2, 1, 9, 4), "cache__value__0": f32(2, 1, 9, 4)}
    return toy(
        function, **rows, **caches, target__embed=f32(9, 4), target__up=f32(8, 4), target__sinks=f32(2)
    )


def test_golden(golden):
    golden("follow_tree", follow_tree.run(small()).render())


@pytest.mark.parametrize("arch", ["llama", "gpt_oss", "gemma2"])
def test_rewrites_every_attention(arch):
    before = run_passes(traced(arch, **FEW).traced.graph.copy(), (functionalize,))[0]
    count = targets(before).count("specc.attend.default")
    after = follow_tree.run(before)
    last, path = after.placeholder("last"), after.placeholder("path")
    attends = [n for n in after.graph.nodes if str(n.target) == "specc.attend.default"]
    assert len(attends) == count > 0
    for node in attends:
        assert node.args[8] is last
        assert node.args[12] is path
