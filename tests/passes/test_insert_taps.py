"""Taps are transformers' hidden states, layer by layer, before the final norm; the logits do not change by a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specc.errors import InvariantError
from specc.graph import StepGraph
from specc.passes.functionalize import functionalize
from specc.passes.insert_taps import insert_taps
from specc.pipeline import run_passes
from specc.trace import RowsModel
from tests.rig import loaded, traced
from tests.tiny import ARCHS
from tests.toy import f32, i64, toy

SAME = 2e-5  # transformers' attention sums in another order
FEW = {"vocab_size": 16}  # the overrides of test_matrix.py, whose traces are used again
IDS = torch.tensor([3, 9, 4, 9, 5, 12, 7, 3, 3, 14, 8])


def states(arch: str) -> tuple[list[Tensor], Any]:
    """Return what enters layer 0 and what each layer returns, [rows, hidden], and transformers' own output."""
    target = traced(arch, **FEW)
    seen: list[Tensor] = []
    layers = [target.module.get_submodule(path) for path in target.layer_paths]
    hooks = [
        layers[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0][0]), with_kwargs=True)
    ]
    for layer in layers:
        hooks.append(  # noqa: PERF401  one hook a line, as the one before
            layer.register_forward_hook(
                lambda _, __, out: seen.append((out[0] if isinstance(out, tuple) else out)[0])
            )
        )
    try:
        with torch.no_grad():
            out = target.module(input_ids=IDS[None], use_cache=False, output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    return seen, out


def run_rows(arch: str, graph: StepGraph) -> dict[str, Tensor]:
    """Run IDS as one sequence; the rows are in an order of their own."""
    target = traced(arch, **FEW)
    count = len(IDS)
    specs = target.traced.cache_specs(1, count)
    caches = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    weights = {f"target.{name}": tensor for name, tensor in target.traced.weights.items()}
    position = torch.arange(count)
    with torch.no_grad():
        return RowsModel(graph, weights, caches)(IDS, torch.zeros_like(IDS), position, position)


def tapped(arch: str, taps: tuple[int, ...]) -> StepGraph:
    target = traced(arch, **FEW)
    passes = (functionalize, insert_taps(taps, target.layer_paths, target.info.hidden))
    return run_passes(target.traced.graph.copy(), passes)[0]


@pytest.mark.parametrize("arch", ARCHS)
def test_equals_transformers(arch):
    expected, own = states(arch)
    layers = loaded(arch, **FEW).info.layers
    assert len(expected) == layers + 1
    out = run_rows(arch, tapped(arch, tuple(range(layers + 1))))
    found = out["taps"].unflatten(-1, (layers + 1, -1)).unbind(1)
    for j, (tap, state) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(
            tap, state, atol=SAME, rtol=SAME, msg=lambda m, j=j: f"after {j} layers: {m}"
        )
        if j < layers:
            torch.testing.assert_close(tap, own.hidden_states[j][0], atol=SAME, rtol=SAME)
    assert not torch.allclose(found[-1], own.hidden_states[-1][0], atol=1e-2), "the final norm was applied"
    assert torch.equal(out["logits"], run_rows(arch, tapped(arch, ()))["logits"])


def test_the_order_is_the_order_given():
    forward, backward = (run_rows("llama", tapped("llama", taps))["taps"] for taps in ((0, 2, 3), (3, 0, 2)))
    a, b, c = forward.chunk(3, -1)
    assert torch.equal(backward, torch.cat([c, a, b], -1))


def test_golden(golden):
    def function(v):
        stream = v["target.embed"][v["token"]][None]
        for _ in range(2):
            stream = stream + torch.nn.functional.linear(stream, v["target.up"]).relu()
        return {"logits": torch.nn.functional.linear(stream, v["target.embed"])[0]}

    graph = toy(function, token=i64(5), target__embed=f32(9, 4), target__up=f32(4, 4))
    layers = [n for n in graph.call_nodes() if str(n.target) in ("aten.linear.default", "aten.add.Tensor")]
    for index, node in enumerate(layers[:4]):
        node.meta["nn_module_stack"] = {"": (f"model.layers.{index // 2}", None)}
    paths = ("layers.0", "layers.1")
    golden("insert_taps", insert_taps((2, 0, 1), paths, 4).run(graph).render())


def test_rewrites():
    before, after = tapped("llama", ()), tapped("llama", (1, 2, 3))
    new = after.call_nodes()[len(before.call_nodes()) :]
    assert [str(node.target) for node in new] == ["aten.select.int"] * 3 + ["aten.cat.default"]
    assert after.outputs == ("logits", "taps")
    assert after.facts >= {"taps"}


def test_leaves_graphs_alone_when_nothing_is_tapped():
    graph = traced("llama", **FEW).traced.graph
    before = graph.render()
    assert insert_taps((), (), 32).run(graph.copy()).render() == before
    assert insert_taps((), (), 32).gives == frozenset()
    tapped("llama", (1,))
    assert graph.render() == before, "the shared trace was changed"


def test_refuses_layers_that_are_not_there():
    target = traced("llama", **FEW)
    for taps, paths, said in (
        ((4,), target.layer_paths, "needs 4 layers; there are 3"),
        ((-1,), target.layer_paths, "after -1 layers"),
        ((1,), ("model.stages.0",), "no value of the residual stream"),
        ((0,), ("model.stages.0",), "reads no residual stream"),
    ):
        with pytest.raises(InvariantError, match=said):
            run_passes(target.traced.graph.copy(), (insert_taps(taps, paths, target.info.hidden),))
