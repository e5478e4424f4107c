"""Save a compiled step as one file: stage graphs, weights once, tokenizer, settings, and a manifest.

Stages, not whole steps: draft, verify and commit depend on little of a step's key, so a few graphs serve
the whole family of steps, and they are stitched and rewritten at load by the code that does it after
tracing. The accept stage needs no model, so what is stored of it is a head start: a new family of settings
is traced when it is first used.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact import manifest as manifests
from specc.artifact.container import ContainerWriter
from specc.artifact.fields import plain, write_json
from specc.artifact.graphs import write_graph
from specc.artifact.manifest import FileInfo, Manifest, StageEntry
from specc.artifact.native import Native, compile_native
from specc.artifact.specs import spec_of
from specc.artifact.tokenizer import write_tokenizer
from specc.artifact.weights import NAME as WEIGHTS
from specc.artifact.weights import write_weights
from specc.contracts import STAGES, AcceptRule, Stage
from specc.device import describe
from specc.errors import InputError, UnsupportedError
from specc.files import writing
from specc.graph import StepGraph
from specc.step import StepKey
from specc.stitch import StepSource, relevant


@dataclass(frozen=True)
class Content:
    """What `save` puts into a package.

    Attributes:
        source: gives the stages, the weights and the state.
        families: settings families whose accept stage is stored, besides the greedy one.
        record: the TuneRecord that chose the block, or None.
    """

    source: StepSource
    method: str
    default_block: int
    block: int
    accept: AcceptRule
    feed: int
    families: tuple[tuple[str, ...], ...]
    tokenizer: Any
    generation: Mapping[str, Any]
    record: Any = None


def save(content: Content, path: Path, *, native: bool = False, force: bool = False) -> None:
    """Write a package beside ``path`` and rename it: ``path`` is always the old file or the new one.

    Args:
        content: what to save.
        path: where, as `files.check_new_file` returned it.
        native: also store native code for this device.
        force: replace a file that is there.

    Raises:
        InputError: the file cannot be written, or another came there in the meantime.
        UnsupportedError: something a package cannot hold, or native code that cannot be compiled.
    """
    graphs, entries = _stages(content)
    weights = _weights(content.source, [g for g, _ in graphs.values()])
    files: dict[str, Iterable[bytes | memoryview]] = {n: [text] for n, (_, text) in sorted(graphs.items())}
    files[manifests.TEXT] = [_people(content, entries, graphs).encode()]
    if content.tokenizer is not None:
        files |= {n: [data] for n, data in sorted(write_tokenizer(content.tokenizer).items())}
    code = None
    if native:
        code, libraries = compile_native(content.source, native_keys(content))
        files |= {n: [data] for n, data in sorted(libraries.items())}
    files[WEIGHTS] = write_weights(weights)
    with writing("path", path):
        _write(path, files, lambda sums: _manifest(content, entries, weights, sums, code), force=force)


def _write(
    path: Path,
    files: Mapping[str, Iterable[bytes | memoryview]],
    manifest: Callable[[Mapping[str, FileInfo]], Manifest],
    *,
    force: bool,
) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            writer = ContainerWriter(file)
            sums: dict[str, FileInfo] = {}
            for name, pieces in files.items():
                writer.add(name, _summed(pieces, sums, name))
            document = plain(manifests.write_manifest(manifest(sums)))
            try:
                text = write_json(document)
            except (TypeError, ValueError) as error:
                raise UnsupportedError("a package cannot hold these settings", [str(error)]) from error
            writer.add(manifests.NAME, [text])
            writer.close()
            file.flush()
            os.fsync(file.fileno())
        _rename(part, path, force=force)
    finally:
        part.unlink(missing_ok=True)


def _rename(part: Path, path: Path, *, force: bool) -> None:
    """Give the file its name; a file that came there in the meantime is not replaced without ``force``."""
    if not force:
        try:
            path.hardlink_to(part)
        except FileExistsError as error:
            raise InputError(
                "path", str(path), "a new file; pass force=True (--force) to replace one"
            ) from error
        except OSError:
            pass  # this file system has no hard links
        else:
            return
    part.replace(path)


def _summed(
    pieces: Iterable[bytes | memoryview], sums: dict[str, FileInfo], name: str
) -> Iterator[bytes | memoryview]:
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        yield piece
    sums[name] = FileInfo(digest.hexdigest(), size)


def step_keys(content: Content) -> list[StepKey]:
    """Return the keys of the steps that a package can run without tracing."""
    shapes = dict.fromkeys([(content.block, 0), (0, content.feed), (0, 0)])
    if content.source.shape.slots > 1:  # some slots draft while another's prompt is read
        shapes[content.block, content.feed] = None
    keys = []
    for block, feed in shapes:
        keys.append(StepKey(block, feed, content.accept))
        for families in content.families:
            # A request with another rule than the compiled one makes a step that holds both.
            keys += [StepKey(block, feed, rule, families) for rule in (content.accept, "mixed")]
    return keys


def native_keys(content: Content) -> list[StepKey]:
    """Return the keys of the steps that native code is written for: those of the saved rule.

    Steps that hold both rules at once are rare, and each would cost another accept unit.
    """
    return [key for key in step_keys(content) if key.rule == content.accept]


def _stages(content: Content) -> tuple[dict[str, tuple[StepGraph, bytes]], list[StageEntry]]:
    """Return the graphs by file name, equal ones once, and which file holds which stage."""
    graphs: dict[str, tuple[StepGraph, bytes]] = {}
    entries: dict[tuple[Stage, StepKey], StageEntry] = {}
    for key in step_keys(content):
        for stage in STAGES:
            kept = relevant(stage, replace(key, extras=("hidden",)) if stage == "verify" else key)
            if (stage, kept) in entries:
                continue
            graph = content.source.stage(stage, replace(key, extras=kept.extras))
            text = write_json(write_graph(graph, content.source.device))
            name = f"graphs/{stage}_{hashlib.sha256(text).hexdigest()[:12]}.json"
            graphs[name] = (graph, text)
            entries[stage, kept] = StageEntry(stage, kept, name)
    return graphs, list(entries.values())


def _weights(source: StepSource, graphs: Sequence[StepGraph]) -> dict[str, Tensor]:
    """Return what the graphs read, each storage once, by its first name."""
    names = {i.storage or i.name for g in graphs for i in g.inputs if i.kind == "weight"}
    return {name: source.weights[name] for name in sorted(names)}


def _manifest(
    content: Content,
    entries: Sequence[StageEntry],
    weights: Mapping[str, Tensor],
    sums: Mapping[str, FileInfo],
    native: Native | None,
) -> Manifest:
    source = content.source
    record = content.record.to_dict() if hasattr(content.record, "to_dict") else content.record
    return Manifest(
        specc=manifests.own_version(),
        torch=manifests.base_version(torch.__version__),
        made_on=manifests.made_on(describe(source.device)),
        method=content.method,
        default_block=content.default_block,
        block=content.block,
        accept=content.accept,
        taps=tuple(source.taps),
        shape=source.shape,
        feed=content.feed,
        model=source.target_info,
        drafter=source.drafter_info,
        state=source.state(),
        weights={n: spec_of(t) for n, t in weights.items()},
        stages=tuple(entries),
        families=content.families,
        passes=tuple(source.rows_reports),
        generation=content.generation,
        record=record,
        files=sums,
        native=native,
        tree=source.tree(content.block),
    )


def _people(
    content: Content, entries: Sequence[StageEntry], graphs: Mapping[str, tuple[StepGraph, bytes]]
) -> str:
    """Return the greedy drafting step's stages as text, for people who unzip the package."""
    wanted = StepKey(content.block, 0, content.accept)
    parts = [
        f"# {e.stage}: {e.file}\n{graphs[e.file][0].render()}"
        for e in entries
        if replace(e.key, extras=()) == relevant(e.stage, wanted)
    ]
    return "\n".join(parts)
