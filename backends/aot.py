"""Run a step from native code that was compiled ahead of time (AOTInductor), one library per unit.

A unit is found by its text: code of another graph, however little it differs, is never run in its place. Weights
and state are inputs of a unit, so no library holds any. While all units are held, neither Inductor nor a compiler is
needed.
"""

from __future__ import annotations

import logging
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from specc.backends.inductor import Inductor
from specc.backends.kernels import attend_cpu
from specc.backends.lowering import with_kernels
from specc.backends.units import join, returns_one, split, unit_digest, units
from specc.errors import ArtifactError, UnsupportedError
from specc.graph import StepGraph

_Device = torch.device  # a field below is called torch
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CodeKey:
    """Where native code runs.

    Attributes:
        device: a device's type.
        platform: system and processor, "linux-x86_64".
        isa: what the processor must have, each as torch names it.
        torch: the whole version, local part included: C++ interfaces are the same within one build only.
        kernels: the sha256 of the source of specc's own kernels, which the code calls by name.
    """

    device: str
    platform: str
    isa: tuple[str, ...]
    torch: str
    kernels: str

    def misfit(self, device: _Device) -> tuple[str, str, str] | None:
        """Return the first field that does not fit this machine, with what it says and what would; None if all fit."""
        here = key_here(device, instructions())
        for name in (f.name for f in fields(CodeKey)):
            found, expected = getattr(self, name), getattr(here, name)
            if name == "isa":
                missing = sorted(set(found) - set(expected))
                if missing:
                    return name, " ".join(found), f"none that this processor lacks: {' '.join(missing)}"
            elif found != expected:
                return name, found, expected
        return None


def key_here(device: torch.device, isa: tuple[str, ...]) -> CodeKey:
    """Return the key of code for this machine's device that uses the instruction sets ``isa``."""
    return CodeKey(
        device.type, f"{sys.platform}-{platform.machine()}", isa, torch.__version__, attend_cpu.SOURCE_SHA256
    )


def instructions() -> tuple[str, ...]:
    """Return the instruction sets of this processor as torch names them; none where this torch does not tell."""
    read = getattr(torch.cpu, "get_capabilities", None)
    flags: Mapping[str, Any] = read() if read is not None else {}
    return tuple(sorted(name for name, has in flags.items() if has is True))


@dataclass(frozen=True)
class UnitCode:
    """The files of a unit: its library, and what AOTInductor's runtime must know of operators that stay calls."""

    library: str
    calls: str | None = None


@dataclass
class Aot:
    """Run the units of a package's native code.

    Attributes:
        path: the package, for messages.
        code: files by a unit's digest.
        kernel: the file of specc's own kernels, or None.
        read: returns a file's content, checked.
        only: refuse what is not held, rather than lower it here.
    """

    path: Path
    code: Mapping[str, UnitCode]
    kernel: str | None
    read: Callable[[str], bytes]
    only: bool = False
    name: str = "aot"
    _opened: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False)
    _inductor: Inductor = field(default_factory=Inductor, repr=False)

    def reject(self, device: torch.device) -> tuple[str, ...]:
        return () if device.type == "cpu" else (f"its code is for the CPU, not for {device.type}",)

    def build(self, graph: StepGraph) -> Callable[..., tuple[Tensor, ...]]:
        if self.kernel is not None:
            self._open(self.kernel, None, attend_cpu.use)
            self.kernel = None
        module = split(with_kernels(graph))
        return join(module, {name: self._unit(f"{graph.name} {name}", unit) for name, unit in units(module)})

    def _unit(self, name: str, unit: fx.GraphModule) -> Callable[..., Any]:
        digest = unit_digest(unit)
        if digest not in self._opened:
            held = self.code.get(digest)
            self._opened[digest] = self._lower(name, unit) if held is None else self._load(held, unit)
        return self._opened[digest]

    def _load(self, held: UnitCode, unit: fx.GraphModule) -> Callable[..., Any]:
        single = returns_one(unit)
        runner: Any = self._open(
            held.library, held.calls, lambda file: torch._C._aoti.AOTIModelContainerRunnerCpu(str(file), 1)
        )
        if single:
            return lambda *inputs: runner.run(list(inputs))[0]
        return lambda *inputs: tuple(runner.run(list(inputs)))

    def _open(self, library: str, calls: str | None, load: Callable[[Path], Any]) -> Any:
        """Load a library from a private folder that is gone afterwards: it stays mapped."""
        with tempfile.TemporaryDirectory(prefix="specc-") as folder:
            file = Path(folder) / "code.so"
            file.write_bytes(self.read(library))
            if calls is not None:  # where the runtime looks for them
                file.with_suffix(".json").write_bytes(self.read(calls))
            try:
                return load(file)
            except (OSError, RuntimeError, AttributeError) as error:
                found = (str(error).splitlines() or [type(error).__name__])[0].replace(folder, "")
                raise ArtifactError(
                    self.path, library, found[:300], "a library that this system can load"
                ) from error

    def _lower(self, name: str, unit: fx.GraphModule) -> Callable[..., Any]:
        what = f"{self.path.name}: no native code of unit {name}"
        if self.only:
            raise UnsupportedError(
                f"native code only: {self.path}",
                [
                    f"it holds none for this step, of other settings or rules than it was saved for (unit {name})"
                ],
                "Its graph is held: load without native_only (--native-only) to lower it here.",
            )
        if self._inductor.reject(torch.device("cpu")):
            logger.info("%s: it runs operator by operator, as there is no compiler", what)
            return unit
        logger.info("%s: it is compiled here", what)
        return self._inductor.unit(name, unit)
