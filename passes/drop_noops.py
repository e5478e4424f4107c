"""Remove operators that return their input: casts to the same dtype and slices of everything.

Before:  %2: f32[4] = aten.to.dtype(%1, torch.float32)     %3 = aten.slice.Tensor(%2, 1, 0, 9223372036854775807)
After:   every reader of %3 reads %1
"""

from __future__ import annotations

import torch

from specc.contracts import Pass
from specc.graph import StepGraph

aten = torch.ops.aten
_TARGETS = (
    aten.to.dtype,
    aten.slice.Tensor,
    aten.contiguous.default,
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten.dropout.default,
    aten.alias.default,
)


def _run(graph: StepGraph) -> StepGraph:
    for target in _TARGETS:
        for node in graph.graph.find_nodes(op="call_function", target=target):
            source = node.args[0]
            if not isinstance(source, torch.fx.Node) or source.op == "placeholder":
                continue  # an output must not become an input itself
            old, new = source.meta["val"], node.meta["val"]
            same = old.shape == new.shape and old.dtype == new.dtype and old.stride() == new.stride()
            if (
                not same
                or (target is aten.dropout.default and node.args[2])
                or old.storage_offset() != new.storage_offset()
            ):
                continue
            if target is aten.slice.Tensor and len(node.args) > 4 and node.args[4] != 1:
                continue
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
    return graph


drop_noops = Pass("drop_noops", _run, needs=frozenset({"one-graph"}))
