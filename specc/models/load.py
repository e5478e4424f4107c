"""Load a target or a drafter model: a module, a folder, a .gguf file, a hub id or a built-in name.

A module that the caller made is used as it is: its weights, mode, dtype and device are never changed. What
would need a change (training mode, another dtype or device) is refused with the change to make.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specc.contracts import ModelInfo
from specc.device import default_dtype, resolve_device
from specc.errors import ArtifactError, InputError, UnknownNameError, UnsupportedError
from specc.files import read_path
from specc.models.default import BUILT_IN, ensure_default_model
from specc.models.files import WeightFiles, find_weights
from specc.models.generation import generation_defaults
from specc.models.info import ends_mismatch, model_info, plain_config
from specc.models.reading import load_gguf_tokenizer, load_tokenizer, read_config, read_folder, read_gguf
from specc.models.refusals import config_reasons, model_name, reasons_untraceable

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_FILE_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SAMPLES = 1024  # elements per tensor that a fingerprint reads
_CONFIG_NOISE = frozenset({"transformers_version", "dtype", "torch_dtype", "architectures"})


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be traced.

    Attributes:
        module: The transformers model, in eval mode.
        info: Its facts.
        tokenizer: Its tokenizer, or None when none came with it.
        generation: Its generation defaults as plain values (`specc.models.generation`).
        path: The folder or file it was read from, or None for a module.
        fingerprint: Identifies configuration and weights (sampled); equal for equal models.
        unused: Tensors in the files that the model does not read; MTP weights are found here.
    """

    module: nn.Module
    info: ModelInfo
    tokenizer: Any = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    fingerprint: str = ""
    unused: tuple[str, ...] = ()


def load_target(
    model: nn.Module | str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    tokenizer: Any = None,
    argument: str = "model",
) -> LoadedModel:
    """Load a causal LM and check that it can be traced.

    Args:
        model: A transformers causal LM, a local folder, a ``.gguf`` file, a hub id, or a built-in name.
        dtype: None means the checkpoint's, or float32 where the device would emulate it (`default_dtype`).
        device: None means the module's own; for files the GPU where there is one, else the CPU.
        tokenizer: Used instead of the one that lies beside the weights.
        argument: What the caller calls this argument; for messages.

    Raises:
        InputError: ``model``, ``dtype`` or ``device`` is not one of the above, or the path does not exist.
        UnknownNameError: A name that is neither a path, a built-in model, nor on the hub.
        ArtifactError: A file is missing, broken, truncated, or holds NaN or Inf.
        UnsupportedError: The model cannot be traced, with every reason.
    """
    wanted = _dtype(dtype)
    if isinstance(model, nn.Module):
        return _adopt(model, wanted, device, tokenizer, argument)
    if not isinstance(model, str | Path) or not str(model).strip():
        raise InputError(argument, model, "a model, a folder, a .gguf file, a hub id or a built-in name")
    place = resolve_device(device)
    path = find_model(model, argument)
    name = str(model) if str(model) in BUILT_IN else path.stem if path.is_file() else path.name
    read = _load_folder if path.is_dir() else _load_gguf
    return read(path, name, wanted, place, tokenizer)


def load_drafter_model(
    model: nn.Module | str | Path, *, target: LoadedModel, dtype: torch.dtype | str | None = None
) -> LoadedModel:
    """Load a causal LM that drafts for ``target``: on its device and, unless told otherwise, in its dtype."""
    where = next(target.module.parameters()).device
    if isinstance(model, nn.Module):
        return load_target(model, dtype=dtype, device=where, argument="drafter")
    return load_target(model, dtype=dtype or target.info.dtype, device=where, argument="drafter")


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if (dtype is not None and found is None) or (found is not None and found not in DTYPES.values()):
        raise InputError("dtype", str(dtype), f"one of {', '.join(DTYPES)}, or None for the checkpoint's")
    return found


def find_model(model: str | Path, argument: str = "model") -> Path:
    """Return the folder or .gguf file that a name or path stands for, fetching it where needed."""
    path = read_path(argument, model)
    if path.is_dir():
        if not isinstance(model, Path) and str(model) in BUILT_IN:
            logger.warning("%s: the folder of that name here is used, not the built-in model", model)
        return path
    if path.is_file():
        if path.suffix == ".specc":
            raise InputError(
                argument, str(model), "a model; this is a package: specc.load or specc run opens it"
            )
        if path.suffix != ".gguf":
            raise InputError(
                argument, str(model), "a file has to be .gguf; otherwise give the model's folder"
            )
        return path
    name = str(model)
    if name in BUILT_IN:
        return ensure_default_model()
    looks_local = isinstance(model, Path) or path.suffix == ".gguf" or name.startswith((".", "/", "~", "\\"))
    if looks_local or not _HUB_ID.fullmatch(name):
        raise InputError(argument, name, "there is no such file or folder")
    return _fetch(name, argument)


def _fetch(name: str, argument: str) -> Path:
    """Return the local snapshot of a hub id, downloading it when the hub can be reached."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, etag_timeout=5))
    except Exception as error:  # the hub's client raises its own, requests' and OSError classes
        if "/" not in name:
            raise UnknownNameError("model", name, BUILT_IN) from error
        raise InputError(
            argument,
            name,
            "not a folder here, not in the hub's local cache, and it cannot be downloaded "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]}). Download it where there is a "
            "connection (hf download NAME --local-dir FOLDER) and give the folder",
        ) from error


def _adopt(
    module: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    tokenizer: Any,
    argument: str,
) -> LoadedModel:
    """Check a caller's module; it is not changed."""
    _refuse(model_name(module), reasons_untraceable(module))
    info = model_info(module, tokenizer)
    if dtype is not None and info.dtype is not dtype:
        raise InputError(
            "dtype", str(dtype), f"the {argument} given is {info.dtype}; convert it with .to() first"
        )
    where = next(module.parameters()).device
    if device is not None and resolve_device(device) != where:
        raise InputError(
            "device", str(device), f"the {argument} given is on {where}; move it with .to() first"
        )
    return _checked(module, info, tokenizer, None, ())


def _load_folder(
    path: Path, name: str, dtype: torch.dtype | None, device: torch.device, tokenizer: Any
) -> LoadedModel:
    config = read_config(path)
    _refuse(str(path), config_reasons(config))
    weights = find_weights(path)
    dtype = dtype or default_dtype(_file_dtype(path, weights), device)
    module, unused = read_folder(path, dtype, config)
    module.to(device)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(path)
    return _checked(module, model_info(module, tokenizer, name), tokenizer, path, unused)


def _load_gguf(
    path: Path, name: str, dtype: torch.dtype | None, device: torch.device, tokenizer: Any
) -> LoadedModel:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ArtifactError(path, "first bytes", magic, b"GGUF")
    # Blocks of a few bits have no dtype of their own; their scales are float16, whose range bf16 covers.
    dtype = dtype or default_dtype(torch.bfloat16, device)
    module, unused = read_gguf(path, dtype)
    module.to(device)
    tokenizer = tokenizer if tokenizer is not None else load_gguf_tokenizer(path, module.config)
    return _checked(module, model_info(module, tokenizer, name), tokenizer, path, unused)


def _file_dtype(path: Path, weights: WeightFiles) -> torch.dtype:
    found = _FILE_DTYPES.get(weights.dtype)
    if found is None:
        raise UnsupportedError(f"{path} cannot be traced", [f"its weights are {weights.dtype}: quantised"])
    return found


def _refuse(name: str, reasons: tuple[str, ...]) -> None:
    if reasons:
        raise UnsupportedError(f"{name} cannot be traced", reasons)


def _checked(
    module: nn.Module, info: ModelInfo, tokenizer: Any, path: Path | None, unused: tuple[str, ...]
) -> LoadedModel:
    """Run the checks that need the weights, and put the result together."""
    _refuse(info.name, reasons_untraceable(module))
    refuse_nonfinite(module, path or info.name)
    _refuse(info.name, ends_mismatch(module))
    if unused:
        logger.info("%s: %d tensors are not read by the model, e.g. %s", info.name, len(unused), unused[0])
    defaults = generation_defaults(module)
    return LoadedModel(module, info, tokenizer, defaults, path, weights_fingerprint(module), unused)


def refuse_nonfinite(module: nn.Module, name: object) -> None:
    """Raise ArtifactError naming the first weight that holds NaN or Inf."""
    for key, value in module.state_dict().items():
        if not value.is_floating_point() or value.numel() == 0:
            continue
        low, high = torch.aminmax(value.detach())  # one pass; both are NaN when any element is
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise ArtifactError(name, key, "NaN or Inf", "finite weights")


def weights_fingerprint(module: nn.Module) -> str:
    """Return a hash of the configuration and of each weight's name, shape, dtype and up to 1024 elements."""
    config = {key: value for key, value in plain_config(module).items() if key not in _CONFIG_NOISE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    seen: dict[int, str] = {}
    for name, value in sorted(module.state_dict().items()):
        if seen.setdefault(value.data_ptr(), name) != name and value.numel():
            continue  # tied: whether both names are listed depends on how the model was made
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(_sample(value))
    return digest.hexdigest()


def _sample(value: Tensor) -> bytes:
    flat = value.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    return bytes(flat[::step][:_SAMPLES].contiguous().cpu().view(torch.uint8).numpy().tobytes())
