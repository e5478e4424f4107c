"""Write stage graphs as JSON and read them back: the same graph gives the same bytes, and nothing is trusted.

A graph is its named inputs with their specs, then calls of allowed operators, then its outputs. Only inputs
and outputs have specs in the file: those of other values are found by running the operators on fake
tensors, when a graph is first used, which also checks their arguments. No stack traces, no paths, no
Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from specc.artifact.fields import Fields
from specc.artifact.operators import find, name_of
from specc.artifact.specs import read_spec, spec_of, spec_text, write_spec
from specc.contracts import STAGES, Stage, TensorSpec
from specc.errors import ArtifactError, InvariantError, UnsupportedError
from specc.graph import Input, Kind, StepGraph
from specc.pipeline import check_always

MAX_NODES = 1 << 20
_ENUMS: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "dtype": (torch.dtype, {n: v for n, v in vars(torch).items() if isinstance(v, torch.dtype)}),
    "layout": (torch.layout, {"strided": torch.strided}),
    "memory_format": (
        torch.memory_format,
        {n: getattr(torch, n) for n in ("contiguous_format", "preserve_format", "channels_last")},
    ),
}
_FLOATS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
MAIN = "main"  # the device that the package runs on
_MAIN = object()  # stands for it in a StoredGraph


def write_graph(graph: StepGraph, device: torch.device) -> dict[str, Any]:
    """Return a stage graph as a JSON document.

    Args:
        graph: a stage graph.
        device: the one it was traced on; the file calls it "main".

    Raises:
        UnsupportedError: it calls an operator, or passes an argument, that a package cannot hold.
    """
    number = {node: index for index, node in enumerate(graph.graph.nodes)}
    operators: dict[str, int] = {}
    inputs, nodes = [], []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            given: Input = node.meta["input"]
            spec = write_spec(spec_of(node.meta["val"]))
            inputs.append({"name": given.name, "kind": given.kind, "storage": given.storage, **spec})
        elif node.op == "call_function":
            name = name_of(node.target)
            if name is None:
                raise UnsupportedError(
                    "a package cannot hold this step",
                    [f"it calls {node.target}, which packages do not allow"],
                )
            call: list[Any] = [operators.setdefault(name, len(operators))]
            call.append([_write(a, number, device) for a in node.args])
            if node.kwargs:
                # Pairs, not an object: sorted keys would lose their order.
                call.append([[k, _write(a, number, device)] for k, a in node.kwargs.items()])
            nodes.append(call)
        elif node.op != "output":
            raise InvariantError("a stage holds only operator calls", node)
    outputs = []
    for name, made in zip(graph.outputs, cast("list[fx.Node]", graph.output_node().args[0]), strict=True):
        outputs.append({"name": name, "node": number[made], **write_spec(spec_of(made.meta["val"]))})
    return {
        "stage": graph.name,
        "operators": list(operators),
        "inputs": inputs,
        "nodes": nodes,
        "outputs": outputs,
    }


def _write(value: Any, number: Mapping[fx.Node, int], device: torch.device) -> Any:
    if isinstance(value, fx.Node):
        return {"node": number[value]}
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        text = repr(value)
        return {"float": text} if text in _FLOATS else value
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, list | tuple):
        return [_write(v, number, device) for v in value]
    if isinstance(value, torch.device):
        is_main = value.type == device.type and value.index in (None, device.index)
        if is_main or value.type == "cpu":
            return {"device": MAIN if is_main else "cpu"}
    for name, (kind, known) in _ENUMS.items():
        if isinstance(value, kind):
            for text, item in known.items():
                if item is value:
                    return {name: text}
    raise UnsupportedError("a package cannot hold this step", [f"an operator's argument is {value!r}"])


@dataclass(frozen=True)
class _Ref:
    """An argument that is an earlier node's result, by the node's number."""

    node: int


@dataclass(frozen=True)
class StoredGraph:
    """A stage graph as a file says it: every name, argument and reference checked, no operator run yet.

    Nodes are numbered through: the inputs first, then the calls (operator, arguments, named arguments).
    """

    path: Path
    name: str
    stage: Stage
    inputs: tuple[tuple[Input, TensorSpec], ...]
    calls: tuple[tuple[Any, Any, Any], ...]
    outputs: tuple[tuple[str, int, TensorSpec], ...]

    def check_inputs(self, allowed: Callable[[Input], TensorSpec | None]) -> None:
        """Raise ArtifactError unless every input has its allowed spec; values of earlier stages aside."""
        for given, spec in self.inputs:
            expected = allowed(given)
            if given.kind != "value" and spec != expected:
                known = spec_text(expected) if expected else "an input that this package declares"
                raise ArtifactError(self.path, f"{self.name}: {given.name}", spec_text(spec), known)

    def build(self, device: torch.device, mode: FakeTensorMode) -> StepGraph:
        """Return the graph, the specs of its values found by running its operators on fake tensors.

        Raises:
            ArtifactError: an operator refuses its arguments, or an output is not what the file says.
        """
        graph = fx.Graph()
        made: list[fx.Node] = []
        with mode, torch.no_grad():
            for given, spec in self.inputs:
                node = graph.placeholder(given.name.replace(".", "_"))
                node.meta = {"input": given, "val": torch.empty(spec.shape, dtype=spec.dtype, device=device)}
                made.append(node)
            for target, arguments, keywords in self.calls:
                made.append(
                    self._call(graph, target, _bind(arguments, made, device), _bind(keywords, made, device))
                )
        for name, index, spec in self.outputs:
            value = made[index].meta["val"]
            found = spec_text(spec_of(value)) if isinstance(value, Tensor) else type(value).__name__
            if found != spec_text(spec):
                raise ArtifactError(self.path, f"{self.name}.outputs {name}", found, spec_text(spec))
        graph.output([made[index] for _, index, _ in self.outputs]).meta["val"] = None
        names = tuple(name for name, _, _ in self.outputs)
        step = StepGraph(fx.GraphModule(nn.Module(), graph), (), names, name=self.stage).sync()
        try:
            check_always(step)
        except (InvariantError, RuntimeError) as error:
            raise ArtifactError(
                self.path, f"{self.name}.nodes", str(error), "a graph that keeps the rules"
            ) from error
        return step

    def _call(self, graph: fx.Graph, target: Any, arguments: Any, keywords: Any) -> fx.Node:
        fakes = fx.map_arg((arguments, keywords), lambda n: n.meta["val"])
        try:
            value = _item(*fakes[0]) if target is operator.getitem else target(*fakes[0], **fakes[1])
        except Exception as error:
            # Whatever an operator says about wrong arguments is a fault of the file.
            found = f"{target}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise ArtifactError(
                self.path, f"{self.name}.nodes", found[:300], "arguments that it takes"
            ) from error
        node = graph.call_function(target, tuple(arguments), keywords)
        node.meta = {"val": value, "stage": self.stage}
        return node


def _item(values: Any, index: Any) -> Any:
    """Return one of an operator's results: in graphs, ``getitem`` means nothing else."""
    if not isinstance(values, list | tuple) or type(index) is not int:
        raise TypeError("only an operator's list of results has items")
    return values[index]


def _bind(value: Any, made: Sequence[fx.Node], device: torch.device) -> Any:
    if isinstance(value, _Ref):
        return made[value.node]
    if isinstance(value, list):
        return [_bind(v, made, device) for v in value]
    if isinstance(value, dict):
        return {k: _bind(v, made, device) for k, v in value.items()}
    return device if value is _MAIN else value


def read_graph(fields: Fields) -> StoredGraph:
    """Read a graph's document.

    Args:
        fields: the document.

    Raises:
        ArtifactError: it names an operator, an input or a node that it must not, or is malformed.
    """
    stage = cast("Stage", fields.text("stage", *STAGES))
    operators = [_operator(fields, name) for name in fields.texts("operators")]
    inputs = tuple(_input(item) for item in fields.objects("inputs"))
    items = fields.items("nodes")
    total = len(inputs) + len(items)
    if total > MAX_NODES:
        raise fields.fault("nodes", total, f"at most {MAX_NODES}")
    calls = tuple(
        _read_call(fields, item, operators, len(inputs) + index) for index, item in enumerate(items)
    )
    outputs = tuple(
        (item.text("name"), item.whole("node", 0, total - 1), read_spec(item))
        for item in fields.objects("outputs")
    )
    fields.done()
    names = [name for name, _, _ in outputs]
    if len(set(names)) != len(names):
        raise fields.fault("outputs", names, "every name once")
    return StoredGraph(fields.path, fields.name, stage, inputs, calls, outputs)


def _operator(fields: Fields, name: str) -> Any:
    found = find(name)
    if found is None:
        raise fields.fault("operators", repr(name)[:200], "operators that packages may call")
    return found


def _input(item: Fields) -> tuple[Input, TensorSpec]:
    given = Input(item.text("name"), cast("Kind", item.text("kind", *get_args(Kind))), item.text("storage"))
    return given, read_spec(item)


def _read_call(fields: Fields, call: Any, operators: Sequence[Any], number: int) -> tuple[Any, Any, Any]:
    """Return one call; ``number`` is its own, so its arguments stand before it."""
    is_call = isinstance(call, list) and len(call) in (2, 3) and type(call[0]) is int
    is_call = is_call and all(isinstance(part, list) for part in call[1:])
    if not is_call or not 0 <= call[0] < len(operators):
        raise fields.fault(
            "nodes", repr(call)[:200], "an operator's index, its arguments, its named arguments"
        )
    arguments = [_read(fields, a, number) for a in call[1]]
    keywords: dict[str, Any] = {}
    for pair in call[2] if len(call) == 3 else []:
        is_pair = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
        if not is_pair or not pair[0].isidentifier() or pair[0] in keywords:
            raise fields.fault("nodes", repr(pair)[:200], "named arguments, every name once")
        keywords[pair[0]] = _read(fields, pair[1], number)
    return operators[call[0]], arguments, keywords


def _read(fields: Fields, value: Any, number: int, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return value
    if isinstance(value, list) and depth < 3:
        return [_read(fields, v, number, depth + 1) for v in value]
    if isinstance(value, dict) and len(value) == 1:
        ((kind, given),) = value.items()
        if kind == "node" and type(given) is int and 0 <= given < number:
            return _Ref(given)
        if kind == "text" and isinstance(given, str):
            return given
        if kind == "float" and isinstance(given, str) and given in _FLOATS:
            return _FLOATS[given]
        if kind == "device" and given in (MAIN, "cpu"):
            return _MAIN if given == MAIN else torch.device("cpu")
        if kind in _ENUMS and isinstance(given, str) and given in _ENUMS[kind][1]:
            return _ENUMS[kind][1][given]
    raise fields.fault("nodes", repr(value)[:200], "an argument, or a node that stands before")
