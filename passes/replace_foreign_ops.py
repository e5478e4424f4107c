"""Replace operators that another library registered by specc's own: a step needs no other library to run.

Before:  %2 = transformers.grouped_mm_fallback.default(%0, %1, %offs)
After:   %2 = specc.grouped_mm.default(%0, %1, %offs)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specc.contracts import Pass
from specc.graph import StepGraph
from specc.ops import grouped_mm

# By name: looking the foreign operator up would need its library.
OURS: Mapping[str, Any] = MappingProxyType({
    "transformers.grouped_mm_fallback.default": grouped_mm.default,
})  # fmt: skip


def _run(graph: StepGraph) -> StepGraph:
    for node in graph.graph.nodes:
        own = OURS.get(str(node.target)) if node.op == "call_function" else None
        if own is not None:
            # By position: libraries name their arguments differently.
            node.args, node.kwargs = (*node.args, *node.kwargs.values()), {}
            node.target = own
    return graph


replace_foreign_ops = Pass("replace_foreign_ops", _run)
