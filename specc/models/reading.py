"""Read a model and its tokenizer through transformers, and say what is wrong with files that do not load."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specc.errors import ArtifactError, SpeccError, UnsupportedError
from specc.models.files import read_json

_SHOWN = 500  # characters of another library's message
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def read_config(path: Path) -> Any:
    """Return the folder's configuration after the checks that need no weights."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if not (path / "config.json").is_file() and (path / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"{path} is not a whole model",
            ["it holds adapters that are not merged"],
            "merge them into their base model (merge_and_unload) and save that",
        )
    values = read_json(path / "config.json")
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise ArtifactError(path / "config.json", "model_type", kind, "the name of a model family")
    if kind not in KNOWN:
        near = difflib.get_close_matches(kind, KNOWN, n=1, cutoff=0.6)
        reasons = [
            f"this transformers has no causal LM of type {kind!r}"
            + (f" (it has {near[0]!r})" if near else "")
        ]
        if values.get("is_encoder_decoder"):
            reasons.insert(0, "it is an encoder-decoder model")
        if "auto_map" in values:
            reasons.append("it needs code from its own folder (auto_map), which is not run")
        raise UnsupportedError(f"{path} cannot be loaded", reasons)
    with _as_artifact_error(path / "config.json", "content", "a valid configuration"):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    file = path / "generation_config.json"
    if file.is_file():  # transformers passes over one that it cannot read, and end tokens with it
        read_json(file)
    return config


def read_folder(path: Path, dtype: torch.dtype, config: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model in a folder, in eval mode, and the names of the tensors that it does not read."""
    return _from_pretrained(path, path, dtype, config=config, use_safetensors=True)


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model in a .gguf file, its weights unpacked to ``dtype``, and the tensors left unread."""
    import transformers

    options: dict[str, Any] = {"gguf_file": path.name}
    if hasattr(transformers, "GgufConfig"):  # without it (before it existed) reading always unpacked
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    module, unused = _from_pretrained(path, path.parent, dtype, **options)
    # Its job is done: plain weights are left. Kept, it would make save_pretrained write a quantised config.
    module.config.__dict__.pop("quantization_config", None)
    for name, value in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
        if hasattr(module, name):
            setattr(module, name, value)
    return module, unused


def _from_pretrained(
    path: Path, folder: Path, dtype: torch.dtype, **options: Any
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a model whose every parameter came from the files, and the names of tensors it did not read."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    found: dict[str, Any]
    module: nn.Module

    with _as_artifact_error(path, "weights", "weights that fit the configuration"), quiet():
        module, found = auto.from_pretrained(
            str(folder),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
        )
    wrong = [
        f"{name} is {list(found_shape)}" for name, found_shape, _ in sorted(found.get("mismatched_keys", ()))
    ]
    if wrong:
        raise ArtifactError(path, "shapes", ", ".join(wrong[:4]), "the shapes of the configuration")
    missing = sorted(found.get("missing_keys", ()))
    if missing:
        raise ArtifactError(
            path, "tensors", f"{len(missing)} missing ({', '.join(missing[:4])})", "all of them"
        )
    if found.get("error_msgs"):
        raise ArtifactError(path, "weights", found["error_msgs"][0], "weights that fit the configuration")
    module.eval().requires_grad_(False)
    return module, tuple(sorted(found.get("unexpected_keys", ())))


@contextlib.contextmanager
def _as_artifact_error(path: Path, what: str, expected: str) -> Iterator[None]:
    """Turn whatever a reader raises about a file into one ArtifactError that names the file."""
    try:
        yield
    except (SpeccError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        raise ArtifactError(path, what, f"{type(error).__name__}: {text}", expected) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' bars and reports out of the caller's terminal; errors still raise."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    theirs: Any = logging
    gguf: Any = modeling_gguf_pytorch_utils

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    bar = getattr(gguf, "tqdm", None)  # this one has no switch
    if bar is not None:
        gguf.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        if bar is not None:
            gguf.tqdm = bar
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


def load_gguf_tokenizer(path: Path, config: Any) -> Any:
    """Return the tokenizer in a .gguf file; ``config`` is the configuration read from the same file.

    transformers before 5.24 leaves the tokenizer's end and pad tokens at a class default, while the
    configuration has the ids that the file names.
    """
    tokenizer = load_tokenizer(path)
    for kind in ("bos", "eos", "pad"):
        known = getattr(config, f"{kind}_token_id", None)
        if isinstance(known, int) and getattr(tokenizer, f"{kind}_token_id") != known:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(known))
    return tokenizer


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a model folder or .gguf file, or None where a folder has none."""
    from transformers import AutoTokenizer

    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    options = {} if path.is_dir() else {"gguf_file": path.name}
    folder = path if path.is_dir() else path.parent
    with _as_artifact_error(path, "tokenizer", "a tokenizer transformers can read"), quiet():
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **options
        )
