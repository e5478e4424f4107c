"""Graphs as JSON: the same graph comes back, and a document that says anything else is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specc.artifact.fields import Fields, write_json
from specc.artifact.graphs import StoredGraph, read_graph, write_graph
from specc.artifact.operators import ATEN, SPECC, find
from specc.contracts import STAGES, TensorSpec
from specc.errors import ArtifactError, UnsupportedError
from specc.graph import Input, StepGraph
from specc.step import StepKey
from tests.toy import CPU, f32, i64, run, toy
from tests.toy_source import FEED, ToySource

PATH = Path("x.specc")
SPECS = {
    "target.w": TensorSpec((4, 4)),
    "state.length": TensorSpec((2,), torch.int64),
    "setting.temperature": TensorSpec((2,)),
}


def allowed(item: Input) -> TensorSpec | None:
    return SPECS.get(item.storage or item.name)


def read(document: Any) -> StepGraph:
    return parsed(document).build(CPU, FakeTensorMode())


def parsed(document: Any) -> StoredGraph:
    graph = read_graph(Fields(PATH, "g.json", document))
    graph.check_inputs(allowed)
    return graph


def example() -> StepGraph:
    def stage(v: Any) -> Any:
        torch.ops.specc.store(v["state.length"], v["state.length"] + 1)
        x = v["draft.x"] @ v["target.w"]
        best, at = x.max(dim=1)
        floor = torch.full_like(best, float("-inf"))
        x = torch.where((at > 1)[:, None], torch.nn.functional.gelu(x, approximate="tanh"), floor[:, None])
        x = x.to(torch.float64).masked_fill(at[:, None] == 0, 0.1)
        made = torch.zeros(2, 1, dtype=torch.bool, device=x.device)
        return {"verify.y": x, "verify.at": torch.cat([at[:, None], made.long()], 1)}

    return toy(
        stage, draft__x=f32(2, 4), target__w=f32(4, 4), state__length=i64(2), storage={"target.w": "target.w"}
    )


def document() -> Any:
    return json.loads(write_json(write_graph(example(), CPU)))


def test_the_same_graph_comes_back() -> None:
    graph, back = example(), read(document())
    assert back.render() == graph.render()
    assert (back.inputs, back.outputs, back.name) == (graph.inputs, graph.outputs, graph.name)
    for old, new in zip(graph.graph.nodes, back.graph.nodes, strict=True):
        if isinstance(old.meta.get("val"), torch.Tensor):
            assert (old.meta["val"].dtype, old.meta["val"].stride()) == (
                new.meta["val"].dtype,
                new.meta["val"].stride(),
            )
    values = [
        {"draft__x": torch.ones(2, 4), "target__w": torch.eye(4), "state__length": torch.ones(2).long()}
        for _ in range(2)
    ]
    for one, other in zip(run(graph, **values[0]).values(), run(back, **values[1]).values(), strict=True):
        assert torch.equal(one, other)
    assert values[1]["state__length"].tolist() == [2, 2]


def test_every_stage_of_a_step_comes_back() -> None:
    source = ToySource()
    specs = source.state() | {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in source.weights.items()}
    specs |= {"setting.temperature": TensorSpec((1,)), "feed.slot": TensorSpec((FEED,), torch.int64)}
    specs["feed.position"] = specs["feed.slot"]
    for key in (StepKey(2, 0, "mixed", ("temperature",)), StepKey(0, FEED, "ratio", (), ("hidden",))):
        for stage in STAGES:
            graph = source.stage(stage, key)
            text = write_json(write_graph(graph, CPU))
            stored = read_graph(Fields(PATH, "g", json.loads(text)))
            stored.check_inputs(lambda i: specs.get(i.storage or i.name))
            assert stored.build(CPU, FakeTensorMode()).render() == graph.render()
            assert b"/" not in text  # no paths, no stack traces


def test_what_a_package_may_not_hold_is_not_written() -> None:
    graph = toy(lambda v: {"verify.y": torch.linalg.inv(v["target.w"])}, target__w=f32(4, 4))
    with pytest.raises(UnsupportedError, match=r"it calls aten.linalg_inv"):
        write_graph(graph, CPU)


def test_operators_are_known_and_pure() -> None:
    assert all(hasattr(getattr(torch.ops, n.split(".")[0]), n.split(".")[1]) for n in ATEN | SPECC)
    refused = (
        "aten.from_file.default", "aten.add_.Tensor", "aten.add.out", "aten.resize_.default",
        "aten.item.default", "aten.nonzero.default", "prims.add.default", "os.system.default", "aten.add",
        "aten.add.Nothing", "aten.add.", "aten.add._schema", "transformers.grouped_mm_fallback.default",
        "operator.add", "specc.other.default", "",
    )  # fmt: skip
    assert [name for name in refused if find(name) is not None] == []


Change = Callable[[Any], object]


def call(index: int) -> Callable[[Any, Any], None]:
    def change(doc: Any, value: Any) -> None:
        doc["nodes"][index] = value

    return change


def argument(value: Any) -> Change:
    return lambda doc: doc["nodes"][-1][1].__setitem__(0, value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(operators=["aten.from_file.default"] * 20), "found 'aten.from_file.default'"),
        (lambda d: d["operators"].__setitem__(0, 7), "a list of texts"),
        (lambda d: d.update(stage="other"), "g.json.stage: found 'other'"),
        (lambda d: d.update(trace="x"), "g.json.trace: found a field"),
        (lambda d: d.pop("outputs"), "g.json.outputs: found nothing"),
        (lambda d: d["nodes"].append([99, []]), "an operator's index"),
        (lambda d: d["nodes"].append([True, []]), "an operator's index"),
        (lambda d: d["nodes"].append("x"), "an operator's index"),
        (lambda d: d["nodes"].append([0, [], {}]), "an operator's index"),
        (lambda d: d["nodes"].append([0, [], [["not a name", 1]]]), "named arguments"),
        (lambda d: d["nodes"].append([0, [], [["a", 1], ["a", 2]]]), "every name once"),
        (argument({"node": 9999}), "a node that stands before"),
        (argument({"node": -1}), "a node that stands before"),
        (argument({"node": True}), "a node that stands before"),
        (argument({"dtype": "uint1000"}), "an argument"),
        (argument({"dtype": ["float32"]}), "an argument"),
        (argument({"device": "cuda:7"}), "an argument"),
        (argument({"float": "1e9"}), "an argument"),
        (argument({"code": "print()"}), "an argument"),
        (argument([[[[1]]]]), "an argument"),
        (argument(1 << 70), "an argument"),
        (lambda d: d["inputs"][1].update(shape=[4, 5]), "target.w: found F32[4, 5], expected F32[4, 4]"),
        (lambda d: d["inputs"][1].update(name="target.v", storage=""), "an input that this package declares"),
        (lambda d: d["inputs"][1].update(kind="module"), "kind: found 'module'"),
        (lambda d: d["inputs"][1].update(shape=[1 << 40, 1 << 40]), "whole numbers"),
        (lambda d: d["outputs"][1].update(name="verify.y"), "every name once"),
        (lambda d: d["outputs"][1].update(node=10**6), "outputs[1].node"),
    ],
)  # fmt: skip
def test_faults_found_by_reading(change: Change, says: str) -> None:
    doc = copy.deepcopy(document())
    change(doc)
    with pytest.raises(ArtifactError) as caught:
        parsed(doc)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["outputs"][0].update(shape=[2, 5]), "verify.y: found F64[2, 4], expected F64[2, 5]"),
        (lambda d: d["inputs"][0].update(shape=[2, 3]), "aten.matmul.default"),
        (argument("text"), "an argument"),
        (argument([{"node": 0}, {"text": "x"}]), "arguments that it takes"),
        (lambda d: d["nodes"][-1].append([["nothing", 1]]), "arguments that it takes"),
    ],
)  # fmt: skip
def test_faults_found_by_building(change: Change, says: str) -> None:
    doc = copy.deepcopy(document())
    change(doc)
    with pytest.raises(ArtifactError) as caught:
        read(doc)
    assert says in str(caught.value)


def test_a_graph_writes_declared_state_only() -> None:
    doc = document()
    store = doc["operators"].index("specc.store.default")
    node = next(n for n in doc["nodes"] if n[0] == store)
    node[1] = [{"node": 1}, {"node": 1}]  # the weight
    with pytest.raises(ArtifactError, match="a graph writes declared state only"):
        read(doc)


def test_getitem_means_an_operator_s_results() -> None:
    doc = document()
    doc["operators"].append("getitem")
    doc["nodes"].append([len(doc["operators"]) - 1, [{"node": 0}, 0]])
    with pytest.raises(ArtifactError, match="only an operator's list of results"):
        read(doc)
