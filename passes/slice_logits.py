"""Run the output head only on the rows whose logits are wanted.

Before:  %9: [1, rows, hidden]   %10 = aten.linear.default(%9, %head)
After:   %9   %11 = aten.index_select.default(%9, 1, %logit_rows)   %12 = aten.linear.default(%11, %head)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specc.contracts import Pass
from specc.errors import InvariantError
from specc.graph import Input, StepGraph, refresh

aten = torch.ops.aten
_HEADS = (aten.linear.default, aten.matmul.default, aten.addmm.default, aten.mm.default)


def _run(graph: StepGraph) -> StepGraph:
    head = _head_of(graph.output_values()[graph.outputs.index("logits")])
    stream: Any = head.args[0]
    last = list(graph.graph.find_nodes(op="placeholder"))[-1]
    with graph.graph.inserting_after(last):
        rows = graph.graph.placeholder("logit_rows")
    rows.meta["input"] = Input("logit_rows", "value")
    rows.meta["val"] = graph.placeholder("token").meta["val"].new_empty(_WANTED)
    with graph.graph.inserting_before(head):
        picked = graph.graph.call_function(aten.index_select.default, (stream, 1, rows))
    picked.meta = dict(stream.meta)
    picked.meta["val"] = aten.index_select.default(stream.meta["val"], 1, rows.meta["val"])
    head.args = (picked, *head.args[1:])
    refresh(graph.graph, [picked])
    return graph.sync()


def _head_of(logits: fx.Node) -> fx.Node:
    """Walk back from the logits to the multiplication by the head's weight."""
    node = logits
    while node.target not in _HEADS:
        sources = [n for n in node.all_input_nodes if n.op == "call_function"]
        if node.op != "call_function" or not sources:
            raise InvariantError("the logits do not come from a linear head", node, "slice_logits")
        node = sources[0]
    return node


_WANTED = 3  # any count: a rows graph is specialised to the caller's when it is traced into a step

slice_logits = Pass("slice_logits", _run, gives=frozenset({"sliced-logits"}), expects_match=True)
