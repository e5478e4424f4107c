"""The golden check fails on a difference and on a missing file, and gpu tests say what was not checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]  # runs in subprocesses: torch cannot be imported twice in one

GOLDEN_TEST = """
def test_text(golden):
    golden("some", "{text}")
"""
GPU_TEST = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    raise AssertionError
"""


def test_a_golden_text_must_exist_and_be_equal(pytester: pytest.Pytester) -> None:
    shutil.copy(Path(__file__).parent / "conftest.py", pytester.path)
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(GOLDEN_TEST.format(text="a"))
    pytester.runpytest_subprocess().assert_outcomes(failed=1)
    pytester.runpytest_subprocess("--update-golden").assert_outcomes(passed=1)
    assert (pytester.path / "golden" / "some.txt").read_text() == "a\n"
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
    pytester.makepyfile(GOLDEN_TEST.format(text="b"))
    pytester.runpytest_subprocess().assert_outcomes(failed=1)


def test_a_gpu_test_says_what_was_not_checked(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copy(Path(__file__).parent / "conftest.py", pytester.path)
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(GPU_TEST)
    result = pytester.runpytest_subprocess("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not checked: test_on_a_gpu*"])
