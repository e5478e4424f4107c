"""Take packages apart and put them together again with something changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specc.artifact.container import Container, ContainerWriter
from specc.artifact.fields import write_json

Files = dict[str, bytes]


def unpack(path: Path) -> Files:
    container = Container(path)
    return {name: bytes(container.content(name)) for name in container.entries}


def pack(path: Path, files: Files) -> Path:
    with path.open("wb") as file:
        writer = ContainerWriter(file)
        for name, content in files.items():
            writer.add(name, [content])
        writer.close()
    return path


def repack(
    source: Path, target: Path, *, files: Callable[[Files], None] | None = None,
    manifest: Callable[[Any], None] | None = None, honest: bool = True,
) -> Path:  # fmt: skip
    """Write ``target``: ``source`` with changed files and manifest; ``honest`` updates its sums."""
    content = unpack(source)
    if files is not None:
        files(content)
    document = json.loads(content["manifest.json"])
    if honest:
        document["files"] = {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
            for name, data in content.items()
            if name != "manifest.json"
        }
    if manifest is not None:
        manifest(document)
    content["manifest.json"] = write_json(document)
    return pack(target, content)


def edit_json(name: str, change: Callable[[Any], None]) -> Callable[[Files], None]:
    """Return a change of one JSON file; ``name`` may be its beginning."""

    def edit(files: Files) -> None:
        found = next(n for n in sorted(files) if n.startswith(name))
        document = json.loads(files[found])
        change(document)
        files[found] = write_json(document)

    return edit
