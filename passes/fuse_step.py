"""Inline the stages into one graph: what one stage makes is what the next one reads.

Before:  %3 = draft(...)  %4 = verify(...)  %5 = accept(...)  %6 = commit(...)     (calls of stage graphs)
After:   the operators of all four, in order, each marked with its stage
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from specc.contracts import Pass
from specc.graph import StepGraph, drop_unused_inputs, inline, prune


def _run(graph: StepGraph) -> StepGraph:
    for call in list(graph.graph.find_nodes(op="call_module")):
        stage: Any = graph.gm.get_submodule(str(call.target))
        arguments = iter(call.args)
        bound = {node: next(arguments) for node in stage.graph.find_nodes(op="placeholder")}
        with graph.graph.inserting_before(call):
            outputs = inline(graph.graph, stage.graph, bound.__getitem__, call.meta["stage"])
        for user in list(call.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(call)
    prune(graph.graph)
    graph.gm = fx.GraphModule({}, graph.graph)
    return drop_unused_inputs(graph)


fuse_step = Pass("fuse_step", _run, gives=frozenset({"one-graph"}), expects_match=True)
