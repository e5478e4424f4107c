"""The pipeline's own refusals: order, types, waits, writes, faults inside a pass; and what it dumps and leaves out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import specc
from specc.contracts import Draft, MethodContext, Pass
from specc.errors import InvariantError, UnknownNameError, UnsupportedError
from specc.graph import StepGraph
from specc.methods.plain import Plain
from specc.ops import put, store
from specc.passes import STEP_PIPELINE, rows_pipeline
from specc.passes.check_capturable import check_capturable
from specc.passes.drop_noops import drop_noops
from specc.pipeline import FACTS, run_passes
from tests.rig import loaded
from tests.toy import f32, i64, run, toy

aten = torch.ops.aten
NOTHING = Pass("nothing", lambda graph: graph)


def step(fused: bool = True) -> StepGraph:
    def function(v):
        store(v["state.length"], v["state.length"] + 1)
        return {"out": v["target.x"] * 2 + 1}

    graph = toy(function, target__x=f32(4), state__length=i64(3))
    return replace(graph, facts=frozenset({"one-graph"} if fused else ()))


def adds(target: Any, argument: str, *more: Any, val: Any = None) -> Callable[[StepGraph], StepGraph]:
    """Return a pass function that appends a call on an input or, for "out", on the output."""

    def rewrite(graph: StepGraph) -> StepGraph:
        end = graph.output_node()
        source = end.args[0][0] if argument == "out" else graph.placeholder(argument)
        with graph.graph.inserting_before(end):
            node = graph.graph.call_function(target, (source, *more))
        node.meta = {"stage": "verify"} if val == "untyped" else {"stage": "verify", "val": val}
        return graph

    return rewrite


def test_every_fact_that_a_pass_gives_has_a_check():
    passes = (*rows_pipeline((1,), ("layers.0",), 4), *STEP_PIPELINE)
    given: set[str] = set()
    for item in passes:
        assert item.needs <= given | {"one-graph"}, item.name
        assert item.gives <= set(FACTS), item.name
        given |= item.gives
    names = [item.name for item in passes]
    assert len(names) == len(set(names))


def test_wrong_order():
    with pytest.raises(
        InvariantError, match=r"it needs one-graph, which no earlier pass gave.* in pass drop_noops"
    ):
        run_passes(step(fused=False), (drop_noops,))
    with pytest.raises(InvariantError, match="pass check_capturable"):
        run_passes(step(fused=False), (NOTHING, check_capturable))


@pytest.mark.parametrize(
    ("rewrite", "rule"),
    [
        (adds(aten.neg.default, "out", val="untyped"), "value of known shape"),
        (adds(aten.add_.Tensor, "out", 1), "only specc's operators write"),
        (adds(aten.copy_.default, "state.length", 1), "only specc's operators write"),
        (adds(torch.ops.specc.store.default, "target.x", 1), "declared state only"),
        (adds(torch.ops.specc.store.default, "out", 1), "declared state only"),
        (adds(aten._local_scalar_dense.default, "out"), "must not wait"),
    ],
)
def test_what_a_pass_must_not_leave_behind(rewrite, rule):
    bad = Pass("bad", rewrite)
    with pytest.raises(InvariantError, match=rule) as caught:
        run_passes(step(), (check_capturable, bad))
    assert caught.value.__notes__ == ["in pass bad (after check_capturable)"]


def test_a_call_without_a_stage_or_of_a_module():
    def stageless(graph: StepGraph) -> StepGraph:
        graph.call_nodes()[0].meta["stage"] = "later"
        return graph

    with pytest.raises(InvariantError, match="every call has a stage"):
        run_passes(step(), (Pass("stageless", stageless),))


def test_a_pass_that_raises_keeps_its_error_and_says_where():
    def fails(graph: StepGraph) -> StepGraph:
        raise ZeroDivisionError("in the pass")

    with pytest.raises(ZeroDivisionError, match="in the pass") as caught:
        run_passes(step(), (NOTHING, check_capturable, Pass("fails", fails)))
    assert caught.value.__notes__ == ["in pass fails (after nothing, check_capturable)"]


def test_a_graph_that_does_not_lint():
    def tears(graph: StepGraph) -> StepGraph:
        first, second = graph.call_nodes()[:2]
        second.append(first)  # a value behind its reader
        return graph

    graph = toy(lambda v: {"out": (v["target.x"] * 2 + 1) * 3}, target__x=f32(4))
    with pytest.raises(RuntimeError, match="used before"):
        run_passes(graph, (Pass("tears", tears),))


def test_a_pass_that_must_match_and_does_not():
    with pytest.raises(InvariantError, match="must find something to rewrite"):
        run_passes(step(), (replace(NOTHING, expects_match=True),))


def test_disabled_passes_are_left_out_and_said(caplog):
    with caplog.at_level(logging.WARNING, logger="specc.pipeline"):
        graph, reports = run_passes(step(), (NOTHING, drop_noops), disable=["nothing"])
    assert [r.name for r in reports] == ["drop_noops"]
    assert "pass nothing is disabled" in caplog.text
    x = torch.randn(4)
    length = torch.zeros(3, dtype=torch.int64)
    assert torch.equal(run(graph, target__x=x, state__length=length)["out"], x * 2 + 1)
    with pytest.raises(UnknownNameError, match="'drop_noop'; did you mean 'drop_noops'"):
        run_passes(step(), (NOTHING, drop_noops), disable=["drop_noop"])


def test_reports_say_what_changed():
    def rewrite(graph: StepGraph) -> StepGraph:
        return adds(aten.neg.default, "out", val=torch.empty(4))(graph)

    _, (report,) = run_passes(step(), (Pass("adds", rewrite),))
    assert report.nodes_after - report.nodes_before == 1
    assert report.weight_bytes_before == report.weight_bytes_after == 16
    assert report.milliseconds > 0


def test_dump_writes_the_graph_before_and_after_every_pass(tmp_path):
    graph, _ = run_passes(
        step(), (NOTHING, drop_noops, check_capturable), dump=tmp_path / "made", disable=["nothing"]
    )
    names = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert names == ["verify_00_traced.txt", "verify_02_drop_noops.txt", "verify_03_check_capturable.txt"]
    assert (tmp_path / "made" / names[-1]).read_text() == graph.render()
    assert (tmp_path / "made" / names[0]).read_text() == step().render()


def test_compile_disables_and_dumps(tmp_path):
    compiled = specc.compile(
        loaded(),
        method="ngram",
        block=2,
        max_length=32,
        backend="eager",
        dump=tmp_path,
        disable_passes=["drop_noops"],
    )
    ids = torch.tensor([[5, 9, 5, 9]])
    expected = loaded().module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    assert torch.equal(compiled.generate(ids, max_new_tokens=8), expected)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"target_00_traced.txt", "step_k2_p0_00_traced.txt"} <= names
    assert any(name.endswith("fuse_step.txt") for name in names)
    assert not any("drop_noops" in name for name in names)
    with pytest.raises(UnknownNameError, match="drop_noop"):
        specc.compile(loaded(), method="ngram", max_length=32, backend="eager", disable_passes=["drop_noop"])


# --- a user's method that reads values in Python --------------------------------------------------------


@dataclass(frozen=True)
class Reads(Plain):
    """A method whose draft looks at a tensor's value, in one of several ways."""

    how: Callable[[MethodContext], object] = len
    name: str = "reads"
    default_block: int = 2

    def reject(self, target: Any, drafter: Any, block: int) -> tuple[str, ...]:
        return ()

    def blocks(self, drafter: Any) -> int | None:
        return None

    def draft(self, context: MethodContext) -> Draft:
        self.how(context)
        return Draft(context.anchor[:, None].expand(-1, context.block).clone())


def _writes_tokens(context: MethodContext) -> None:
    context.tokens[:, 0] = 0


def _writes_a_weight_of_nobody(context: MethodContext) -> None:
    put(
        context.anchor[:, None] * 1,
        context.anchor[:, None],
        context.anchor[:, None] * 0,
        context.anchor[:, None] * 0,
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda c: c.length.max().item(), "tensor's value in Python"),
        (lambda c: int(c.length[0]), "tensor's value in Python"),
        (lambda c: c.length.tolist(), "tensor's value in Python"),
        (lambda c: bool((c.length > 3).any()), "tensor's value in Python"),
        (lambda c: c.tokens[c.tokens > 3], "tensor's value in Python"),
        (lambda c: c.running.nonzero(), "tensor's value in Python"),
    ],
    ids=["item", "int", "tolist", "branch", "mask", "nonzero"],
)
def test_a_method_that_needs_a_value_is_refused(how, said):
    compiled = specc.compile(loaded(), method=Reads(how=how), block=2, max_length=32, backend="eager")
    with pytest.raises(UnsupportedError, match=said) as caught:
        compiled.inspect()
    assert "no item(), no boolean indexing" in str(caught.value)


@pytest.mark.parametrize("how", [_writes_tokens, _writes_a_weight_of_nobody])
def test_a_method_that_writes_what_it_did_not_declare_is_refused(how):
    compiled = specc.compile(loaded(), method=Reads(how=how), block=2, max_length=32, backend="eager")
    with pytest.raises((InvariantError, UnsupportedError), match="write"):
        compiled.inspect()


def test_the_same_method_runs_when_it_reads_nothing():
    compiled = specc.compile(
        loaded(), method=Reads(how=lambda _: None), block=2, max_length=32, backend="eager"
    )
    ids = torch.tensor([[5, 9, 5, 9]])
    expected = loaded().module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    assert torch.equal(compiled.generate(ids, max_new_tokens=8), expected)
