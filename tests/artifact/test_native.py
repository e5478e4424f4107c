"""Native code in packages: the same tokens and bytes; where it does not fit, a typed error or the portable part."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact import save as save_module
from specc.artifact.package import open_package
from specc.backends import aot_compile
from specc.backends.aot import Aot
from specc.backends.inductor import Inductor
from specc.errors import ArtifactError, InputError, UnsupportedError
from specc.loading import inspect_package, load
from specc.runtime.compiled import Compiled
from specc.step import StepKey
from tests.packages import Files, repack
from tests.tiny import tiny_tokenizer
from tests.toy_source import FEED, VOCAB, toy_compiled

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")
PROMPT = torch.tensor([[5, 6, 7, 8]])
GREEDY: dict[str, Any] = {"max_new_tokens": 20}
SEEDED: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "top_k": 0, "seed": 3}
COUNT = 9  # units of a toy's steps, greedy and sampled, those of one text counted once
CODE = b"this is no library"


@functools.cache
def toy() -> Compiled:
    return toy_compiled(tokenizer=tiny_tokenizer(VOCAB))


# What is around the code: nothing is compiled, and what stands for code cannot be executed


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a native package of a toy whose libraries are none."""
    path = tmp_path_factory.mktemp("package") / "mock.specc"

    def unit(self: object, module: torch.fx.GraphModule) -> tuple[bytes, bytes]:
        return CODE + str(len(list(module.graph.nodes))).encode(), b"{}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot_compile.UnitCompiler, "compile", unit)
        patch.setattr(aot_compile, "compile_kernels", lambda folder: CODE)
        patch.setattr(aot_compile, "reject", lambda device: ())
        patch.setattr(aot_compile, "isa", lambda: ())
        toy().save(path, native=True)
    return path


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave loading no compiler: what is not held runs operator by operator, and this costs no time."""
    monkeypatch.setattr(Inductor, "reject", lambda self, device: ("none, in this test",))


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if any library of a package is opened."""

    def opened(self: Aot, *_: object) -> Any:
        raise AssertionError("native code was opened")

    monkeypatch.setattr(Aot, "_open", opened)
    return


def test_what_a_native_package_says(mock: Path) -> None:
    manifest = open_package(mock, CPU).manifest
    held = manifest.native
    assert held is not None
    assert len(held.units) == COUNT
    assert (held.key.device, held.key.torch, held.threads) == (
        "cpu",
        torch.__version__,
        torch.get_num_threads(),
    )
    assert held.kernels is not None
    assert set(held.files) == {n for n in manifest.files if n.startswith("native/")}
    stages = [u.label.split(":")[0] for u in held.units]
    assert {"draft+verify", "verify", "accept", "commit"} == set(stages)
    again = json.loads(json.dumps(inspect_package(mock).to_dict()))["native"]
    assert again["torch"] == torch.__version__
    assert again["bytes"] == sum(manifest.files[n].size_bytes for n in held.files)
    assert [u["unit"] for u in again["units"]] == [u.label for u in held.units]
    assert all(u["bytes"] > len(CODE) for u in again["units"])


def test_inspection_opens_no_code(mock: Path, untouched: None) -> None:
    assert inspect_package(mock).to_dict()["native"]["device"] == "cpu"


def test_the_portable_part_is_a_portable_package_s(mock: Path, tmp_path: Path) -> None:
    path = tmp_path / "portable.specc"
    toy().save(path)
    one, other = (open_package(p, CPU).manifest for p in (path, mock))
    assert one.native is None
    assert one.stages == other.stages
    assert one.files == {n: f for n, f in other.files.items() if not n.startswith("native/")}


def test_every_unit_is_found_again_by_its_text(mock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs read back give the units that the traced ones gave: otherwise no code would ever be used."""
    package = open_package(mock, CPU)
    backend = package.native(only=True)
    assert backend is not None
    asked: list[str] = []
    monkeypatch.setattr(Aot, "_open", lambda self, library, *_: asked.append(library))
    for key in (StepKey(2, 0, "ratio"), StepKey(0, FEED, "ratio"), StepKey(0, 0, "ratio")):
        for families in ((), ("temperature",)):
            backend.build(package.step(StepKey(key.block, key.feed, key.rule, families)).graph)
    assert package.manifest.native is not None
    assert set(asked) == {n for n in package.manifest.native.files if n.endswith(".so")}


def with_key(**values: Any) -> Callable[[Any], None]:
    return lambda manifest: manifest["native"]["key"].update(values)


MISFITS: list[tuple[str, Callable[[Any], None], str]] = [
    ("isa", with_key(isa=["avx2", "avx9"]), "avx9"),
    ("torch", with_key(torch="2.13.0+other"), "2.13.0+other"),
    ("platform", with_key(platform="linux-riscv64"), "linux-riscv64"),
    ("device", with_key(device="cuda"), "cuda"),
    ("kernels", with_key(kernels="0" * 64), "0" * 64),
]


@pytest.mark.parametrize(("field", "change", "found"), MISFITS, ids=[m[0] for m in MISFITS])
def test_where_it_does_not_fit_the_portable_part_runs_and_it_is_said(
    field: str, change: Callable[[Any], None], found: str, mock: Path, tmp_path: Path, untouched: None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = repack(mock, tmp_path / "x.specc", manifest=change)
    with caplog.at_level(logging.INFO, logger="specc"):
        loaded = load(path, device="cpu")
    said = next(m for m in caplog.messages if "another machine" in m)
    assert f"({field}: found" in said
    assert found in said
    assert "lowered again" in said
    assert loaded.engine.backend.name == "native"  # the first that needs no compiler
    if field == "isa":
        assert torch.equal(loaded.generate(PROMPT, **GREEDY), toy().generate(PROMPT, **GREEDY))
    with pytest.raises(ArtifactError) as caught:
        load(path, device="cpu", native_only=True)
    assert caught.value.field == f"manifest.json.native.key.{field}"
    assert found in str(caught.value.found)
    assert caught.value.expected


def test_other_threads_are_said(mock: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = repack(mock, tmp_path / "x.specc", manifest=lambda m: m["native"].update(threads=77))
    with caplog.at_level(logging.INFO, logger="specc"):
        assert load(path, device="cpu").engine.backend.name == "aot"
    assert any("over 77 threads" in m for m in caplog.messages)


def test_a_backend_that_is_asked_for_leaves_native_code_aside(mock: Path, untouched: None) -> None:
    loaded = load(mock, device="cpu", backend="eager")
    assert loaded.engine.backend.name == "eager"
    assert torch.equal(loaded.generate(PROMPT, **GREEDY), toy().generate(PROMPT, **GREEDY))
    with pytest.raises(InputError, match="native_only"):
        load(mock, device="cpu", backend="eager", native_only=True)


def flip(start: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        name = next(n for n in sorted(files) if n.startswith(start))
        content = bytearray(files[name])
        content[len(content) // 2] ^= 1
        files[name] = bytes(content)

    return change


def drop(start: str) -> Callable[[Files], None]:
    return lambda files: files.pop(next(n for n in sorted(files) if n.startswith(start))) and None


@pytest.mark.parametrize("start", ["native/unit_", "native/kernels_"])
@pytest.mark.parametrize("given", [{}, {"backend": "eager"}, {"native_only": True}], ids=str)
def test_a_changed_byte_or_a_missing_library_is_refused(
    given: dict[str, Any], start: str, mock: Path, tmp_path: Path, untouched: None
) -> None:
    """Whether or not the code would be used, and though another file is at fault than those that would be."""
    for files, says in ((flip(start), f"sha256 of {start}"), (drop(start), f"file {start}")):
        path = repack(mock, tmp_path / "x.specc", files=files, honest=False)
        with pytest.raises(ArtifactError) as caught:
            load(path, device="cpu", **given)
        assert says in str(caught.value)


def test_order_of_checks(mock: Path, tmp_path: Path, untouched: None) -> None:
    """Code that fits nowhere is no excuse: sums come before it, and the version before them."""

    def wrong(manifest: Any) -> None:
        manifest["native"]["key"]["torch"] = "1.0"
        manifest["native"]["surprise"] = 1
        manifest["torch"] = "99.0.0"

    path = repack(mock, tmp_path / "a.specc", manifest=wrong, files=flip("native/unit_"), honest=False)
    with pytest.raises(ArtifactError, match="sha256 of native/unit_"):
        load(path, device="cpu", native_only=True)
    with pytest.raises(ArtifactError, match=r"torch: found 99\.0\.0"):
        load(repack(mock, tmp_path / "b.specc", manifest=wrong), device="cpu", native_only=True)
    path = repack(mock, tmp_path / "c.specc", manifest=lambda m: [wrong(m), m.update(torch="2.0.0")])
    with pytest.raises(ArtifactError, match=r"native\.surprise"):
        load(path, device="cpu", native_only=True)


def within(*place: Any, **values: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        item = manifest["native"]
        for step in place:
            item = item[step]
        item.update(values)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (within(threads=0), "manifest.json.native.threads"),
        (within(kernels="native/other.so"), "a file of the package"),
        (within(kernels="../../lib.so"), "a file of the package"),
        (within(units={}), "manifest.json.native.units: found dict"),
        (within("units", 0, library="libc.so.6"), "a file of the package"),
        (within("units", 0, calls=3), "manifest.json.native.units[0].calls"),
        (within("units", 0, unit="zz"), "64 hexadecimal digits"),
        (within("units", 0, label=None), "label"),
        (within("units", 0, more=1), "more"),
        (within("key", isa="avx2"), "key.isa"),
        (within("key", device="abacus"), "key.device"),
        (within("key", more=1), "key.more"),
        (lambda m: m["native"].pop("key"), "native.key"),
        (lambda m: m.update(native=3), "native: found int"),
    ],
    ids=[
        "threads",
        "kernels_elsewhere",
        "kernels_climb",
        "units",
        "library",
        "calls",
        "unit",
        "label",
        "unit_more",
        "isa",
        "device",
        "key_more",
        "no_key",
        "native",
    ],
)
def test_manifest_faults(
    change: Callable[[Any], object], says: str, mock: Path, tmp_path: Path, untouched: None
) -> None:
    path = repack(mock, tmp_path / "x.specc", manifest=change)
    with pytest.raises(ArtifactError) as caught:
        load(path, device="cpu", backend="eager")
    assert says in str(caught.value)


def test_a_library_that_is_none_is_the_file_s_fault(mock: Path) -> None:
    """Honest sums over nonsense: the first step that needs it names the file, and nothing of it ran."""
    loaded = load(mock, device="cpu", native_only=True)
    assert isinstance(loaded.engine.backend, Aot)
    with pytest.raises(ArtifactError) as caught:
        loaded.generate(PROMPT, **GREEDY)
    assert caught.value.field.startswith("native/")
    assert "this system can load" in str(caught.value.expected)
    assert str(mock) in str(caught.value)


def test_a_file_that_changes_after_loading_is_not_executed(mock: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.specc"
    path.write_bytes(mock.read_bytes())
    package = open_package(path, CPU)
    assert package.manifest.native is not None
    name = package.manifest.native.units[0].library
    place = package._container.entries[name]
    with path.open("r+b") as file:  # in place, as whoever attacks would
        file.seek(place.offset)
        file.write(b"X")
    package._container.map[place.offset : place.offset + 1] = b"X"  # pages may have been read before
    with pytest.raises(ArtifactError, match=f"sha256 of {name}"):
        package._code(name)


def test_units_that_are_not_held(mock: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = repack(mock, tmp_path / "x.specc", manifest=lambda m: m["native"].update(units=[], kernels=None))
    loaded = load(path, device="cpu")
    with caplog.at_level(logging.INFO, logger="specc"):
        found = loaded.generate(PROMPT, **GREEDY)
    assert any("no native code of unit" in m and "operator by operator" in m for m in caplog.messages)
    assert torch.equal(found, toy().generate(PROMPT, **GREEDY))
    with pytest.raises(UnsupportedError, match="holds none for this step"):
        load(path, device="cpu", native_only=True).generate(PROMPT, **GREEDY)


def test_saving_refuses_what_it_cannot_compile_for(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"native code(.|\n)*none, in this test"):
        toy().save(tmp_path / "x.specc", native=True)
    assert aot_compile.reject(torch.device("cuda")) == ("native code is written for CPUs, not for cuda",)
    assert list(tmp_path.iterdir()) == []


def test_a_processor_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, expected in (
        (("avx2",), ()),
        (tuple(aot_compile._AVX2), tuple(sorted(aot_compile._AVX2))),
        (("avx512_f", *aot_compile._AVX2), tuple(sorted(aot_compile._AVX2))),
    ):
        monkeypatch.setattr(aot_compile, "instructions", lambda has=has: has)
        assert aot_compile.isa() == expected
    monkeypatch.setattr(aot_compile, "instructions", lambda: ())
    assert any("AVX2" in reason for reason in aot_compile.reject(CPU))


# The code itself


KEYS = [StepKey(2, 0, "ratio"), StepKey(0, FEED, "ratio")]
KEYS += [StepKey(k.block, k.feed, k.rule, ("temperature",)) for k in KEYS]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a native package of the steps that the calls below need."""
    if aot_compile.reject(CPU):
        pytest.skip(f"native code is not checked: {aot_compile.reject(CPU)}")
    path = tmp_path_factory.mktemp("package") / "real.specc"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "native_keys", lambda content: KEYS)
        toy().save(path, native=True)
    return path


# Run in another process, which has neither transformers, nor a compiler, nor a file of the tests.
RUN = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers" or name.startswith("torch._inductor.compile_fx"):
            raise ImportError("blocked here: " + name)

sys.meta_path.insert(0, Blocked())
sys.modules["transformers"] = None

import specc, torch

compiled = specc.load(sys.argv[1], device="cpu", native_only=True)
prompt = torch.tensor(json.loads(sys.argv[2]))
out = [compiled.generate(prompt, **call).tolist() for call in json.loads(sys.argv[3])]
loaded = sorted(name for name in sys.modules if sys.modules[name] is not None and (
    name.startswith(("transformers", "specc.checkpoints", "torch._inductor.codegen"))
    or name in ("specc.api", "specc.build", "specc.trace", "specc.models.load", "specc.pairing",
                "specc.backends.aot_compile")
))
print(json.dumps({"out": out, "loaded": loaded, "backend": compiled.engine.backend.name}))
"""


@pytest.mark.slow
def test_tokens_equal_in_a_process_without_compiler_or_transformers(real: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(real), json.dumps(PROMPT.tolist()), json.dumps([GREEDY, SEEDED])],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), "CXX": "none", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["backend"] == "aot"
    assert found["loaded"] == []
    expected = [toy().generate(PROMPT, **call).tolist() for call in (GREEDY, SEEDED)]
    assert found["out"] == expected
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.slow
def test_tokens_equal_and_weights_are_the_package_s_own(real: Path) -> None:
    loaded: Compiled = load(real, device="cpu", native_only=True)
    for call in (GREEDY, SEEDED):
        assert torch.equal(loaded.generate(PROMPT, **call), toy().generate(PROMPT, **call))
    weights = loaded.engine.builder.weights
    before = loaded.generate(PROMPT, **GREEDY)
    weights["target.embed.weight"].mul_(-1)  # read where it is: no library holds another copy
    loaded.forget()
    loaded._watch.__init__(weights)  # type: ignore[misc]  # which refuses changed weights, rightly
    assert not torch.equal(loaded.generate(PROMPT, **GREEDY), before)


@pytest.mark.slow
def test_a_native_package_is_little_larger(real: Path) -> None:
    package = open_package(real, CPU)
    assert package.manifest.native is not None
    sizes = [package.manifest.files[n].size_bytes for n in package.manifest.native.files]
    assert max(sizes) < 500_000
    content = real.read_bytes()
    for place in (str(ROOT), str(Path.home()), "/tmp/", str(Path(torch.__file__).parent)):
        assert place.encode() not in content


# Another process, another folder, other hashes: the accept unit of a step, the smallest, compiled anew.
AGAIN = """
import hashlib, json, sys
from pathlib import Path
from specc.backends.aot_compile import UnitCompiler, compile_kernels
from specc.backends.lowering import with_kernels
from specc.backends.units import split, unit_digest, unit_stages, units
from specc.step import StepKey
from tests.toy_source import ToySource

graph = with_kernels(ToySource().step(StepKey(2, 0, "ratio")).graph)
unit = next(unit for _, unit in units(split(graph)) if unit_stages(unit) == "accept")
one, other = Path(sys.argv[1]) / "one", Path(sys.argv[1]) / "other"
one.mkdir(); other.mkdir()
library, calls = UnitCompiler(one).compile(unit)
kernels = compile_kernels(other)
print(json.dumps({
    "unit": unit_digest(unit), "library": hashlib.sha256(library).hexdigest(), "calls": calls is not None,
    "kernels": hashlib.sha256(kernels).hexdigest(),
}))
"""


@pytest.mark.slow
def test_another_process_compiles_the_same_bytes(real: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(tmp_path)],
        cwd=ROOT,
        env={
            "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "PATH": os.environ["PATH"], "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    manifest = open_package(real, CPU).manifest
    assert manifest.native is not None
    held = next(u for u in manifest.native.units if u.unit == found["unit"])
    assert manifest.files[held.library].sha256 == found["library"]
    assert (held.calls is not None) == found["calls"]
    assert manifest.native.kernels is not None
    assert manifest.files[manifest.native.kernels].sha256 == found["kernels"]
