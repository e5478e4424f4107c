"""What is installed is what lies in the folders, under the right names, and importing it is light."""

from __future__ import annotations

import ast
import importlib.metadata
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import specc

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run_python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


def test_packages_are_the_folders() -> None:
    found = set()
    for top, name in (("specc", "specc"), ("passes", "specc.passes"), ("backends", "specc.backends")):
        for file in (ROOT / top).rglob("*.py"):
            found.add(".".join((name, *file.parent.relative_to(ROOT / top).parts)))
    assert sorted(found) == PROJECT["tool"]["setuptools"]["packages"]


def test_every_package_has_an_init() -> None:
    for name in PROJECT["tool"]["setuptools"]["packages"]:
        folder = ROOT.joinpath(*name.split("."))
        if name.startswith(("specc.passes", "specc.backends")):
            folder = ROOT.joinpath(*name.split(".")[1:])
        assert (folder / "__init__.py").is_file(), name


@pytest.mark.parametrize("name", ["passes", "backends"])
def test_mapped_packages_have_one_name(name: str) -> None:
    wrong = run_python(f"import {name}", cwd=ROOT)
    assert wrong.returncode == 1
    assert f"ImportError: this package is specc.{name}" in wrong.stderr
    assert run_python(f"import specc.{name}", cwd=ROOT).returncode == 0


def test_installed_outside_the_root(tmp_path: Path) -> None:
    code = "import specc.passes, specc.backends; print(specc.__version__)"
    done = run_python(code, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, specc.__version__), done.stderr


def test_version_is_written_once_everywhere() -> None:
    assert specc.__version__ == PROJECT["project"]["version"] == importlib.metadata.version("specc")
    assert f"## {specc.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_console_script_and_typing_marker() -> None:
    (script,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "specc"]
    assert script.load() is importlib.import_module("specc.cli").main
    assert PROJECT["tool"]["setuptools"]["package-data"]["specc"] == [
        "py.typed", "shipped/*/*/*", "training/*.toml",
    ]  # fmt: skip
    assert (ROOT / "specc" / "py.typed").is_file()


def test_import_is_light_and_reads_no_environment(tmp_path: Path) -> None:
    code = """
import os, sys
class Watched(dict):
    def _seen(self, key): raise SystemExit(f"environment read: {key}")
    __getitem__ = get = __contains__ = _seen
os.environ = Watched()
import specc
heavy = {"torch", "transformers", "numpy", "triton"} & set(sys.modules)
raise SystemExit(f"imported {heavy}" if heavy else 0)
"""
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves_and_no_other() -> None:
    for name in specc.__all__:
        assert getattr(specc, name) is not None
    assert set(specc.LAZY) < set(specc.__all__) <= set(dir(specc))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        specc.nothing  # noqa: B018  # the look-up is what is tested


def test_no_module_has_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules([str(ROOT / "specc")])} | {"passes", "backends"}
    design = {"compile", "load", "tune", "check", "verify", "bench", "train"}
    assert not modules & (design | set(specc.__all__))


def test_every_test_file_is_collected_and_has_tests() -> None:
    for file in (ROOT / "tests").rglob("*.py"):
        names = {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}
        has_tests = any(name.startswith("test") for name in names)
        assert has_tests == file.name.startswith("test_"), f"{file}: tests live in test_*.py, and only there"
        wrong = [n for n in names if n.startswith("test") and not n.startswith("test_")]
        assert not wrong, f"{file}: pytest does not collect {wrong}"


def test_constraints_are_exact_and_name_no_host() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line and "/" not in line for line in pins)
    assert {"torch", "transformers", "optree"} <= {line.split("==")[0] for line in pins}
