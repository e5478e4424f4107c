"""Load packages: the public entry that needs neither transformers nor the code that traces models."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specc.artifact.manifest import Manifest
from specc.artifact.package import open_package, read_summary
from specc.backends import choose
from specc.contracts import (
    Draft,
    DrafterInfo,
    DraftsTree,
    Method,
    MethodContext,
    ModelInfo,
    Rows,
    TensorSpec,
    drafts_with,
)
from specc.device import resolve_device
from specc.errors import ArtifactError, InputError, UnknownNameError, UnsupportedError
from specc.files import read_path
from specc.methods import METHODS
from specc.runtime.arguments import read_arguments
from specc.runtime.compiled import Compiled
from specc.runtime.engine import Engine

_SUM = re.compile("[0-9a-f]{64}")

logger = logging.getLogger(__name__)


def load(
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    native_only: bool = False,
    sha256: str | None = None,
) -> Compiled:
    """Load a package that `Compiled.save` wrote.

    Args:
        path: the file.
        device: where to run; None = the current GPU where there is one, else the CPU.
        backend: as `specc.compile` takes it; the portable graphs are lowered by it. "auto" runs the package's native
            code where it has some for this machine; any other leaves that aside.
        native_only: refuse a package without native code for this machine, rather than lower its graphs here.
        sha256: the sum that the whole file must have; it pins what you load to what you trust.

    Raises:
        ArtifactError: the file is wrong or does not fit this machine; nothing of it was executed.
        InputError, UnknownNameError, UnsupportedError: the device or the backend cannot be used.
    """
    file = read_path("path", path)
    if sha256 is not None and not (isinstance(sha256, str) and _SUM.fullmatch(sha256.strip().lower())):
        raise InputError("sha256", sha256, "64 hexadecimal digits")
    place = resolve_device(device)
    if native_only and backend != "auto":
        raise InputError("backend", backend, "'auto' with native_only: native code is lowered already")
    chosen = None if backend == "auto" else choose(backend, place)
    package = open_package(file, place, sha256=sha256)
    manifest = package.manifest
    for name, found, expected in _misfits(manifest):
        raise ArtifactError(file, f"manifest.json.{name}", found, expected)
    native = package.native(only=native_only) if chosen is None else None
    if native is not None:
        chosen = native, "the package's native code"
    runner, why = chosen or choose(backend, place)
    logger.info(
        "%s: method %s, block %d, backend %s (%s)",
        file.name,
        manifest.method,
        manifest.block,
        runner.name,
        why,
    )
    engine = Engine(package, runner, manifest.feed)
    method = METHODS.get(manifest.method) or PackagedMethod(
        manifest.method, manifest.default_block, manifest.taps
    )
    return Compiled(
        engine,
        method,
        manifest.block,
        manifest.accept,
        info=manifest.model,
        tokenizer=package.tokenizer,
        generation=manifest.generation,
        record=manifest.record,
    )


def _misfits(manifest: Manifest) -> Iterator[tuple[str, object, object]]:
    """Yield what the manifest says that no method, or no call of generate, could go with."""
    known, drafter = METHODS.get(manifest.method), manifest.drafter
    if known is not None and known.needs_drafter and drafter is None:
        yield "drafter", "none", f"the one that method {known.name} needs"
    if known is not None and drafter is not None and drafter.method != drafts_with(known):
        yield "drafter.method", drafter.method, f"{drafts_with(known)}, as method {known.name} takes"
    if known is not None and isinstance(known, DraftsTree) != (manifest.tree is not None):
        yield "tree", "none" if manifest.tree is None else "a tree", f"what method {known.name} drafts"
    try:
        read_arguments(
            [0], None, defaults=manifest.generation, generation_config=None, given={}, seed=0,
            accept=manifest.accept, vocab=manifest.model.vocab, capacity=manifest.shape.capacity,
        )  # fmt: skip
    except InputError as error:  # what is only not supported can be overridden by the caller
        yield f"generation.{error.argument}", error.given, error.allowed


@dataclass(frozen=True)
class PackagedMethod:
    """A user's own method, known by what a package says of it; its stages are graphs in the package."""

    name: str
    default_block: int
    packaged_taps: tuple[int, ...]
    needs_drafter: bool = False
    history: int = 0

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        return (f"method {self.name!r} is known from a package only",)

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        return None

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        return self.packaged_taps

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        raise self._unknown()

    def draft(self, context: MethodContext) -> Draft:
        raise self._unknown()

    def observe(self, context: MethodContext, rows: Rows) -> None:
        raise self._unknown()

    def _unknown(self) -> UnsupportedError:
        return UnsupportedError(
            f"method {self.name!r} cannot be traced", ["only its graphs are here, in a package"]
        )


@dataclass(frozen=True)
class PackageSummary:
    """What a package is, read without its weights."""

    path: str
    manifest: Manifest
    graph_by_stage: Mapping[str, str]

    def render(self, stage: str | None = None) -> str:
        """Return the stages of the greedy drafting step, or one of them, as text."""
        if stage is None:
            return "\n".join(self.graph_by_stage.values())
        if stage not in self.graph_by_stage:
            raise UnknownNameError("stage", stage, self.graph_by_stage)
        return self.graph_by_stage[stage]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary for JSON and for tables."""
        held = self.manifest
        files = {name: info.size_bytes for name, info in sorted(held.files.items())}
        return {
            "path": self.path, "specc": held.specc, "torch": held.torch, "saved on": asdict(held.made_on),
            "model": held.model.name, "model type": held.model.model_type, "dtype": str(held.model.dtype),
            "method": held.method, "block": held.block, "accept": held.accept, "taps": list(held.taps),
            "tree": None if held.tree is None else list(held.tree.parents),
            "drafter": None if held.drafter is None else f"{held.drafter.name} ({held.drafter.layout})",
            "slots": held.shape.slots, "max length": held.shape.capacity, "feed": held.feed,
            "settings": ["greedy", *("+".join(f) for f in held.families)],
            "tokenizer": any(n.startswith("tokenizer/") for n in files), "native": _native(held),
            "generation": dict(held.generation), "record": held.record,
            "memory": {"weights": held.weight_bytes, "state": held.state_bytes},
            "stages": [
                {"stage": e.stage, "block": e.key.block, "feed": e.key.feed, "rule": e.key.rule,
                 "settings": "+".join(e.key.families) or "greedy", "file": e.file}
                for e in held.stages
            ],
            "files": [{"file": n, "bytes": s, "sha256": held.files[n].sha256} for n, s in files.items()],
        }  # fmt: skip


def _native(held: Manifest) -> dict[str, Any] | None:
    """Return what a package's native code is and how large its files are, or None."""
    if held.native is None:
        return None
    sizes = {name: held.files[name].size_bytes for name in held.native.files}
    return {
        **asdict(held.native.key), "threads": held.native.threads, "bytes": sum(sizes.values()),
        "units": [{"unit": u.label, "file": u.library, "bytes": sizes[u.library]} for u in held.native.units],
    }  # fmt: skip


def inspect_package(path: str | Path) -> PackageSummary:
    """Return what a package is, checked but for the sum of its weights, which are not read.

    Raises:
        ArtifactError: the file is wrong.
    """
    manifest, text = read_summary(Path(path))
    return PackageSummary(str(path), manifest, text)


_: type[Method] = PackagedMethod  # mypy checks that it keeps the protocol
