"""Replace specc's operators by this device's own kernels, where there are some."""

from __future__ import annotations

import copy
from dataclasses import replace

from specc.backends.kernels import attend_cpu
from specc.graph import StepGraph
from specc.ops import attend


def with_kernels(graph: StepGraph) -> StepGraph:
    """Return a copy of ``graph`` whose specc operators are this device's kernels; the graph itself if it has none.

    Raises:
        UnsupportedError: a kernel is there and its compiler fails.
    """
    values = [n.meta["val"] for n in graph.graph.find_nodes(op="call_function", target=attend.default)]
    if not values or values[0].device.type != "cpu" or values[0].dtype not in attend_cpu.DTYPES:
        return graph
    attend_cpu.kernel()  # compile it now, not in the first step
    gm = copy.copy(graph.gm)
    gm.graph = copy.deepcopy(graph.graph)
    for node in gm.graph.find_nodes(op="call_function", target=attend.default):
        node.target = attend_cpu.attend_cpu.default
    gm.recompile()
    return replace(graph, gm=gm)
