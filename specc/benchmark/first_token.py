"""Time from a process's start to its first token: a native package against compiling from scratch.

``python -m specc.benchmark.first_token MODEL --method ngram --package x.specc`` writes the package if there is none,
then runs both sides in turn, each time in a fresh process: one loads the package and runs native code only, the other
compiles with Inductor, whose cache is an empty folder. All files are read once before, into the page cache.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specc.device import describe
from specc.errors import SpeccError
from specc.models.load import load_target

logger = logging.getLogger(__name__)

PROMPT = tuple(range(3, 19))  # token ids; which they are makes no difference to the time
_GENERATE = """
token = compiled.generate(torch.tensor([given["prompt"]]), max_new_tokens=1, do_sample=False)[0, -1]
print("first token", int(token), flush=True)
"""
NATIVE = (
    """
import json, sys
import specc, torch
given = json.loads(sys.argv[1])
compiled = specc.load(given["package"], native_only=True, device="cpu")
"""
    + _GENERATE
)
SCRATCH = (
    """
import json, sys
import specc, torch
given = json.loads(sys.argv[1])
compiled = specc.compile(given["model"], given["drafter"], backend="inductor", device="cpu", **given["options"])
"""
    + _GENERATE
)
EXPORT = """
import json, sys
import specc
given = json.loads(sys.argv[1])
compiled = specc.compile(given["model"], given["drafter"], backend="eager", device="cpu", **given["options"])
compiled.save(given["package"], native=True)
"""


@dataclass(frozen=True)
class FirstToken:
    """Seconds from the start of a process to its first token, one per process, in the order they were run."""

    native: tuple[float, ...]
    scratch: tuple[float, ...]
    token: int
    device: str
    threads: int
    torch: str

    @property
    def ratio(self) -> float:
        """How many times sooner the package's first token comes, by the medians."""
        return statistics.median(self.scratch) / statistics.median(self.native)

    def render(self) -> str:
        """Return the outcome as text."""
        lines = [f"{self.device}, {self.threads} threads, torch {self.torch}; first token: {self.token}"]
        for name, times in (("native package", self.native), ("from scratch", self.scratch)):
            lines.append(
                f"{name:15} median {statistics.median(times):8.2f} s, from {min(times):.2f} to {max(times):.2f}, "
                f"{len(times)} processes"
            )
        return "\n".join([*lines, f"{self.ratio:.1f} times sooner"])


def measure_first_token(given: Mapping[str, Any], repeats: int) -> FirstToken:
    """Run both sides in turn and return their times.

    Args:
        given: "model", "drafter", "package" (a path; written if it is not there), "options" of `specc.compile`.
        repeats: processes of each side.

    Raises:
        SpeccError: a process failed, or the sides disagree on the token.
    """
    given = {**given, "prompt": PROMPT}
    if not Path(given["package"]).exists():
        logger.info("writing %s", given["package"])
        _run(EXPORT, given, {})
    tokens = {_run(NATIVE, given, {})[1]}
    load_target(given["model"], device="cpu")  # the files that the other side reads
    native, scratch = [], []
    for _ in range(repeats):
        seconds, token = _run(NATIVE, given, {})
        native.append(seconds)
        tokens.add(token)
        with tempfile.TemporaryDirectory(prefix="specc-") as folder:
            seconds, token = _run(SCRATCH, given, {"TORCHINDUCTOR_CACHE_DIR": folder})
        scratch.append(seconds)
        tokens.add(token)
        logger.info("native %.2f s, from scratch %.2f s", native[-1], scratch[-1])
    if len(tokens) != 1:
        raise SpeccError(f"the sides give other first tokens: {sorted(tokens)}")
    here = describe(torch.device("cpu"))
    return FirstToken(
        tuple(native), tuple(scratch), tokens.pop(), here.name, torch.get_num_threads(), torch.__version__
    )


def _run(code: str, given: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[float, int]:
    """Run a process; return the seconds until it said its first token, and the token."""
    begin = time.perf_counter()
    seconds, token = 0.0, -1
    command = [sys.executable, "-c", code, json.dumps(given)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("first token"):
                seconds, token = time.perf_counter() - begin, int(line.split()[-1])
        if process.wait():
            errors.seek(0)
            raise SpeccError(f"a measured process failed:\n{errors.read().decode()[-2000:]}")
    return seconds, token


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse a command line, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m specc.benchmark.first_token", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--package", type=Path, required=True, help="written if there is none")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--drafter")
    parser.add_argument("--block", type=int)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    given = {
        "model": asked.model, "drafter": asked.drafter, "package": str(asked.package),
        "options": {"method": asked.method, "block": asked.block, "max_length": asked.max_length},
    }  # fmt: skip
    found = measure_first_token(given, asked.repeats)
    out = json.dumps({**asdict(found), "ratio": found.ratio}) if asked.json else found.render()
    sys.stdout.write(out + "\n")


if __name__ == "__main__":
    main()
