"""The head runs on the wanted rows alone, and their logits are the ones it gave before."""

from __future__ import annotations

import pytest
import torch

from specc.errors import InvariantError
from specc.graph import StepGraph
from specc.passes.functionalize import functionalize
from specc.passes.slice_logits import slice_logits
from specc.pipeline import run_passes
from specc.trace import RowsModel
from tests.rig import traced
from tests.toy import f32, i64, run, targets, toy

FEW = {"vocab_size": 16}


def small(cap: float | None = 3.0) -> StepGraph:
    """Return a rows graph of one layer with a capped head."""

    def function(v):
        stream = v["target.embed"][v["token"]][None]
        stream = torch.nn.functional.linear(stream, v["target.up"]).relu()
        logits = torch.nn.functional.linear(stream, v["target.head"])
        return {"logits": (logits / cap).tanh()[0] if cap else stream[0]}

    return toy(function, token=i64(5), target__embed=f32(9, 4), target__up=f32(4, 4), target__head=f32(9, 4))


@pytest.mark.parametrize("arch", ["llama", "gemma2", "granite", "gpt2", "gpt_neox", "gpt_oss"])
def test_equals_reference(arch):
    target = traced(arch, **FEW)
    rows = torch.arange(7)
    tensors = {f"target.{name}": tensor for name, tensor in target.traced.weights.items()}
    wanted = torch.tensor([6, 2])

    def logits(passes, **more):
        caches = {n: torch.zeros(s.shape, dtype=s.dtype) for n, s in target.traced.cache_specs(1, 8).items()}
        graph = run_passes(target.traced.graph.copy(), passes)[0]
        with torch.no_grad():
            return RowsModel(graph, tensors, caches)(rows + 3, rows * 0, rows, rows, **more)["logits"]

    sliced = logits((functionalize, slice_logits), logit_rows=wanted)
    torch.testing.assert_close(sliced, logits((functionalize,))[wanted], atol=1e-6, rtol=1e-5)


def test_golden(golden):
    golden("slice_logits", slice_logits.run(small()).render())


def test_rewrites():
    before, after = small(), slice_logits.run(small())
    assert targets(after).count("aten.index_select.default") == 1
    names = targets(after)
    assert (
        names.index("aten.index_select.default")
        == len(names) - 1 - names[::-1].index("aten.linear.default") - 1
    )
    assert [i.name for i in after.inputs] == [*(i.name for i in before.inputs), "logit_rows"]
    values = {"token": torch.tensor([1, 2, 3, 4, 5])}
    generator = torch.Generator().manual_seed(0)
    for name, shape in (("embed", (9, 4)), ("up", (4, 4)), ("head", (9, 4))):
        values[f"target__{name}"] = torch.randn(shape, generator=generator)
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(run(after, **values, logit_rows=rows)["logits"], run(before, **values)["logits"][rows])


def test_leaves_other_layers_alone():
    after = slice_logits.run(small())
    first, head = (n for n in after.call_nodes() if str(n.target) == "aten.linear.default")
    assert first.meta["val"].shape[1] == 5
    assert head.meta["val"].shape[1] == 3


def test_refuses_logits_without_a_head():
    def function(v):
        return {"logits": v["target.embed"][v["token"]]}

    with pytest.raises(InvariantError, match="linear head"):
        slice_logits.run(toy(function, token=i64(5), target__embed=f32(9, 4)))
