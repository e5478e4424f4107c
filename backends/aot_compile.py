"""Compile units of a step ahead of time: torch's AOTInductor writes C++, and it is compiled and linked here.

Not by torch's own build: that names this machine's instruction sets ("native"), stores paths and line tables, and gives
other bytes in another folder. Here the instruction sets are named one by one, so that a package can say what it needs,
and the same unit gives the same bytes in any process and any folder with one compiler and one torch.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import subprocess
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from specc.backends.aot import instructions
from specc.backends.inductor import Inductor
from specc.backends.kernels import attend_cpu
from specc.backends.units import with_tuple
from specc.errors import UnsupportedError

logger = logging.getLogger(__name__)

# What code may use, by the width of its vectors in bits, widest first: torch's names, and the compiler's options.
_AVX2 = {
    "avx2": "-mavx2", "bmi": "-mbmi", "bmi2": "-mbmi2", "f16c": "-mf16c", "fma3": "-mfma", "lzcnt": "-mlzcnt",
    "popcnt": "-mpopcnt",
}  # fmt: skip
_AVX512 = {f"avx512_{name}": f"-mavx512{name}" for name in ("bw", "cd", "dq", "f", "vl")}
_LEVELS: Mapping[int, Mapping[str, str]] = MappingProxyType({512: {**_AVX2, **_AVX512}, 256: _AVX2})
# Of torch's own options those are left out that speed, messages or debuggers want, and the processor's name.
_NOT_OURS = ("O", "g", "W", "march=", "mcpu=", "pedantic", "fno-omit-frame-pointer", "shared")
# No path, no name of a temporary file and no unused function in what is written.
_COMPILE = ("-w", "-fPIC", "-frandom-seed=specc", "-ffunction-sections", "-fdata-sections")
_LINK = (
    "-shared", "-fopenmp", "-Wl,-s,--build-id=none,--gc-sections,--as-needed,-z,noexecstack",
    "-Wl,-Bsymbolic,--version-script=exports.map",
)  # fmt: skip
_EXPORTS = "{ global: AOTInductor*; local: *; };\n"
# AOTInductor's code is in three parts: the runtime's interface, the same for all units, the code that calls kernels,
# and the kernels. Only these gain from -O3.
_INTERFACE_END = '\n} // extern "C"\n'
_KERNELS = "#include <torch/csrc/inductor/cpp_prefix.h>"
_ROOT = Path(torch.__file__).parent


def reject(device: torch.device) -> tuple[str, ...]:
    """Return every reason why code for ``device`` cannot be compiled ahead of time here; empty when it can."""
    if device.type != "cpu":
        return (f"native code is written for CPUs, not for {device.type}",)
    reasons = list(Inductor().reject(device))
    if _level() is None:
        reasons.append("native code needs an x86 processor with AVX2, and a torch that tells so")
    return tuple(reasons)


def isa() -> tuple[str, ...]:
    """Return the instruction sets that code compiled here may use."""
    level = _level()
    return tuple(sorted(_LEVELS[level])) if level is not None else ()


def _level() -> int | None:
    return next((bits for bits, needed in _LEVELS.items() if set(needed) <= set(instructions())), None)


def _machine() -> list[str]:
    level = _level()
    assert level is not None
    return sorted(_LEVELS[level].values())


def compile_kernels(folder: Path) -> bytes:
    """Return the library of specc's own kernels; ``folder`` is an empty one.

    Raises:
        UnsupportedError: the compiler fails.
    """
    return attend_cpu.build(folder, _machine()).read_bytes()


class UnitCompiler:
    """Compiles units; what their code has in common is compiled once.

    Args:
        folder: an empty one, for everything on the way.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared: dict[tuple[str, ...], Path] = {}
        self._uses: Counter[Path] = Counter()

    def compile(self, unit: fx.GraphModule) -> tuple[bytes, bytes | None]:
        """Return the library of a unit, and what the runtime must know of its calls of operators, or None.

        Args:
            unit: a unit of a step, lowered to this device's kernels; it is left as it is.

        Raises:
            UnsupportedError: the compiler fails.
        """
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            code = _Code(unit, Path(place))
            library = self._build(code)
            calls = code.calls
        logger.info("native: compiled a unit, %d bytes, %.1f s", len(library), time.perf_counter() - begin)
        return library, calls

    def _build(self, code: _Code) -> bytes:
        """Compile what AOTInductor wrote into one library."""
        caller, begin, kernels = code.text.partition(_KERNELS)
        interface, end, model = caller.partition(_INTERFACE_END)
        headers = "".join(line for line in interface.splitlines(keepends=True) if line.startswith("#include"))
        objects = []
        if end:  # else the code is of another torch, and is compiled in one piece
            objects.append(self._object(code, interface + end, "-O1", headers, self._folder))
            caller = headers + model
        objects.append(self._object(code, caller, "-O1", headers, code.folder))
        if begin:
            objects.append(self._object(code, begin + kernels, "-O3", _KERNELS + "\n", code.folder))
        (code.folder / "exports.map").write_text(_EXPORTS)
        library = code.folder / "code.so"
        link = [*_LINK, *map(str, [*objects, *code.constants]), f"-L{_ROOT / 'lib'}", "-ltorch_cpu"]
        _run([code.compiler, *link, "-o", str(library)], code.folder)
        return library.read_bytes()

    def _object(self, code: _Code, text: str, level: str, headers: str, folder: Path) -> Path:
        """Return the object file of some C++ that begins with ``headers``, which are compiled once, too."""
        place = (text, level, *code.options)
        if place not in self._shared:
            header = self._header(code, headers, level)
            source = _named(folder, text, "cpp")
            source.write_text(text)
            command = [code.compiler, *code.options, level, "-include", str(header), "-c", source.name]
            _run([*command, "-o", str(source.with_suffix(".o"))], folder)
            if folder != self._folder:
                return source.with_suffix(".o")
            self._shared[place] = source.with_suffix(".o")
        return self._shared[place]

    def _header(self, code: _Code, text: str, level: str) -> Path:
        """Return a header; from its third use on, its compiled form lies beside it, where compilers look for it."""
        header = _named(self._folder, text + level, "h")
        self._uses[header] += 1
        if self._uses[header] == 1:
            header.write_text(text)
        elif self._uses[header] == 3:  # a unit or two take longer with it than without
            command = [code.compiler, *code.options, level, "-x", "c++-header", header.name]
            _run([*command, "-o", f"{header.name}.gch"], self._folder)
        return header


def _named(folder: Path, text: str, suffix: str) -> Path:
    """Return a path that the text decides: compilers write source names into what they make."""
    return folder / f"code_{hashlib.sha256(text.encode()).hexdigest()[:12]}.{suffix}"


class _Code:
    """What AOTInductor writes of a unit: C++, its constants (none, in fact), and how to compile it."""

    def __init__(self, unit: fx.GraphModule, folder: Path) -> None:
        from torch._inductor import aot_compile

        self.folder = folder
        unit = with_tuple(fx.GraphModule(torch.nn.Module(), copy.deepcopy(unit.graph)))
        values = tuple(n.meta["val"] for n in unit.graph.find_nodes(op="placeholder"))
        options: dict[str, Any] = {
            "aot_inductor.package": True,
            "aot_inductor.package_cpp_only": True,
            "aot_inductor.precompile_headers": False,
            "aot_inductor.output_path": str(folder / "unit.so"),
            "aot_inductor.model_name_for_generated_files": "unit",
            "size_asserts": False,  # an engine's tensors have the graph's own specs
            "cpp.simdlen": _level(),
            # Said, not left to torch: left open, it writes code whose buffers fit this machine's number of cores only.
            "cpp.threads": torch.get_num_threads(),
        }
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, about itself
            files: Any = aot_compile(unit, values, options=options)
        self.constants = [Path(file) for file in files if str(file).endswith(".o")]
        # Behind the code, torch notes its own commands, with their paths.
        self.text = (folder / "unit.wrapper.cpp").read_text().partition("\n// Compile cmd\n")[0]
        calls = folder / "unit.wrapper.json"
        self.calls = calls.read_bytes() if calls.exists() else None
        flags = json.loads((folder / "unit.wrapper_compile_flags.json").read_text())
        self.compiler: str = flags["compiler"]
        self.options = (
            *_COMPILE,
            *(f"-D{name.strip()}" for name in flags["definitions"]),
            *(f"-{flag}" for flag in flags["cflags"] if not flag.startswith(_NOT_OURS)),
            *_machine(),
            *(f"-I{place}" for place in flags["include_dirs"] if Path(place).is_relative_to(_ROOT)),
            f"-ffile-prefix-map={_ROOT}=torch",
        )


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = done.stderr.strip().splitlines()[:5]
        raise UnsupportedError("the native code of a unit cannot be compiled", errors)
