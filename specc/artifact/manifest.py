"""The manifest of a package: what it is, what it needs, and the sum of every file."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, cast

import torch

from specc.artifact.fields import Fields, plain
from specc.artifact.native import Native, read_native, write_native
from specc.artifact.specs import read_spec, write_spec
from specc.contracts import ACCEPT_RULES, STAGES, AcceptRule, DrafterInfo, ModelInfo, Stage, TensorSpec
from specc.device import DeviceInfo
from specc.errors import InputError
from specc.pipeline import PassReport
from specc.step import Shape, StepKey
from specc.tree import MOST_DRAFTS, Tree

NAME = "manifest.json"
TEXT = "graph.txt"  # the main step, for people
FORMAT = "specc package"
FORMAT_VERSION = 1  # a higher one is refused; CHANGELOG.md says what each change means for old files
_HASH = re.compile(r"[0-9a-f]{64}")
_RULES = (*ACCEPT_RULES, "mixed")


@dataclass(frozen=True)
class FileInfo:
    """What the manifest says of another file of the package."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class StageEntry:
    """Which file holds a stage of the steps of ``key``."""

    stage: Stage
    key: StepKey
    file: str


@dataclass(frozen=True)
class MadeOn:
    """The device that a package was saved on; its portable part runs on others too."""

    kind: str
    name: str
    capability: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a package but the contents of its files.

    Attributes:
        specc, torch: versions that saved it, without local parts. feed: prompt rows per filling step.
        families: the settings families whose accept stage is in the package; others are traced when first
        used. record: the TuneRecord that chose the block, as JSON, or None. native: what native code it
        holds, or None. tree: the shape of its drafts, where they are a tree.
    """

    specc: str
    torch: str
    made_on: MadeOn
    method: str
    default_block: int
    block: int
    accept: AcceptRule
    taps: tuple[int, ...]
    shape: Shape
    feed: int
    model: ModelInfo
    drafter: DrafterInfo | None
    state: Mapping[str, TensorSpec]
    weights: Mapping[str, TensorSpec]
    stages: tuple[StageEntry, ...]
    families: tuple[tuple[str, ...], ...]
    passes: tuple[PassReport, ...]
    generation: Mapping[str, Any]
    record: Mapping[str, Any] | None
    files: Mapping[str, FileInfo]
    native: Native | None = None
    tree: Tree | None = None

    @property
    def weight_bytes(self) -> int:
        return sum(s.size_bytes for s in self.weights.values())

    @property
    def state_bytes(self) -> int:
        return sum(s.size_bytes for s in self.state.values())


def own_version() -> str:
    """Return the version of specc that is installed."""
    return importlib.metadata.version("specc")


def base_version(version: str) -> str:
    """Return a version without its local part ("2.13.0" of "2.13.0+cu130")."""
    return version.split("+")[0]


def made_on(device: DeviceInfo) -> MadeOn:
    return MadeOn(device.kind, device.name, device.capability)


def write_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as a JSON document."""
    values = {f.name: getattr(manifest, f.name) for f in fields(manifest)}
    values["model"] = _write_info(manifest.model)
    values["drafter"] = None if manifest.drafter is None else _write_info(manifest.drafter)
    values["shape"], values["made_on"] = asdict(manifest.shape), asdict(manifest.made_on)
    for name in ("state", "weights"):
        values[name] = {n: write_spec(s) for n, s in values[name].items()}
    values["stages"] = [{"stage": e.stage, "key": asdict(e.key), "file": e.file} for e in manifest.stages]
    # How long a pass took differs from run to run, and would make the bytes differ.
    values["passes"] = [
        {k: v for k, v in asdict(report).items() if k != "milliseconds"} for report in manifest.passes
    ]
    values["native"] = None if manifest.native is None else write_native(manifest.native)
    del values["tree"]
    if manifest.tree is not None:
        values["tree"] = list(manifest.tree.parents)
    values["files"] = {n: asdict(f) for n, f in manifest.files.items()}
    document: dict[str, Any] = plain({"format": FORMAT, "format_version": FORMAT_VERSION, **values})
    return document


def _write_info(info: ModelInfo | DrafterInfo) -> dict[str, Any]:
    values = {f.name: getattr(info, f.name) for f in fields(info)}
    if isinstance(info, ModelInfo):
        values["dtype"] = str(info.dtype).removeprefix("torch.")
    else:
        del values["config"]  # the layout's own object: only its reader understands it
    return values


def read_version(document: Fields) -> None:
    """Check format and format version, before anything else is read."""
    document.text("format", FORMAT)
    document.whole("format_version", FORMAT_VERSION, FORMAT_VERSION)


def read_files(document: Fields) -> dict[str, FileInfo]:
    """Return the list of files."""
    found = {}
    for name, item in document.named("files"):
        digest = item.text("sha256")
        if not _HASH.fullmatch(digest):
            raise item.fault("sha256", repr(digest)[:100], "64 hexadecimal digits")
        found[name] = FileInfo(digest, item.whole("size_bytes"))
        item.done()
    return found


def read_versions(document: Fields) -> tuple[str, str]:
    """Return the versions of specc and torch that saved the package, and refuse what this one cannot run.

    A newer torch is fine: the graphs are checked against its operators. An older one may lack what they mean.
    """
    saved, saved_torch = document.text("specc"), document.text("torch")
    own = ".".join(map(str, _parts(own_version())[:2]))
    if _parts(saved)[:2] != _parts(own_version())[:2]:
        raise document.fault("specc", saved, f"{own}, as installed")
    installed = _parts(base_version(torch.__version__))
    if _parts(saved_torch)[:1] != installed[:1] or _parts(saved_torch)[:2] > installed[:2]:
        raise document.fault(
            "torch",
            f"{saved_torch}, by which the package was saved",
            f"at most the installed {base_version(torch.__version__)}",
        )
    return saved, saved_torch


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(p) for p in re.findall(r"\d+", version)[:3])


def read_manifest(document: Fields, versions: tuple[str, str], files: Mapping[str, FileInfo]) -> Manifest:
    """Read what is left of the manifest after format, files and versions.

    Raises:
        ArtifactError: a field is missing, of the wrong type or outside its limits, or not known.
    """
    place = document.inner("made_on")
    saved_on = MadeOn(place.text("kind", "cpu", "cuda"), place.text("name"), place.text("capability"))
    place.done()
    size = document.inner("shape")
    switch = size.whole("switch") if size.optional("switch") else None
    shape = Shape(
        size.whole("slots", 1, 1 << 16), size.whole("capacity", 2, 1 << 24), size.whole("vocab", 1), switch
    )
    size.done()
    drafter = _read_drafter(document.inner("drafter")) if document.optional("drafter") else None
    record = document.mapping("record") if document.optional("record") else None
    native = read_native(document.inner("native"), files) if document.optional("native") else None
    manifest = Manifest(
        specc=versions[0],
        torch=versions[1],
        made_on=saved_on,
        method=document.text("method"),
        default_block=document.whole("default_block", 0, 1 << 16),
        block=document.whole("block", 0, 1 << 16),
        accept=cast("AcceptRule", document.text("accept", *ACCEPT_RULES)),
        taps=document.wholes("taps"),
        shape=shape,
        feed=document.whole("feed", 1, 1 << 20),
        model=_read_model(document.inner("model")),
        drafter=drafter,
        state=MappingProxyType({n: read_spec(f) for n, f in document.named("state")}),
        weights=MappingProxyType({n: read_spec(f) for n, f in document.named("weights")}),
        stages=tuple(_read_stage(f, files) for f in document.objects("stages")),
        families=tuple(_texts(document, f) for f in document.items("families")),
        passes=tuple(_read_report(f) for f in document.objects("passes")),
        generation=MappingProxyType(document.mapping("generation")),
        record=record,
        files=files,
        native=native,
        tree=_read_tree(document) if document.has("tree") else None,
    )
    document.done()
    return manifest


def _read_tree(document: Fields) -> Tree:
    parents = document.wholes("tree", 0, MOST_DRAFTS)
    try:
        return Tree(parents)
    except InputError as error:
        raise document.fault("tree", error.given, error.allowed) from error


def _texts(document: Fields, value: object) -> tuple[str, ...]:
    return Fields(document.path, document.name, {"families": value}).texts("families")


def _read_stage(item: Fields, files: Mapping[str, FileInfo]) -> StageEntry:
    stage, file = item.text("stage", *STAGES), item.text("file")
    if file not in files:
        raise item.fault("file", file, "a file of the package")
    key = item.inner("key")
    item.done()
    key.text("part", "whole")
    made = StepKey(
        block=key.whole("block", 0, 1 << 16),
        feed=key.whole("feed", 0, 1 << 20),
        rule=cast("Any", key.text("rule", *_RULES)),
        families=key.texts("families"),
        extras=key.texts("extras"),
    )
    key.done()
    return StageEntry(cast("Stage", stage), made, file)


def _read_report(item: Fields) -> PassReport:
    report = PassReport(
        item.text("name"), item.whole("nodes_before"), item.whole("nodes_after"),
        item.whole("weight_bytes_before"), item.whole("weight_bytes_after"), 0.0, item.text("note"),
    )  # fmt: skip
    item.done()
    return report


def _read_model(item: Fields) -> ModelInfo:
    dtypes = {
        str(d).removeprefix("torch."): d
        for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    }
    info = ModelInfo(
        name=item.text("name"), model_type=item.text("model_type"), layers=item.whole("layers"),
        hidden=item.whole("hidden"), vocab=item.whole("vocab", 1),
        tokenizer_vocab=item.whole("tokenizer_vocab") if item.optional("tokenizer_vocab") else None,
        max_position=item.whole("max_position"), heads=item.whole("heads"), kv_heads=item.whole("kv_heads"),
        head_dim=item.whole("head_dim"), tied_head=item.flag("tied_head"),
        dtype=dtypes[item.text("dtype", *dtypes)], config=item.mapping("config"),
    )  # fmt: skip
    item.done()
    return info


def _read_drafter(item: Fields) -> DrafterInfo:
    numbers = {
        name: item.whole(name) if item.optional(name) else None
        for name in ("target_hidden", "target_vocab", "max_position", "block", "mask_token", "proposed")
    }
    info = DrafterInfo(
        name=item.text("name"),
        method=item.text("method"),
        layout=item.text("layout"),
        hidden=item.whole("hidden"),
        vocab=item.whole("vocab"),
        taps=item.wholes("taps"),
        **numbers,
    )
    item.done()
    return info
