"""Paths that cannot be, and file systems that fail: one typed error, before work is done."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import specc
from specc import cli
from specc.errors import InputError
from specc.files import check_new_file, read_path, writing
from tests.toy_source import toy_compiled

BAD = (None, 3, "", "x" * 5000, "a\0b")


@pytest.mark.parametrize("path", BAD, ids=["none", "number", "empty", "long", "nul"])
def test_paths_that_cannot_be(path: object) -> None:
    with pytest.raises(InputError, match="where: "):
        read_path("where", path)
    for call in (specc.load, lambda p: specc.compile(p, method="plain"), toy_compiled().save):
        with pytest.raises(InputError):
            call(path)  # type: ignore[operator]


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("x")
    cases = {
        "a file, not a folder": tmp_path,
        "a new file": there,
        "a folder that exists": tmp_path / "no" / "x",
    }
    for says, path in cases.items():
        with pytest.raises(InputError, match=says):
            check_new_file("path", path, force=False)
        with pytest.raises(InputError, match=says) if says != "a new file" else pytest.MonkeyPatch.context():
            check_new_file("path", path, force=True)
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(InputError, match="can be written to"):
            check_new_file("path", tmp_path / "new", force=False)


def test_a_disk_that_fills_while_a_package_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"No space left.*x\.specc"):
        toy_compiled().save(tmp_path / "x.specc")
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_system_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with (
        pytest.raises(InputError, match=r"SPECC_CACHE: .*Permission denied.*there"),
        writing("SPECC_CACHE", tmp_path / "there"),
    ):
        raise PermissionError(13, "Permission denied")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECC_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(sys, "argv", ["specc", "run", "smollm2-135m", "--prompt", "a"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "specc: SPECC_CACHE" in capsys.readouterr().err
