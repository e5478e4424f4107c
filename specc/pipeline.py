"""Run passes over a graph: check needs, gives and invariants around each, and report what each changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specc.contracts import STAGES, Pass
from specc.errors import InvariantError, UnknownNameError
from specc.files import writing
from specc.graph import StepGraph, mutated_arguments
from specc.ops import MUTATING

logger = logging.getLogger(__name__)

Check = Callable[[StepGraph], None]

# Operators whose result, or whose shape, depends on a tensor's value: on a GPU each is a wait for the device.
_WAITS = frozenset(
    {
        "aten._local_scalar_dense",
        "aten.item",
        "aten.nonzero",
        "aten.nonzero_numpy",
        "aten.masked_select",
        "aten.unique_dim",
        "aten._unique2",
        "aten.unique_consecutive",
        "aten.is_nonzero",
        "aten.equal",
        "aten.argwhere",
    }
)


@dataclass(frozen=True)
class PassReport:
    """What one pass did: node counts around it, the bytes of weights the graph reads, and how long it took."""

    name: str
    nodes_before: int
    nodes_after: int
    weight_bytes_before: int
    weight_bytes_after: int
    milliseconds: float
    note: str = ""


def _check_one_graph(graph: StepGraph) -> None:
    for node in graph.graph.nodes:
        if node.op in ("call_module", "call_method", "get_attr"):
            raise InvariantError("a fused step holds only operator calls", node)
        if node.op == "call_function" and node.meta.get("stage") not in STAGES:
            raise InvariantError("every call has a stage", node)


def _check_capturable(graph: StepGraph) -> None:
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        name = str(node.target).rsplit(".", 1)[0]
        if name in _WAITS or (name == "aten.index" and _has_bool_index(node)):
            raise InvariantError("a step must not wait for a tensor's value", node)
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(value, torch.SymInt) or (
                isinstance(value, torch.Tensor) and not all(isinstance(s, int) for s in value.shape)
            ):
                raise InvariantError("a step's shapes are static", node)


def _has_bool_index(node: torch.fx.Node) -> bool:
    indices = node.args[1] if len(node.args) > 1 else ()
    return any(
        isinstance(i, torch.fx.Node) and i.meta["val"].dtype is torch.bool
        for i in (indices if isinstance(indices, (tuple, list)) else ())
    )


def _check_shared(graph: StepGraph) -> None:
    seen = [i.storage for i in graph.inputs if i.storage]
    if len(seen) != len(set(seen)):
        raise InvariantError("one storage is one input", next(s for s in seen if seen.count(s) > 1))


def _check_output(name: str) -> Check:
    def check(graph: StepGraph) -> None:
        if name not in graph.outputs:
            raise InvariantError(f"the graph has an output called {name!r}", graph.outputs)

    return check


def _check_logit_rows(graph: StepGraph) -> None:
    if not graph.has_input("logit_rows"):
        raise InvariantError("the head reads only chosen rows", "logit_rows")


FACTS: dict[str, Check] = {
    "taps": _check_output("taps"),
    "sliced-logits": _check_logit_rows,
    "hidden": _check_output("hidden"),
    "one-graph": _check_one_graph,
    "shared-weights": _check_shared,
    "capturable": _check_capturable,
}


def check_always(graph: StepGraph) -> None:
    """Check what holds of every graph: it lints, is typed, and writes only declared state through specc's operators."""
    graph.graph.lint()
    for node in graph.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise InvariantError("every call has a value of known shape", node)
        written = mutated_arguments(node)
        if written and node.target not in MUTATING:
            raise InvariantError("only specc's operators write", node)
        for argument in written:
            if argument.op != "placeholder" or argument.meta["input"].kind != "state":
                raise InvariantError("a graph writes declared state only", node)


def run_passes(
    graph: StepGraph, passes: Sequence[Pass], *, disable: Sequence[str] = (), dump: Path | None = None
) -> tuple[StepGraph, tuple[PassReport, ...]]:
    """Run ``passes`` in order.

    Args:
        graph: rewritten in place and returned.
        passes: the order; each one's needs must have been given before it.
        disable: names of passes to leave out, to bisect a fault.
        dump: a folder for the graph's text before the first and after every pass.

    Raises:
        UnknownNameError: ``disable`` names no pass.
        InvariantError: a need was not given, or a fact or invariant does not hold afterwards.
    """
    for name in disable:
        if name not in {p.name for p in passes}:
            raise UnknownNameError("pass", name, [p.name for p in passes])
    _dump(graph, dump, 0, "traced")
    reports = []
    done: list[str] = []
    for index, item in enumerate(passes, 1):
        if item.name in disable:
            logger.warning("%s: pass %s is disabled", graph.name, item.name)
            continue
        graph, report = _run_one(graph, item, done)
        reports.append(report)
        done.append(item.name)
        _dump(graph, dump, index, item.name)
    graph.gm.recompile()  # once: generating the code takes longer than most passes
    return graph, tuple(reports)


def _run_one(graph: StepGraph, item: Pass, done: Sequence[str]) -> tuple[StepGraph, PassReport]:
    missing = item.needs - graph.facts
    if missing:
        raise InvariantError(
            f"it needs {', '.join(sorted(missing))}, which no earlier pass gave", where=f"pass {item.name}"
        )
    before, bytes_before = len(graph.graph.nodes), weight_bytes(graph)
    text_before = graph.render() if item.expects_match else ""
    begin = time.perf_counter()
    try:
        graph = item.run(graph).sync()
        graph = graph.with_facts(item.gives)
        check_always(graph)
        for fact in sorted(graph.facts):
            FACTS[fact](graph)
    except Exception as error:
        error.add_note(f"in pass {item.name} (after {', '.join(done) or 'nothing'})")
        raise
    if item.expects_match and graph.render() == text_before:
        raise InvariantError("it must find something to rewrite and found nothing", where=f"pass {item.name}")
    elapsed = (time.perf_counter() - begin) * 1e3
    after = len(graph.graph.nodes)
    logger.info("%s: %d -> %d nodes, %.0f ms", item.name, before, after, elapsed)
    return graph, PassReport(item.name, before, after, bytes_before, weight_bytes(graph), elapsed)


def weight_bytes(graph: StepGraph) -> int:
    """Return the bytes of all weight inputs."""
    total = 0
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.meta["input"].kind == "weight":
            value = node.meta["val"]
            total += value.numel() * value.element_size()
    return total


def _dump(graph: StepGraph, folder: Path | None, index: int, name: str) -> None:
    if folder is not None:
        with writing("dump", folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{graph.name}_{index:02d}_{name}.txt").write_text(graph.render(), encoding="utf-8")
