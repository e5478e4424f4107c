"""Golden files, and skipping what this machine cannot check."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# One order of sums on every CPU: numbers are compared with other machines' at 1e-5. MKL reads this once.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

GOLDEN = Path(__file__).parent / "golden"

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt; read the diff")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:  # pytest-xdist's workers would not agree on what there is to run
        raise pytest.UsageError(
            f"an address in the id of {unstable[0]} (one of {len(unstable)}): give parametrize ids"
        )
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only where it is needed: the light tests stay light

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=f"no CUDA device: not checked: {item.name}"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return a check that a text equals ``tests/golden/NAME.txt``, or with --update-golden becomes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} does not exist: run pytest --update-golden and read it"
        assert text == path.read_text(encoding="utf-8"), f"differs from {path.name}"

    return check
