"""Read every storage through one input: tied heads, and what the drafter shares with its target.

Before:  %0 = input target.embed_tokens.weight   %7 = input target.lm_head.weight   (one storage)
After:   every reader of %7 reads %0
"""

from __future__ import annotations

from specc.contracts import Pass
from specc.graph import StepGraph


def _run(graph: StepGraph) -> StepGraph:
    kept: dict[str, object] = {}
    for node in list(graph.graph.find_nodes(op="placeholder")):
        storage = node.meta["input"].storage
        if not storage:
            continue
        if storage not in kept:
            kept[storage] = node
            continue
        node.replace_all_uses_with(kept[storage])
        graph.graph.erase_node(node)
    return graph.sync()


share_weights = Pass("share_weights", _run, gives=frozenset({"shared-weights"}))
