"""What `inspect` shows: stages, passes, memory by part, and the graph as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from specc.contracts import STAGES, AcceptRule, Method
from specc.runtime.engine import Engine
from specc.step import StepKey


@dataclass(frozen=True)
class Inspection:
    """A step graph with its figures; ``render`` gives it as text."""

    method: str
    block: int
    accept: str
    slots: int
    max_length: int
    backend: str
    taps: tuple[int, ...]
    stages: tuple[Mapping[str, Any], ...]
    passes: tuple[Mapping[str, Any], ...]
    memory: Mapping[str, int]
    mutated: tuple[str, ...]
    graph: str
    graph_by_stage: Mapping[str, str]

    def render(self, stage: str | None = None) -> str:
        """Return the graph, or one stage of it, as text."""
        return self.graph if stage is None else self.graph_by_stage[stage]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the graph's text, for JSON."""
        values = asdict(self)
        del values["graph"], values["graph_by_stage"]
        return values


def inspect_engine(engine: Engine, method: Method, block: int, accept: AcceptRule) -> Inspection:
    """Build the drafting step of ``engine``, without compiling it, and describe it."""
    built = engine.builder.step(StepKey(block, 0, accept))
    graph = built.graph
    operators: dict[str, Counter[str]] = {s: Counter() for s in STAGES}
    for node in graph.call_nodes():
        operators[node.meta["stage"]][str(node.target)] += 1
    stages = tuple(
        {"stage": s, "nodes": c.total(), "top": ", ".join(f"{n} x{k}" for n, k in c.most_common(3))}
        for s, c in operators.items()
    )
    return Inspection(
        method=method.name,
        block=block,
        accept=accept,
        slots=engine.slots,
        max_length=engine.capacity,
        backend=engine.backend.name,
        taps=engine.builder.taps,
        stages=stages,
        passes=tuple(asdict(r) for r in (*engine.builder.rows_reports, *built.reports)),
        memory=memory_by_part(engine),
        mutated=graph.mutated(),
        graph=graph.render(),
        graph_by_stage={s: graph.render(s) for s in STAGES},
    )


def memory_by_part(engine: Engine) -> dict[str, int]:
    """Return bytes by part; memory that two parts share counts for the first."""
    seen: set[int] = set()
    parts = {"target weights": 0, "drafter weights": 0, "target K/V": 0, "drafter state": 0, "other state": 0}

    def count(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()

    for name, tensor in engine.builder.weights.items():
        parts["target weights" if name.startswith("target.") else "drafter weights"] += count(tensor)
    owners = {"cache": "target K/V", "method": "drafter state"}
    for name, tensor in engine.state.named().items():
        parts[owners.get(name.split(".")[0], "other state")] += count(tensor)
    return parts
