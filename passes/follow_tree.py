"""Let the rows of a tree attend to their own branch only.

Before:  %9 = specc.attend.default(..., %slot, %cache_row, %first, %cache_row, 0.125)
After:   %9 = specc.attend.default(..., %slot, %cache_row, %first, %last, 0.125, None, None, %path)

A row that is not part of a tree has its own cache row as ``last`` and an empty path.
"""

from __future__ import annotations

from specc.contracts import Pass
from specc.graph import Input, StepGraph
from specc.ops import attend

_LAST, _PATH = 8, 12  # places of attend's arguments


def _run(graph: StepGraph) -> StepGraph:
    like = graph.placeholder("cache_row")
    after = list(graph.graph.find_nodes(op="placeholder"))[-1]
    added = []
    for name in ("last", "path"):
        with graph.graph.inserting_after(after):
            after = graph.graph.placeholder(name)
        after.meta["input"] = Input(name, "value")
        after.meta["val"] = like.meta["val"].clone()
        added.append(after)
    last, path = added
    for node in graph.graph.find_nodes(op="call_function", target=attend.default):
        arguments = [*node.args, *[None] * (_PATH - len(node.args))]
        for name, value in node.kwargs.items():
            arguments[_place(name)] = value
        arguments[_LAST] = last
        node.args, node.kwargs = (*arguments, path), {}
    return graph.sync()


def _place(name: str) -> int:
    return [a.name for a in attend.default._schema.arguments].index(name)


follow_tree = Pass("follow_tree", _run, expects_match=True)
