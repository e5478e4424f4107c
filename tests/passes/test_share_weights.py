"""A storage is read through one input, and others are left alone."""

from __future__ import annotations

import torch

from specc.api import compile
from specc.graph import StepGraph
from specc.passes.share_weights import share_weights
from specc.pipeline import run_passes, weight_bytes
from specc.step import StepKey
from tests.tiny import tiny_model
from tests.toy import f32, i64, run, toy

STORAGE = {"target.embed": "target.embed", "target.head": "target.embed", "target.up": "target.up"}


def traced() -> StepGraph:
    def function(v):
        hidden = v["target.embed"][v["state.token"]] @ v["target.up"]
        return {"logits": hidden @ v["target.head"].t()}

    inputs = {"target__embed": f32(9, 4), "target__up": f32(4, 4), "target__head": f32(9, 4)}
    return toy(function, storage=STORAGE, state__token=i64(5), **inputs)


def test_equals_reference():
    embed, up = torch.randn(9, 4), torch.randn(4, 4)
    token = torch.tensor([8, 1, 1, 3, 0])
    values = {"state__token": token, "target__embed": embed, "target__up": up, "target__head": embed}
    expected = run(traced(), **values)["logits"]
    del values["target__head"]
    assert torch.equal(run(share_weights.run(traced()), **values)["logits"], expected)


def test_golden(golden):
    golden("share_weights", share_weights.run(traced()).render())


def test_rewrites():
    before, after = traced(), share_weights.run(traced())
    assert [i.name for i in after.inputs] == [i.name for i in before.inputs if i.name != "target.head"]
    assert weight_bytes(before) - weight_bytes(after) == 9 * 4 * 4
    assert run_passes(traced(), (share_weights,))[0].facts == {"shared-weights"}


def test_leaves_weights_of_their_own_alone():
    graph = traced()
    for node in graph.graph.find_nodes(op="placeholder"):
        given = node.meta["input"]
        node.meta["input"] = type(given)(
            given.name, given.kind, "" if given.name == "target.head" else given.storage
        )
    before = graph.sync().render()
    assert share_weights.run(graph).render() == before


def test_a_tied_head_and_a_self_drafting_target_are_held_once():
    model = tiny_model("llama", tie_word_embeddings=True)
    compiled = compile(model, model, method="draft_model", block=2, max_length=32, backend="eager")
    graph = compiled.engine.builder.step(StepKey(2, 0, "ratio")).graph
    held = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in model.parameters()}
    assert weight_bytes(graph) - sum(held.values()) < 64 * 4, "only rotary frequencies may be added"
    assert len([i for i in graph.inputs if i.name.endswith(("embed_tokens.weight", "lm_head.weight"))]) == 1
