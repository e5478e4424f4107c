"""Open a package: check it in a fixed order, then be a source of steps for an engine.

Structure, format version, list and sums of files, versions, and only then contents. Nothing of a package is
executed by opening it, and an error leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from specc.artifact import manifest as manifests
from specc.artifact import tokenizer as tokenizers
from specc.artifact.agreement import misfits
from specc.artifact.container import Container
from specc.artifact.fields import Fields, read_json
from specc.artifact.graphs import StoredGraph, read_graph
from specc.artifact.manifest import FileInfo, Manifest, StageEntry
from specc.artifact.specs import spec_text
from specc.artifact.weights import NAME as WEIGHTS
from specc.artifact.weights import read_weights
from specc.backends.aot import Aot
from specc.contracts import STAGES, DrafterInfo, ModelInfo, Stage, TensorSpec
from specc.device import describe
from specc.errors import ArtifactError, SpeccError, UnsupportedError
from specc.graph import Input, StepGraph, drop_unused_inputs, prune
from specc.pipeline import PassReport
from specc.step import RECORD, Shape, StepKey, setting_specs
from specc.stitch import BuiltStep, assemble, kind_of, relevant, stage_inputs
from specc.tree import Tree

logger = logging.getLogger(__name__)


@dataclass
class Package:
    """An opened package: gives an engine its steps, as a `StepBuilder` does for a traced model.

    Attributes:
        path: where it was read from.
        manifest: what it says of itself.
        device: where its steps run.
        weights: by name, mapped from the file on a CPU.
        tokenizer: a `PackageTokenizer`, or None.
    """

    path: Path
    manifest: Manifest
    device: torch.device
    weights: Mapping[str, Tensor]
    tokenizer: Any
    _container: Container
    _stages: Mapping[tuple[Stage, StepKey], StoredGraph]
    _mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    _built: dict[tuple[Stage, StepKey], StepGraph] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return self.manifest.shape

    @property
    def target_info(self) -> ModelInfo:
        return self.manifest.model

    @property
    def drafter_info(self) -> DrafterInfo | None:
        return self.manifest.drafter

    @property
    def taps(self) -> tuple[int, ...]:
        return self.manifest.taps

    @property
    def rows_reports(self) -> tuple[PassReport, ...]:
        """What those passes did before the package was saved; their time is not known any more."""
        return self.manifest.passes

    def tree(self, block: int) -> Tree | None:
        return self.manifest.tree if block else None

    def state(self) -> dict[str, TensorSpec]:
        return dict(self.manifest.state)

    def step(self, key: StepKey) -> BuiltStep:
        return assemble([self.stage(stage, key) for stage in key.stages], key)

    def stage(self, stage: Stage, key: StepKey) -> StepGraph:
        """Return a stored stage, or trace the accept stage of settings that the package has not met.

        Raises:
            ArtifactError: the stored graph does not work.
            UnsupportedError: the package does not hold it.
        """
        kept = relevant(stage, key)
        if (stage, kept) not in self._built:
            self._built[stage, kept] = self._make(stage, kept, key)
        return self._built[stage, kept]

    def _make(self, stage: Stage, kept: StepKey, key: StepKey) -> StepGraph:
        stored = self._stages.get((stage, _stored(stage, kept)))
        if stored is not None:
            graph = stored.build(self.device, self._mode)
            if stage != "verify" or "hidden" in kept.extras:
                return graph
            return _without(graph, "hidden" if self.tree(kept.block) is None else "verify.hidden")
        if stage == "accept":
            logger.info(
                "tracing the accept stage of %s: the package does not hold it", "+".join(key.families)
            )
            return self._trace_accept(key)
        held = sorted({f"block {k.block}, feed {k.feed}" for s, k in self._stages if s == stage})
        raise UnsupportedError(
            f"this package cannot run the {stage} stage of block {key.block}, feed {key.feed}",
            [f"it holds {'; '.join(held)}"],
            "Save the package with what is asked of it.",
        )

    def native(self, *, only: bool) -> Aot | None:
        """Return a backend that runs the package's native code; None where it has none for this machine.

        Args:
            only: refuse, rather than lower here what the package has no code for.

        Raises:
            ArtifactError: ``only``, and there is none.
        """
        held = self.manifest.native
        if held is None:
            if only:
                raise ArtifactError(self.path, "native", "none: a portable package", "native code")
            return None
        misfit = held.key.misfit(self.device)
        if misfit is not None:
            field, found, expected = misfit
            if only:
                raise ArtifactError(self.path, f"manifest.json.native.key.{field}", found, expected)
            logger.info(
                "%s: its native code is for another machine (%s: found %s, expected %s): "
                "the portable graphs are lowered again here",
                self.path.name, field, found, expected,
            )  # fmt: skip
            return None
        threads = torch.get_num_threads()
        if held.threads != threads:
            logger.info(
                "%s: the loops of its native code are split over %d threads, torch uses %d here",
                self.path.name, held.threads, threads,
            )  # fmt: skip
        return Aot(self.path, held.code, held.kernels, self._code, only)

    def _code(self, name: str) -> bytes:
        """Return a file of native code, checked once more: what is executed is what was summed."""
        content = bytes(self._container.content(name))
        digest, expected = hashlib.sha256(content).hexdigest(), self.manifest.files[name].sha256
        if digest != expected:
            raise ArtifactError(self.path, f"sha256 of {name}", digest, expected)
        return content

    def check(self) -> None:
        """Build every stored graph, which loading leaves to its first use; ArtifactError if one fails."""
        for entry in self.manifest.stages:
            self.stage(entry.stage, entry.key)

    def _trace_accept(self, key: StepKey) -> StepGraph:
        # Only here: a package whose settings are met runs without the tracer.
        from specc.step import accept_stage
        from specc.trace import Tracer

        tracer = Tracer(self.device)
        tracer.mode = self._mode
        given = self.state() | setting_specs(self.shape, key.families)
        earlier = [self.stage("draft", key), self.stage("verify", key)]
        return tracer.trace(
            "accept",
            lambda v: accept_stage(v, key, self.shape, self.tree(key.block)),
            stage_inputs(given, {}, earlier),
        )


def open_package(path: Path, device: torch.device, *, sha256: str | None = None) -> Package:
    """Check a package and map it.

    Args:
        path: the file.
        device: where its steps are to run.
        sha256: what the whole file's sum must be.

    Raises:
        ArtifactError: anything about it is wrong: names the field, what was found and what was expected.
    """
    container, document, files = _checked(path, sha256=sha256, skip=())
    versions = manifests.read_versions(document)
    manifest = manifests.read_manifest(document, versions, files)
    _say(manifest, path, device)
    place = container.entries[WEIGHTS]
    weights = read_weights(path, container.map, place.offset, place.size, manifest.weights)
    stages = _read_stages(path, container, manifest)
    tokenizer = None
    if tokenizers.TOKENIZER in files:
        config = read_json(path, tokenizers.CONFIG, container.content(tokenizers.CONFIG))
        tokenizer = tokenizers.read_tokenizer(path, container.content(tokenizers.TOKENIZER), config)
    if device.type != "cpu":
        weights = {n: t.to(device) for n, t in weights.items()}
    return Package(path, manifest, device, weights, tokenizer, container, stages)


def read_summary(path: Path) -> tuple[Manifest, dict[str, str]]:
    """Return a package's manifest, and its main step as text by stage.

    Everything is checked but the sum of the weights, which are not read, and whether its versions run here.

    Raises:
        ArtifactError: something is wrong.
    """
    container, document, files = _checked(path, sha256=None, skip=(WEIGHTS,))
    versions = document.text("specc"), document.text("torch")
    manifest = manifests.read_manifest(document, versions, files)
    name = manifests.TEXT
    text = bytes(container.content(name)).decode("utf-8", "replace") if name in files else ""
    parts = re.split(r"^(?=# )", text, flags=re.MULTILINE)
    return manifest, {part[2:].split(":")[0]: part for part in parts if part.startswith("# ")}


def _checked(
    path: Path, *, sha256: str | None, skip: tuple[str, ...]
) -> tuple[Container, Fields, dict[str, FileInfo]]:
    """Check structure, format version, every file's size and sum; return the manifest, not read further."""
    container = Container(path)
    if sha256 is not None:
        found = hashlib.sha256(container.map).hexdigest()
        if not hmac.compare_digest(found, sha256.strip().lower()):
            raise ArtifactError(path, "sha256 of the file", found, sha256)
    if manifests.NAME not in container.entries:
        raise ArtifactError(path, manifests.NAME, "no such file", "a manifest")
    container.check_crc(manifests.NAME)
    document = read_json(path, manifests.NAME, container.content(manifests.NAME))
    manifests.read_version(document)
    files = manifests.read_files(document)
    present = set(container.entries) - {manifests.NAME}
    for name in sorted(set(files) | present | {WEIGHTS}):
        if name not in present or name not in files:
            where = (
                "in the package only"
                if name in present
                else "in the manifest only"
                if name in files
                else "nowhere"
            )
            raise ArtifactError(path, f"file {name}", where, "in the package and in its manifest")
    for name, info in sorted(files.items()):
        if container.entries[name].size != info.size_bytes:
            raise ArtifactError(path, f"size of {name}", container.entries[name].size, info.size_bytes)
        if name in skip:
            continue
        digest = hashlib.sha256(container.content(name)).hexdigest()
        if digest != info.sha256:
            raise ArtifactError(path, f"sha256 of {name}", digest, info.sha256)
    return container, document, files


def _say(manifest: Manifest, path: Path, device: torch.device) -> None:
    """Log what differs from where the package was saved, and that the portable graphs are lowered here."""
    if manifest.native is not None and manifest.native.key.misfit(device) is None:
        return
    here, torch_here = describe(device), manifests.base_version(torch.__version__)
    saved = manifest.made_on
    differs = [
        f"{what} {new}, saved with {old}"
        for what, new, old in (
            ("device", here.name, saved.name),
            ("instruction set", here.capability, saved.capability),
            ("torch", torch_here, manifest.torch),
        )
        if new != old
    ]
    if differs:
        logger.info("%s: %s: the portable graphs are lowered again here", path.name, "; ".join(differs))


def _read_stages(
    path: Path, container: Container, manifest: Manifest
) -> dict[tuple[Stage, StepKey], StoredGraph]:
    """Read every graph, and check that the stages of each key fit together."""
    read: dict[str, StoredGraph] = {}
    stages: dict[tuple[Stage, StepKey], StoredGraph] = {}
    for entry in manifest.stages:
        if entry.file not in read:
            document = read_json(path, entry.file, container.content(entry.file))
            read[entry.file] = read_graph(document)
        if read[entry.file].stage != entry.stage:
            raise ArtifactError(path, f"{entry.file}.stage", read[entry.file].stage, entry.stage)
        read[entry.file].check_inputs(_allowed(path, manifest, entry.key))
        stages[entry.stage, entry.key] = read[entry.file]
    for entry in manifest.stages:
        _check_fit(manifest, entry, stages)
    for name, found, expected in misfits(manifest, set(stages)):
        raise ArtifactError(path, f"manifest.json.{name}", found, expected)
    return stages


def _allowed(path: Path, manifest: Manifest, key: StepKey) -> Callable[[Input], TensorSpec | None]:
    """Return what spec each input of a step of ``key`` must have; None for inputs unknown to the package."""
    try:
        given = dict(manifest.state) | setting_specs(manifest.shape, key.families)
    except (SpeccError, ValueError) as error:
        raise ArtifactError(
            path, "manifest.stages", str(error), "settings families of this version"
        ) from error
    if key.feed not in (0, manifest.feed):
        raise ArtifactError(path, "manifest.stages", f"feed {key.feed}", f"0 or {manifest.feed}")
    if key.feed:
        given |= {name: TensorSpec((key.feed,), torch.int64) for name in ("feed.slot", "feed.position")}

    def spec(item: Input) -> TensorSpec | None:
        if item.kind != kind_of(item.name):
            return None
        if item.kind == "weight":
            return manifest.weights.get(item.storage or item.name)
        return given.get(item.name)

    return spec


def _without(graph: StepGraph, name: str) -> StepGraph:
    """Take an output out of a graph, and what only that needed."""
    results = cast("list[fx.Node]", graph.output_node().args[0])
    kept = [(n, v) for n, v in zip(graph.outputs, results, strict=True) if n != name]
    graph.output_node().args = ([v for _, v in kept],)
    graph.outputs = tuple(n for n, _ in kept)
    prune(graph.graph)
    graph.gm.recompile()
    return drop_unused_inputs(graph)


def _check_fit(
    manifest: Manifest, entry: StageEntry, stages: Mapping[tuple[Stage, StepKey], StoredGraph]
) -> None:
    """Check that what a stage reads is made by earlier stages of its key, and that accept makes a record."""
    graph = stages[entry.stage, entry.key]
    made: dict[str, TensorSpec] = {}
    for stage in STAGES[: STAGES.index(entry.stage)]:
        earlier = stages.get((stage, _stored(stage, entry.key)))
        made |= {name: spec for name, _, spec in earlier.outputs} if earlier is not None else {}
    for given, spec in graph.inputs:
        if given.kind == "value" and made.get(given.name) != spec:
            expected = (
                spec_text(made[given.name]) if given.name in made else "a value that an earlier stage makes"
            )
            raise ArtifactError(graph.path, f"{entry.file}: {given.name}", spec_text(spec), expected)
    if entry.stage == "accept":
        reach = manifest.tree.height if manifest.tree is not None and entry.key.block else entry.key.block
        record = TensorSpec((manifest.shape.slots, len(RECORD) + reach + 1), torch.int64)
        found = {name: spec for name, _, spec in graph.outputs}.get("record")
        if found != record:
            raise ArtifactError(
                graph.path,
                f"{entry.file}: record",
                spec_text(found) if found else "nothing",
                spec_text(record),
            )


def _stored(stage: Stage, key: StepKey) -> StepKey:
    """Return the key under which a package holds a stage: verify always gives hidden states, too."""
    return relevant(stage, replace(key, extras=("hidden",)) if stage == "verify" else key)
