"""The floor of a step: the bytes that it must read, each once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx

from specc.contracts import TensorSpec
from specc.graph import StepGraph

aten = torch.ops.aten
# Views: what reads them reads the weight.
_VIEWS = frozenset({
    aten.t.default, aten.permute.default, aten.transpose.int, aten.view.default, aten.reshape.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.detach.default, aten.alias.default,
    aten.slice.Tensor, aten.select.int, aten._unsafe_view.default,
})  # fmt: skip
# These read a few rows of a table and leave the rest alone.
_ROWS = frozenset({aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default})


def weight_bytes(graph: StepGraph) -> int:
    """Return the bytes of weights that one run of a step graph must read; tables read by row count by row."""
    whole: dict[str, int] = {}
    rows = 0
    for node in graph.graph.find_nodes(op="placeholder"):
        given, value = node.meta["input"], node.meta["val"]
        if given.kind != "weight" or not isinstance(value, Tensor):
            continue
        readers = list(_readers(node))
        if any(reader.target not in _ROWS for reader in readers):
            whole[given.storage or given.name] = value.numel() * value.dtype.itemsize
        else:
            rows += sum(_bytes(reader.meta.get("val")) for reader in readers)
    return sum(whole.values()) + rows


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and user.target in _VIEWS:
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _bytes(value: object) -> int:
    return value.numel() * value.dtype.itemsize if isinstance(value, Tensor) else 0


def cache_bytes_per_token(state: Mapping[str, TensorSpec], capacity: int) -> int:
    """Return the K/V bytes that a cached token adds to what a step reads, the drafter's included."""
    specs = [s for n, s in state.items() if n.startswith(("cache.", "method.")) and len(s.shape) == 4]
    return sum(s.size_bytes // (s.shape[0] * s.shape[2]) for s in specs if s.shape[2] == capacity + 1)
