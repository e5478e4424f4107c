"""Trace a model over rows, and trace stage functions into graphs of named inputs.

A *rows graph* maps (weights, token, slot, position, cache_row, caches) to logits, with a symbolic number of rows.
A *stage graph* is a plain Python function of named tensors, traced on fake tensors with static shapes; running
a rows graph inside it specialises it to that number of rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from specc.contracts import TensorSpec
from specc.errors import InvariantError, SpeccError, UnsupportedError
from specc.graph import Input, StepGraph, drop_unused_inputs, prune
from specc.models.attention import CacheShape, attention_on_rows, probe_context, rows_context

logger = logging.getLogger(__name__)

ROW_INPUTS = ("token", "slot", "position", "cache_row", "reach")
_ASSERTS = frozenset(
    {
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten.sym_constrain_range_for_size.default,
    }
)


@dataclass(frozen=True)
class TracedModel:
    """A model as a rows graph, with its weights and the shape of its caches.

    ``weights`` holds the caller's own tensors, by their names in the module; names of tied weights all appear and
    share storage. Caches are named ``key.<layer>`` and ``value.<layer>``, each [slots, heads, capacity + 1, size].
    """

    graph: StepGraph
    weights: Mapping[str, Tensor]
    caches: Mapping[int, CacheShape]
    dtype: torch.dtype

    def cache_specs(self, slots: int, capacity: int) -> dict[str, TensorSpec]:
        """Return the caches of ``slots`` sequences of up to ``capacity`` tokens; the last row is scratch."""
        specs = {}
        for layer, shape in self.caches.items():
            lead = (slots, shape.heads, capacity + 1)
            specs[f"key.{layer}"] = TensorSpec((*lead, shape.key_size), self.dtype)
            specs[f"value.{layer}"] = TensorSpec((*lead, shape.value_size), self.dtype)
        return specs


class _OnRows(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        token: Tensor,
        slot: Tensor,
        position: Tensor,
        cache_row: Tensor,
        reach: Tensor,
        keys: dict[int, Tensor],
        values: dict[int, Tensor],
    ) -> Tensor:
        with rows_context(
            slot=slot,
            cache_row=cache_row,
            position=position,
            reach=reach,
            key_caches=keys,
            value_caches=values,
        ):
            out = self.model(input_ids=token[None], position_ids=position[None], use_cache=False)
        logits: Tensor = out.logits[0]
        return logits


def trace_model(model: nn.Module, name: str = "target") -> TracedModel:
    """Trace ``model`` over a symbolic number of rows.

    Args:
        model: a transformers causal LM in eval mode; it is left as it was.
        name: the prefix that its weights get in a step graph.

    Raises:
        UnsupportedError: the model does something that rows cannot express; says what.
    """
    begin = time.perf_counter()
    with attention_on_rows(model), torch.no_grad():
        caches = probe_caches(model)
        program = _export(model, caches, name)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    graph, weights = _lift(program, model, name)
    logger.info("traced %s: %d nodes, %.1f s", name, len(graph.graph.nodes), time.perf_counter() - begin)
    return TracedModel(graph, weights, caches, dtype)


def probe_caches(model: nn.Module) -> dict[int, CacheShape]:
    """Return the K/V shape of every layer, from one forward of three tokens without attention.

    It runs for real: experts check kernels by dtype, which fake tensors answer differently from the device.
    """
    with probe_context() as layers:
        token = torch.arange(3, device=next(model.parameters()).device)[None]
        try:
            model(input_ids=token, position_ids=token, use_cache=False)
        except SpeccError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be traced over rows",
                [f"{type(error).__name__}: {error}"],
            ) from error
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be traced over rows",
            ["no layer went through transformers' attention interface"],
        )
    return dict(sorted(layers.items()))


def _export(model: nn.Module, caches: Mapping[int, CacheShape], name: str) -> torch.export.ExportedProgram:
    weight = next(p for p in model.parameters() if p.is_floating_point())
    rows = 5
    keys = {i: weight.new_zeros(2, c.heads, 9, c.key_size) for i, c in caches.items()}
    values = {i: weight.new_zeros(2, c.heads, 9, c.value_size) for i, c in caches.items()}
    # One distinct tensor per input: export merges inputs that are the same object.
    example = [torch.arange(rows, device=weight.device) % 2 for _ in ROW_INPUTS]
    dynamic = {n: {0: torch.export.Dim.DYNAMIC} for n in ROW_INPUTS}
    static = dict.fromkeys(caches)
    try:
        return torch.export.export(
            _OnRows(model),
            (*example, keys, values),
            dynamic_shapes={**dynamic, "keys": static, "values": dict(static)},
            strict=False,
        )
    except SpeccError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedError(
            f"{name} ({type(model).__name__}) cannot be traced over rows",
            [f"{type(error).__name__}: {first}"],
        ) from error


def _lift(
    program: torch.export.ExportedProgram, model: nn.Module, name: str
) -> tuple[StepGraph, dict[str, Tensor]]:
    """Name every placeholder of an exported program and collect its weights as the caller's own tensors."""
    signature = program.graph_signature
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    weights: dict[str, Tensor] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in signature.inputs_to_parameters or node.name in signature.inputs_to_buffers:
            path = signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers[node.name]
            short = path.removeprefix("model.")
            weights[short] = own[short].detach()
            node.meta["input"] = Input(f"{name}.{short}", "weight")
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            path = signature.inputs_to_lifted_tensor_constants[node.name]
            short = "constant." + path.removeprefix("model.")
            weights[short] = program.constants[path].detach()
            node.meta["input"] = Input(f"{name}.{short}", "weight")
        elif node.name in ROW_INPUTS:
            node.meta["input"] = Input(node.name, "value")
        elif node.name.split("_")[0] in ("keys", "values"):
            kind, layer = node.name.split("_")
            node.meta["input"] = Input(f"{kind.removesuffix('s')}.{layer}", "state")
        else:
            raise InvariantError("an exported placeholder has no meaning", node.name, "trace")
    gm = fx.GraphModule(nn.Module(), program.graph)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _ASSERTS:
            gm.graph.erase_node(node)
    prune(gm.graph)
    gm.recompile()
    graph = StepGraph(gm, (), ("logits",), name=name)
    return drop_unused_inputs(graph), weights


class RowsModel:
    """A traced model with its weights and caches bound: call it on rows inside a stage function."""

    def __init__(self, graph: StepGraph, weights: Mapping[str, Tensor], caches: Mapping[str, Tensor]) -> None:
        self._graph, self._weights, self._caches = graph, weights, caches

    def __call__(
        self,
        token: Tensor,
        slot: Tensor,
        position: Tensor,
        cache_row: Tensor,
        reach: Tensor | None = None,
        logit_rows: Tensor | None = None,
        last: Tensor | None = None,
        path: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run the rows; returns the graph's outputs by name ("logits", "taps", ...).

        Args:
            token, slot, position, cache_row: int64 [rows].
            reach: int64 [rows], the length that chooses a row's rotary frequencies; None = position + 1.
            logit_rows: int64, the rows whose logits are wanted, when `slice_logits` ran.
            last, path: int64 [rows], what each row sees, when `follow_tree` ran: cache rows up to ``last`` and,
                behind it, those of its path's bits. None = up to its own row.
        """
        reach = position + 1 if reach is None else reach
        given = dict(zip(ROW_INPUTS, (token, slot, position, cache_row, reach), strict=True)) | {
            "logit_rows": logit_rows,
            "last": cache_row if last is None else last,
            "path": torch.zeros_like(cache_row) if path is None else path,
        }
        arguments = []
        for item in self._graph.inputs:
            if item.kind == "weight":
                arguments.append(self._weights[item.name])
            elif item.kind == "state":
                arguments.append(self._caches[item.name])
            else:
                value = given[item.name]
                assert value is not None, f"this rows graph needs {item.name}"
                arguments.append(value)
        outputs = fx.Interpreter(self._graph.gm).run(*arguments)
        return dict(zip(self._graph.outputs, outputs, strict=True))


StageFunction = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class Tracer:
    """Makes stage graphs under one fake mode, so that their values can be stitched into one graph."""

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode()
        self.device = device

    def fake(self, spec: TensorSpec) -> Tensor:
        with self.mode:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)

    def trace(self, name: str, function: StageFunction, inputs: Mapping[Input, TensorSpec]) -> StepGraph:
        """Trace ``function`` of named tensors; inputs that it does not read are left out of the graph."""
        given = list(inputs)
        outputs: list[str] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            with _no_python_values():
                result = function({i.name: t for i, t in zip(given, tensors, strict=True)})
            outputs[:] = list(result)
            return list(result.values())

        fakes = [self.fake(spec) for spec in inputs.values()]
        with self.mode, torch.no_grad(), fx.traceback.preserve_node_meta():
            gm = make_fx(flat, tracing_mode="real", pre_dispatch=True)(*fakes)
        for item, node in zip(given, gm.graph.find_nodes(op="placeholder"), strict=True):
            node.meta["input"] = item
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.meta["stage"] = name
                node.meta.setdefault("val", None)  # operators that return nothing
        prune(gm.graph)
        return drop_unused_inputs(StepGraph(gm, (), tuple(outputs), name=name))


@contextmanager
def _no_python_values() -> Iterator[None]:
    """Turn "a tensor's value was needed in Python" into an error that says what it means here."""
    try:
        yield
    except (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            "this stage cannot be traced",
            [f"it needs a tensor's value in Python: {error}"],
            "Write it with tensor operations only: no item(), no boolean indexing, no branches on values.",
        ) from error
