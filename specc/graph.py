"""The graph that passes rewrite: an FX graph whose inputs have names, kinds and specs, printable as text.

One class serves both phases: the *rows graph* of a model (symbolic rows) and the *step graph*.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

Kind = Literal["weight", "state", "setting", "host", "value"]


@dataclass(frozen=True)
class Input:
    """One named input of a graph.

    ``kind``: a weight, declared state (may be mutated), a per-slot setting, a host-made index list, or a value
    that another stage makes. ``storage`` names the memory behind it: inputs with the same storage are one tensor.
    """

    name: str
    kind: Kind
    storage: str = ""


@dataclass
class StepGraph:
    """A graph module, its named inputs and outputs, and what is known to hold of it."""

    gm: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    name: str = "step"
    facts: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    def placeholder(self, name: str) -> fx.Node:
        """Return the placeholder of the input called ``name``."""
        node: fx.Node
        for node in self.graph.find_nodes(op="placeholder"):
            if node.meta["input"].name == name:
                return node
        raise KeyError(name)

    def has_input(self, name: str) -> bool:
        return any(i.name == name for i in self.inputs)

    def output_node(self) -> fx.Node:
        node: fx.Node = next(iter(self.graph.find_nodes(op="output")))
        return node

    def output_values(self) -> list[fx.Node]:
        """Return the nodes that the graph returns, in the order of ``outputs``."""
        values: Any = self.output_node().args[0]
        return list(values)

    def copy(self) -> StepGraph:
        """Return a graph that can be rewritten while this one stays; values are shared."""
        graph = copy.deepcopy(self.graph)
        return replace(self, gm=fx.GraphModule(nn.Module(), graph), details=dict(self.details)).sync()

    def with_facts(self, facts: Iterable[str]) -> StepGraph:
        return replace(self, facts=self.facts | frozenset(facts))

    def sync(self) -> StepGraph:
        """Recompute ``inputs`` from the placeholders after they changed."""
        self.inputs = tuple(n.meta["input"] for n in self.graph.find_nodes(op="placeholder"))
        return self

    def call_nodes(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op in ("call_function", "call_module")]

    def mutated(self) -> tuple[str, ...]:
        """Return the names of the inputs that the graph writes, in input order."""
        written: set[fx.Node] = set()
        for node in self.graph.nodes:
            for argument in mutated_arguments(node):
                if isinstance(argument, fx.Node):
                    written.add(argument)
        return tuple(n.meta["input"].name for n in self.graph.find_nodes(op="placeholder") if n in written)

    def render(self, stage: str | None = None) -> str:
        """Return the graph as text: a line per node, numbered by position so that it is stable."""
        number = {node: index for index, node in enumerate(self.graph.nodes)}
        lines = []
        for node in self.graph.nodes:
            if stage is not None and node.op != "output" and node.meta.get("stage") != stage:
                continue
            lines.append(_render_node(node, number, self.outputs))
        return "\n".join(lines) + "\n"


def mutated_arguments(node: fx.Node) -> list[Any]:
    """Return the arguments that an operator call writes, by its schema."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if index < len(node.args):
                found.append(node.args[index])
            elif argument.name in node.kwargs:
                found.append(node.kwargs[argument.name])
    return found


def is_impure(node: fx.Node) -> bool:
    """Return whether removing an unused node would change what the graph does."""
    return node.op in ("placeholder", "output") or bool(mutated_arguments(node))


def refresh(graph: fx.Graph, start: Iterable[fx.Node]) -> None:
    """Recompute ``meta["val"]`` of everything that depends on the ``start`` nodes."""
    dirty = set(start)
    for node in graph.nodes:
        if node.op != "call_function" or node in dirty or not dirty.intersection(node.all_input_nodes):
            continue
        values = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
        mode = fake_mode(graph)
        with mode, torch.no_grad():
            node.meta["val"] = node.target(*values[0], **values[1])
        dirty.add(node)


def fake_mode(graph: fx.Graph) -> Any:
    """Return the fake mode that the graph was traced under."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
            return value.fake_mode
    raise KeyError("no node of this graph has a fake value")


def inline(
    target: fx.Graph, source: fx.Graph, bind: Callable[[fx.Node], fx.Node], stage: str | None = None
) -> list[Any]:
    """Copy the nodes of ``source`` into ``target`` at its insertion point.

    ``bind`` gives the node that stands for each placeholder. Returns the copied graph's outputs.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op == "placeholder":
            copies[node] = bind(node)
        elif node.op == "output":
            return list(fx.map_arg(node.args[0], copies.__getitem__))
        else:
            copy = target.node_copy(node, copies.__getitem__)
            if stage is not None:
                copy.meta["stage"] = stage
            copies[node] = copy
    raise KeyError("the source graph has no output")


def prune(graph: fx.Graph) -> None:
    """Remove nodes that nothing reads and that write nothing, unused placeholders kept."""
    for node in reversed(list(graph.nodes)):
        if not node.users and not is_impure(node):
            graph.erase_node(node)


def drop_unused_inputs(graph: StepGraph) -> StepGraph:
    for node in graph.graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.graph.erase_node(node)
    return graph.sync()


def _render_node(node: fx.Node, number: dict[fx.Node, int], outputs: Sequence[str]) -> str:
    me = f"%{number[node]}"
    if node.op == "placeholder":
        given = node.meta["input"]
        return f"{me}: {render_value(node.meta.get('val'))} = input[{given.kind}] {given.name}"
    if node.op == "output":
        values: Any = node.args[0]
        pairs = [f"{name}={_render_argument(v, number)}" for name, v in zip(outputs, values, strict=True)]
        return f"return {', '.join(pairs)}"
    arguments = [_render_argument(a, number) for a in node.args]
    arguments += [f"{k}={_render_argument(v, number)}" for k, v in node.kwargs.items()]
    target = node.target if isinstance(node.target, str) else _target_name(node.target)
    stage = f"  # {node.meta['stage']}" if node.meta.get("stage") else ""
    return f"{me}: {render_value(node.meta.get('val'))} = {target}({', '.join(arguments)}){stage}"


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


_SHORT = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
    torch.uint8: "u8",
    torch.int8: "i8",
}


def render_value(value: Any) -> str:
    """Return dtype and shape as text, like ``f32[2, 4]``."""
    if isinstance(value, torch.Tensor):
        return f"{_SHORT.get(value.dtype, str(value.dtype))}[{', '.join(str(s) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(render_value(v) for v in value)})"
    if value is None:
        return "()"
    return str(value)


def _render_argument(argument: Any, number: dict[fx.Node, int]) -> str:
    if isinstance(argument, fx.Node):
        return f"%{number[argument]}"
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_render_argument(a, number) for a in argument)}]"
    return str(argument)
