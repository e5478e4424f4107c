"""Native code in a package: libraries of a step's units for one kind of machine, beside the portable graphs.

Weights and state are inputs of the code, so the package's one storage of weights serves it too.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specc.artifact.fields import Fields
from specc.backends.aot import CodeKey, UnitCode, key_here
from specc.backends.kernels.attend_cpu import attend_cpu
from specc.backends.lowering import with_kernels
from specc.backends.units import split, unit_digest, unit_stages, units
from specc.errors import UnsupportedError
from specc.step import StepKey
from specc.stitch import StepSource

logger = logging.getLogger(__name__)
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class NativeUnit:
    """The code of one unit: the sum of its text, what it is for people, and its files."""

    unit: str
    label: str
    library: str
    calls: str | None


@dataclass(frozen=True)
class Native:
    """The native code of a package.

    Attributes:
        key: where it runs. threads: that its loops are split over. kernels: the file of specc's own kernels, or None
        where no unit calls one. units: in the order in which steps were compiled.
    """

    key: CodeKey
    threads: int
    kernels: str | None
    units: tuple[NativeUnit, ...]

    @property
    def code(self) -> dict[str, UnitCode]:
        """Return the files by the units' sums, as the backend wants them."""
        return {u.unit: UnitCode(u.library, u.calls) for u in self.units}

    @property
    def files(self) -> tuple[str, ...]:
        names = [name for u in self.units for name in (u.library, u.calls)]
        return tuple(sorted({n for n in [*names, self.kernels] if n is not None}))


def compile_native(source: StepSource, keys: Sequence[StepKey]) -> tuple[Native, dict[str, bytes]]:
    """Compile the units of some steps for this machine.

    Args:
        source: gives the steps.
        keys: which.

    Returns:
        What the manifest says, and the files by name.

    Raises:
        UnsupportedError: there is no compiler, or the device is one that code cannot be compiled for ahead of time.
    """
    # Only here: running native code needs no compiler.
    from specc.backends.aot_compile import UnitCompiler, compile_kernels, isa, reject

    reasons = reject(source.device)
    if reasons:
        raise UnsupportedError(
            "native code in a package",
            reasons,
            "Leave it out: a portable package is compiled where it is loaded.",
        )
    files: dict[str, bytes] = {}
    found: dict[str, NativeUnit] = {}
    kernels = None
    with tempfile.TemporaryDirectory(prefix="specc-") as folder:
        compiler = UnitCompiler(Path(folder))
        for key in keys:
            graph = with_kernels(source.step(key).graph)
            for _, unit in units(split(graph)):
                digest = unit_digest(unit)
                if digest in found:
                    continue
                label = f"{unit_stages(unit)}: block {key.block}, feed {key.feed}, {'+'.join(key.families) or 'greedy'}"
                logger.info("native: compiling unit %d, %s", len(found) + 1, label)
                library, calls = compiler.compile(unit)
                names = _put(files, "unit", "so", library), _put(files, "unit", "json", calls)
                found[digest] = NativeUnit(digest, label, *names)
                if kernels is None and unit.graph.find_nodes(op="call_function", target=attend_cpu.default):
                    with tempfile.TemporaryDirectory(dir=folder) as place:
                        kernels = _put(files, "kernels", "so", compile_kernels(Path(place)))
    native = Native(key_here(source.device, isa()), torch.get_num_threads(), kernels, tuple(found.values()))
    return native, files


def _put(files: dict[str, bytes], kind: str, suffix: str, content: bytes | None) -> Any:
    """Add a file, named by its content, and return its name; None for no content."""
    if content is None:
        return None
    name = f"native/{kind}_{hashlib.sha256(content).hexdigest()[:12]}.{suffix}"
    files[name] = content
    return name


def write_native(native: Native) -> dict[str, Any]:
    """Return what the manifest says of native code."""
    return asdict(native)


def read_native(item: Fields, files: Mapping[str, Any]) -> Native:
    """Read what the manifest says of native code.

    Raises:
        ArtifactError: a field is missing, of the wrong type or not known, or names no file of the package.
    """
    place = item.inner("key")
    key = CodeKey(
        place.text("device", "cpu", "cuda"), place.text("platform"), place.texts("isa"), place.text("torch"),
        place.text("kernels"),
    )  # fmt: skip
    place.done()
    found = []
    for unit in item.objects("units"):
        digest = unit.text("unit")
        if not _HASH.fullmatch(digest):
            raise unit.fault("unit", repr(digest)[:100], "64 hexadecimal digits")
        library, calls = _file(unit, "library", files), _optional_file(unit, "calls", files)
        found.append(NativeUnit(digest, unit.text("label"), library, calls))
        unit.done()
    native = Native(
        key, item.whole("threads", 1, 1 << 16), _optional_file(item, "kernels", files), tuple(found)
    )
    item.done()
    return native


def _optional_file(item: Fields, key: str, files: Mapping[str, Any]) -> str | None:
    return _file(item, key, files) if item.optional(key) else None


def _file(item: Fields, key: str, files: Mapping[str, Any]) -> str:
    name = item.text(key)
    if name not in files:
        raise item.fault(key, name, "a file of the package")
    return name
