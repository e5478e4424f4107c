"""What specc keeps between runs: how much there is, and dropping it."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specc.models.default import cache_folder


@dataclass(frozen=True)
class CacheReport:
    """The cache folder, its entries with their sizes, and what was removed."""

    folder: str
    size_bytes: int
    entries: tuple[dict[str, Any], ...]
    removed_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)


def report_cache(*, clear: bool = False) -> CacheReport:
    """Return what is in the cache folder; with ``clear`` everything in it is deleted first."""
    folder = cache_folder()
    removed = 0
    if clear and folder.is_dir():
        removed = _size(folder)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    paths = [path for part in _parts(folder) for path in sorted(part.iterdir())]
    entries = tuple({"name": str(path.relative_to(folder)), "size_bytes": _size(path)} for path in paths)
    return CacheReport(str(folder), sum(_size(path) for path in paths), entries, removed)


def _parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
