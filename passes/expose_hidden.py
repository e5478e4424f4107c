"""Add what the output head reads, the last hidden state after the final norm, to a rows graph's outputs.

Before:  %11: [1, wanted, hidden]   %12 = aten.linear.default(%11, %head)   return logits=%14
After:   %15 = aten.select.int(%11, 0, 0)                                   return logits=%14, hidden=%15

A step that does not ask for it holds no trace of it: unread values are pruned when the graph is traced into a stage.
"""

from __future__ import annotations

import torch

from specc.contracts import Pass
from specc.errors import InvariantError
from specc.graph import StepGraph

aten = torch.ops.aten


def _run(graph: StepGraph) -> StepGraph:
    rows = graph.placeholder("logit_rows")
    picked = [n for n in rows.users if n.target is aten.index_select.default]
    if len(picked) != 1:
        raise InvariantError("the head reads one selection of rows", rows, "expose_hidden")
    end = graph.output_node()
    with graph.graph.inserting_before(end):
        hidden = graph.graph.call_function(aten.select.int, (picked[0], 0, 0))
    hidden.meta["val"] = aten.select.int(picked[0].meta["val"], 0, 0)
    end.args = ([*graph.output_values(), hidden],)
    graph.outputs = (*graph.outputs, "hidden")
    return graph


expose_hidden = Pass(
    "expose_hidden", _run, needs=frozenset({"sliced-logits"}), gives=frozenset({"hidden"}), expects_match=True
)
