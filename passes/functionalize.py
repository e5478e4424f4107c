"""Turn in-place operators on intermediate values into ones that return a new value.

Before:  %3 = aten.add_.Tensor(%2, %1)                          later readers read %2 or %3
After:   %3 = aten.add.Tensor(%2, %1)                           later readers read %3
Before:  %5 = aten.slice.Tensor(%4, 3, 0, 12)   aten.copy_.default(%5, %1)      later readers read %4
After:   %6 = aten.slice_scatter.default(%4, %1, 3, 0, 12)                      later readers read %6

After it a graph writes only through specc's operators, into declared state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specc.contracts import Pass
from specc.errors import UnsupportedError
from specc.graph import StepGraph, mutated_arguments

aten = torch.ops.aten


def _run(graph: StepGraph) -> StepGraph:
    for node in list(graph.graph.nodes):
        written = mutated_arguments(node)
        if not written or node.target.namespace != "aten" or written[0].op == "placeholder":
            continue
        if node.target is aten.detach_.default:
            node.replace_all_uses_with(written[0])
            graph.graph.erase_node(node)
        elif _is_free(written[0], node):
            _out_of_place(graph.graph, node, written[0])
        elif (
            node.target is aten.copy_.default
            and written[0].target is aten.slice.Tensor
            and _is_free(written[0].args[0], node, but=written[0])
            and not _has_live_views(written[0], node)
        ):
            _scatter(graph.graph, node, written[0])
        else:
            raise UnsupportedError(
                "this model cannot be traced over rows", [f"{node.target} writes through a view: {node}"]
            )
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
    whole: Any = part.args[0]
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


def _is_free(written: fx.Node, point: fx.Node, but: fx.Node | None = None) -> bool:
    """Whether a write at ``point`` shows nowhere but in ``written`` itself (and in its view ``but``)."""
    return written.op != "placeholder" and not _is_view(written) and not _has_live_views(written, point, but)


def _has_live_views(written: fx.Node, point: fx.Node, but: fx.Node | None = None) -> bool:
    """Whether something behind ``point`` reads a view of ``written``, or a view of a view."""
    return any(
        any(reader > point for reader in user.users) or _has_live_views(user, point)
        for user in written.users
        if user is not but and user < point and _is_view(user)
    )


def _is_view(node: fx.Node) -> bool:
    """Whether a value shares memory with an argument: its operator may return one, and the fake values do."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliases = [r.alias_info for r in node.target._schema.returns]
    if not any(a is not None and not a.is_write for a in aliases):
        return False
    made, source = node.meta.get("val"), node.args[0]
    given = source.meta.get("val") if isinstance(source, fx.Node) else None
    if isinstance(made, torch.Tensor) and isinstance(given, torch.Tensor):
        return bool(made.untyped_storage()._cdata == given.untyped_storage()._cdata)
    return True


functionalize = Pass("functionalize", _run)
