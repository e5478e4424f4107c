"""Turn in-place operators on intermediate values into ones that return a new value.

Before:  %3 = aten.add_.Tensor(%2, %1)                          later readers read %2 or %3
After:   %3 = aten.add.Tensor(%2, %1)                           later readers read %3
Before:  %5 = aten.slice.Tensor(%4, 3, 0, 12)   aten.copy_.default(%5, %1)      later readers read %4
After:   %6 = aten.slice_scatter.default(%4, %1, 3, 0, 12)                      later readers read %6

After it a graph writes only through specc's operators, into declared state.
"""

from __future__ import annotations

import torch
from torch import fx

from specc.contracts import Pass
from specc.errors import UnsupportedError
from specc.graph import StepGraph, mutated_arguments

aten = torch.ops.aten
_VIEWS = frozenset({
    aten.slice.Tensor, aten.select.int, aten.view.default, aten.transpose.int, aten.unsqueeze.default,
    aten.permute.default, aten.expand.default, aten.squeeze.dim, aten.alias.default, aten.detach.default,
})


def _run(graph: StepGraph) -> StepGraph:
    for node in list(graph.graph.nodes):
        written = mutated_arguments(node)
        if not written or node.target.namespace != "aten" or written[0].op == "placeholder":
            continue
        if node.target is aten.detach_.default:
            node.replace_all_uses_with(written[0])
            graph.graph.erase_node(node)
        elif node.target is aten.copy_.default and written[0].target is aten.slice.Tensor:
            _scatter(graph.graph, node, written[0])
        elif written[0].target not in _VIEWS and not _has_live_views(written[0], node):
            _out_of_place(graph.graph, node, written[0])
        else:
            raise UnsupportedError("this model cannot be traced over rows", [f"{node.target} writes through a view: {node}"])
    return graph


def _out_of_place(graph: fx.Graph, node: fx.Node, written: fx.Node) -> None:
    packet, overload = str(node.target).split(".")[1:]
    pure = getattr(getattr(aten, packet.removesuffix("_")), overload)
    with graph.inserting_before(node):
        new = graph.call_function(pure, node.args, node.kwargs)
    new.meta = dict(node.meta)
    _replace_after(written, node, new)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _scatter(graph: fx.Graph, node: fx.Node, part: fx.Node) -> None:
    whole = part.args[0]
    with graph.inserting_before(node):
        new = graph.call_function(aten.slice_scatter.default, (whole, node.args[1], *part.args[1:]))
    new.meta = dict(node.meta)
    new.meta["val"] = whole.meta["val"]
    _replace_after(whole, node, new)
    graph.erase_node(node)


def _replace_after(old: fx.Node, point: fx.Node, new: fx.Node) -> None:
    """Let the readers of ``old`` behind ``point`` read ``new``."""
    for user in list(old.users):
        if user is not new and user > point:
            user.replace_input_with(old, new)


def _has_live_views(written: fx.Node, point: fx.Node) -> bool:
    return any(
        user.target in _VIEWS and user < point and any(reader > point for reader in user.users) for user in written.users
    )


functionalize = Pass("functionalize", _run)
