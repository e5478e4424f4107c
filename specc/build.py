"""Put target, method, drafter, passes and backend together: from models to step graphs that run.

The only place where methods, passes and backends meet. A `StepBuilder` makes one step graph per `StepKey`; the stages
are traced once each and kept, so that a new family of settings traces and compiles the accept stage alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specc.backends import choose as choose
from specc.contracts import (
    STAGES,
    DrafterBundle,
    DrafterInfo,
    DraftsTree,
    Method,
    ModelInfo,
    Stage,
    TensorSpec,
)
from specc.errors import UnsupportedError
from specc.graph import Input, StepGraph
from specc.models.info import embed_module, embed_transform, final_logit_transform, head_module
from specc.models.paths import layer_paths, path_of
from specc.passes import STEP_PIPELINE, rows_pipeline
from specc.passes.functionalize import functionalize
from specc.passes.replace_foreign_ops import replace_foreign_ops
from specc.pipeline import PassReport, run_passes
from specc.step import (
    Parts,
    Shape,
    StepKey,
    accept_stage,
    commit_stage,
    draft_stage,
    setting_specs,
    state_specs,
    verify_stage,
)
from specc.stitch import BuiltStep, assemble, relevant, stage_inputs
from specc.trace import RowsModel, TracedModel, Tracer, trace_model
from specc.tree import Tree

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A target ready to be built on: its module, facts, trace, and where its embedding, head and layers sit.

    Several builders can share one: nothing writes to it.
    """

    module: nn.Module
    info: ModelInfo
    traced: TracedModel
    embed_path: str  # module paths
    head_path: str
    layer_paths: tuple[str, ...]
    embed_transform: Callable[[Tensor], Tensor]  # scale after the embedding; identity for most
    logit_transform: Callable[[Tensor], Tensor]  # softcap or scale after the head; identity for most


def make_target(module: nn.Module, info: ModelInfo) -> Target:
    """Return ``module`` as a target: traced over rows, its parts found."""
    return Target(
        module,
        info,
        trace_model(module),
        path_of(module, embed_module(module)),
        path_of(module, head_module(module)),
        layer_paths(module, info.layers),
        embed_transform(module),
        final_logit_transform(module),
    )


@dataclass(frozen=True)
class Drafter:
    """A drafter ready to be built on: a module of specc's, or a causal LM to be traced over rows."""

    info: DrafterInfo
    module: nn.Module
    traced: TracedModel | None = None


def make_drafter(bundle: DrafterBundle) -> Drafter:
    """Return a drafter to build with; a causal LM is traced over rows like a target."""
    if bundle.info.method != "draft_model":
        return Drafter(bundle.info, bundle.module)
    traced = trace_model(bundle.module, "drafter")
    graph, _ = run_passes(traced.graph, rows_pipeline((), (), bundle.info.hidden))
    return Drafter(bundle.info, bundle.module, replace(traced, graph=graph))


# What ``disable`` may name.
PASS_NAMES = tuple(p.name for p in (*rows_pipeline((), (), 0, follows_tree=True), *STEP_PIPELINE))


@dataclass
class StepBuilder:
    """Builds the step graphs of one compiled object.

    Attributes:
        target, method, drafter, shape: what is built.
        disable: names of passes to leave out.
        dump: a folder for graphs as text, or None.
    """

    target: Target
    method: Method
    drafter: Drafter | None
    shape: Shape
    disable: Sequence[str] = ()
    dump: Path | None = None
    traced: TracedModel = field(init=False)
    rows_reports: tuple[PassReport, ...] = field(init=False)
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.device = next(self.target.module.parameters()).device
        self._trees: dict[int, Tree] = {}
        needed = {"insert_taps": bool(self.taps), "follow_tree": isinstance(self.method, DraftsTree)}
        for name in self.disable:
            if needed.get(name):
                raise UnsupportedError(
                    f"disable_passes with {name!r} and method {self.method.name!r}",
                    ["the method needs what this pass makes of the target"],
                    "Disable another pass, or take another method.",
                )
        traced = self.target.traced
        known = {p.name for p in STEP_PIPELINE}
        passes = rows_pipeline(
            self.taps,
            self.target.layer_paths,
            self.target.info.hidden,
            follows_tree=isinstance(self.method, DraftsTree),
        )
        known |= set(PASS_NAMES) - {p.name for p in passes}  # one that this method has no use for
        graph, self.rows_reports = run_passes(
            traced.graph.copy(), passes, disable=[n for n in self.disable if n not in known], dump=self.dump
        )
        self.traced = replace(traced, graph=graph)
        self._tracer = Tracer(self.device)
        self._stages: dict[tuple[Stage, StepKey], StepGraph] = {}
        self.weights = self._collect_weights()
        self._storage = share(self.weights)
        self.method_specs = {
            f"method.{name}": spec
            for name, spec in self.method.state(
                self.target.info, self._drafter_for_state(), self.shape.slots, self.shape.capacity
            ).items()
        }

    @property
    def target_info(self) -> ModelInfo:
        """The facts of the target."""
        return self.target.info

    @property
    def drafter_info(self) -> DrafterInfo | None:
        """The facts of the drafter, if there is one."""
        return self.drafter.info if self.drafter is not None else None

    @property
    def taps(self) -> tuple[int, ...]:
        """The target states that the method reads, each "after j layers"."""
        return tuple(self.method.taps(self.target.info, self.drafter_info))

    def tree(self, block: int) -> Tree | None:
        """Return the shape of a draft of ``block`` tokens, or None where it is a chain.

        Raises:
            UnsupportedError: this target cannot verify a tree of that shape.
        """
        if not block or not isinstance(self.method, DraftsTree):
            return None
        if block in self._trees:
            return self._trees[block]
        tree = self.method.tree(block)
        windows = [c.window for c in self.traced.caches.values() if c.window is not None]
        if min(windows, default=tree.height + 1) <= tree.height:
            raise UnsupportedError(
                f"method {self.method.name!r} cannot run this target",
                [f"a path of {tree.height} drafts reaches past its sliding window of {min(windows)}"],
                "Give a smaller block.",
            )
        self._trees[block] = tree
        return tree

    def state(self) -> dict[str, TensorSpec]:
        """Return every state tensor of the step, the method's and the caches included."""
        caches = self.traced.cache_specs(self.shape.slots, self.shape.capacity)
        return state_specs(self.shape) | {f"cache.{n}": s for n, s in caches.items()} | self.method_specs

    def step(self, key: StepKey) -> BuiltStep:
        """Build the step graph of ``key``: stages traced, stitched and rewritten by the passes."""
        stages = [self.stage(stage, key) for stage in STAGES]
        return assemble(stages, key, self.disable, self.dump)

    def _collect_weights(self) -> dict[str, Tensor]:
        weights = {f"target.{n}": t for n, t in self.traced.weights.items()}
        own: dict[str, Tensor] = dict(self.target.module.named_parameters(remove_duplicate=False))
        own |= dict(self.target.module.named_buffers(remove_duplicate=False))
        for path in (self.target.embed_path, self.target.head_path):
            weights |= {f"target.{n}": t.detach() for n, t in own.items() if n.startswith(f"{path}.")}
        if self.drafter is not None:
            if self.drafter.traced is not None:
                weights |= {f"drafter.{n}": t for n, t in self.drafter.traced.weights.items()}
            else:
                named: dict[str, Tensor] = dict(self.drafter.module.named_parameters(remove_duplicate=False))
                named |= dict(self.drafter.module.named_buffers(remove_duplicate=False))
                weights |= {f"drafter.{n}": t.detach() for n, t in named.items()}
        return weights

    def _drafter_for_state(self) -> Any:
        if self.drafter is None:
            return None
        return self.drafter.traced if self.drafter.traced is not None else self.drafter.module

    def stage(self, stage: Stage, key: StepKey) -> StepGraph:
        """Return one stage of the step of ``key``, traced once for all keys that agree on what it reads."""
        kept = relevant(stage, key)
        if (stage, kept) not in self._stages:
            traced = self._tracer.trace(stage, self._function(stage, kept), self._inputs(stage, key))
            # An MTP drafter runs a layer of the target's family as transformers wrote it, in-place operators included.
            self._stages[stage, kept] = replace_foreign_ops.run(functionalize.run(traced)).sync()
        return self._stages[stage, kept]

    def _function(self, stage: Stage, key: StepKey) -> Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]:
        parts, shape, method, tree = self._parts(), self.shape, self.method, self.tree(key.block)
        functions: dict[Stage, Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]] = {
            "draft": lambda v: draft_stage(v, key, shape, method, parts, tree),
            "verify": lambda v: verify_stage(v, key, shape, parts, tree),
            "accept": lambda v: accept_stage(v, key, shape, tree),
            "commit": lambda v: commit_stage(v, key, shape, method, parts, tree),
        }
        return functions[stage]

    def _inputs(self, stage: Stage, key: StepKey) -> dict[Input, TensorSpec]:
        """Return all that a stage may read; what it does not read is dropped from its graph.

        ``key`` is the whole step's, so that earlier stages are the ones that this step has anyway.
        """
        specs = dict(self.state())
        specs |= setting_specs(self.shape, key.families)
        if key.feed:
            specs |= {n: TensorSpec((key.feed,), torch.int64) for n in ("feed.slot", "feed.position")}
        specs |= {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in self.weights.items()}
        earlier = [self.stage(name, key) for name in STAGES[: STAGES.index(stage)]]
        return stage_inputs(specs, self._storage, earlier)

    def _parts(self) -> Parts:
        target, drafter = self.target, self.drafter

        def run_target(
            v: Mapping[str, Tensor], token: Tensor, slot: Tensor, position: Tensor, cache_row: Tensor, reach: Tensor,
            logit_rows: Tensor, last: Tensor | None = None, path: Tensor | None = None,
        ) -> Mapping[str, Tensor]:  # fmt: skip
            model = RowsModel(self.traced.graph, v, _strip(v, "cache."))
            return model(token, slot, position, cache_row, reach, logit_rows, last, path)

        def run_drafter(v: Mapping[str, Tensor], run: Callable[[object], object]) -> object:
            if drafter is None:
                return run(None)
            if drafter.traced is not None:
                return run(RowsModel(drafter.traced.graph, v, _strip(v, "method.")))
            return call_with(drafter.module, _strip(v, "drafter."), run)

        def embed(v: Mapping[str, Tensor], ids: Tensor) -> Tensor:
            module = target.module.get_submodule(target.embed_path)
            out: Tensor = call_with(module, _strip(v, f"target.{target.embed_path}."), lambda m: m(ids))
            return target.embed_transform(out)

        def head(v: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
            module = target.module.get_submodule(target.head_path)
            out: Tensor = call_with(module, _strip(v, f"target.{target.head_path}."), lambda m: m(hidden))
            return target.logit_transform(out)

        limit = drafter.info.max_position if drafter is not None else None
        return Parts(run_target, run_drafter, embed, head, limit)


def _strip(values: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in values.items() if n.startswith(prefix)}


class _Call(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[Any], Any]) -> Any:
        return function(self.module)


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], function: Callable[[Any], Any]) -> Any:
    """Call ``function(module)`` while the module's parameters and buffers are ``tensors``."""
    return torch.func.functional_call(
        _Call(module), {f"module.{n}": t for n, t in tensors.items()}, (function,)
    )


def share(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return, per weight, the first name of the memory it views: equal memory, equal answer."""
    first: dict[tuple[Any, ...], str] = {}
    names = {}
    for name, tensor in weights.items():
        place = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )
        names[name] = first.setdefault(place, name) if tensor.numel() else name
    return names
