"""One decoder layer of a target's own type, with given weights, run on rows: the middle of an MTP module.

transformers builds the layer and converts the checkpoint's tensors (fused experts, for one), as it does for
the whole model, so every family it can load works here without a word about its names.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from specc.errors import SpeccError, UnsupportedError
from specc.models.attention import CacheShape, attention_on_rows, probe_context, rows_context

_LAYER = "model.layers.0."
_LOST = 10**8  # numbers that missing tensors may have: up to there they are named, beyond it a size is wrong
_FULL = "full_attention"


class DecoderLayer(nn.Module):
    """A transformers decoder layer with its rotary embedding, over rows and caches."""

    def __init__(self, layer: nn.Module, rotary: nn.Module | None, width: int) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary
        self.cache = self._probe(width)

    def forward(
        self,
        hidden: Tensor,
        position: Tensor,
        *,
        slot: Tensor,
        cache_row: Tensor,
        first: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """Return the output [rows, hidden]; row i sees cache rows first[i]..cache_row[i] of its slot."""
        rows = rows_context(
            slot=slot,
            cache_row=cache_row,
            first=first,
            key_caches={0: key_cache},
            value_caches={0: value_cache},
        )
        with attention_on_rows(self), rows:
            return self._run(hidden, position)

    def _run(self, hidden: Tensor, position: Tensor) -> Tensor:
        batch, where = hidden[None], position[None]
        # transformers turns autocast and gradients off around rope; both are off already, and their marks
        # would otherwise be traced as nodes that compute nothing.
        with torch._C.DisableTorchFunction(), _as_if_exported():
            turns = None if self.rotary is None else self.rotary(batch, where)
            out: Any = self.layer(batch, attention_mask=None, position_ids=where, position_embeddings=turns)
        output: Tensor = out[0] if isinstance(out, tuple) else out
        return output[0]

    def _probe(self, width: int) -> CacheShape:
        """Return the K/V shape, from one forward on fake tensors."""
        weight = next(p for p in self.layer.parameters() if p.is_floating_point())
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, torch.no_grad(), attention_on_rows(self), probe_context() as layers:
            hidden = torch.empty(3, width, dtype=weight.dtype, device=weight.device)
            self._run(hidden, torch.zeros(3, dtype=torch.int64, device=weight.device))
        return layers[0]


@dataclass(frozen=True)
class LoadedLayer:
    """A decoder layer, a norm of the family's class to copy, and the tensors that did not fit."""

    layer: DecoderLayer | None  # None when something did not fit
    norm: nn.Module
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # name, found, expected

    def norm_of(self, weight: Tensor) -> nn.Module:
        """Return a norm of the family's own rule (its epsilon, its weight offset) with this weight."""
        norm = copy.deepcopy(self.norm)
        norm.load_state_dict({"weight": weight})
        return norm.requires_grad_(False)


def load_decoder_layer(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> LoadedLayer:
    """Build one decoder layer of the model that ``config`` describes and load tensors named inside it.

    Whether the layer is sparse (experts) or dense follows from the tensors; it attends in full unless
    ``mtp_layer_types`` says otherwise.

    Raises:
        UnsupportedError: transformers cannot build such a layer, or its kind of attention is ambiguous.
    """
    from transformers import AutoModelForCausalLM

    try:
        configuration = _one_layer(config, is_sparse=any(".experts." in name for name in tensors))
    except SpeccError:
        raise
    except Exception as error:  # whatever transformers' own checks of a configuration raise
        raise UnsupportedError(
            f"an MTP module inside a {config.get('model_type')}",
            [
                f"transformers refuses its configuration: {type(error).__name__}: {' '.join(str(error).split())}"
            ],
        ) from error
    try:
        with torch.device("meta"):
            skeleton: Any = AutoModelForCausalLM.from_config(configuration, dtype=dtype)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UnsupportedError(
            f"an MTP module inside a {configuration.model_type}",
            [f"transformers cannot build its decoder layer: {type(error).__name__}: {error}"],
        ) from error
    shapes = {name: value.shape for name, value in skeleton.state_dict().items()}
    if not any(name.startswith(_LAYER) for name in shapes) or "model.norm.weight" not in shapes:
        raise UnsupportedError(
            f"an MTP module inside a {configuration.model_type}",
            [f"its layers are not at {_LAYER} under model.norm"],
        )
    wanted = sum(shape.numel() for name, shape in shapes.items() if name.startswith(_LAYER))
    held = sum(tensor.numel() for tensor in tensors.values())
    if wanted > max(2 * held, held + _LOST):
        raise UnsupportedError(
            f"an MTP module inside a {configuration.model_type}",
            [f"its config describes a layer of {wanted} numbers, and its tensors hold {held}"],
        )
    # Everything outside the layer is a filler, so that what transformers misses are the layer's own tensors.
    state = {name: torch.zeros(shape) for name, shape in shapes.items() if not name.startswith(_LAYER)}
    state |= {_LAYER + name: value for name, value in tensors.items()}
    with _quiet():
        model, report = type(skeleton).from_pretrained(
            None,
            config=configuration,
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model.eval().requires_grad_(False)
    found = {
        kind: tuple(sorted(name.removeprefix(_LAYER) for name in report[f"{kind}_keys"]))
        for kind in ("missing", "unexpected")
    }
    mismatched = tuple(
        (name.removeprefix(_LAYER), tuple(a), tuple(b)) for name, a, b in report["mismatched_keys"]
    )
    whole = not (mismatched or any(found.values()))
    layer = None
    if whole:
        width = model.get_input_embeddings().weight.shape[1]
        layer = DecoderLayer(model.model.layers[0], getattr(model.model, "rotary_emb", None), width)
    return LoadedLayer(layer, model.model.norm, found["missing"], found["unexpected"], mismatched)


def final_norm(module: nn.Module) -> nn.Module:
    """Return the norm that a causal LM applies before its head."""
    get: Any = getattr(module, "get_decoder", None)
    decoder = get() if callable(get) else module
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
        found = getattr(decoder, name, None)
        if isinstance(found, nn.Module):
            return found
    raise UnsupportedError(
        f"{type(module).__name__} has no final norm specc can find", ["an MTP module reads past it"]
    )


def _one_layer(config: Mapping[str, Any], *, is_sparse: bool) -> Any:
    """Return the configuration cut to one layer of the kind the MTP module has, with a token vocabulary."""
    from transformers import AutoConfig

    values = dict(config)
    model_type = values.pop("model_type", None)
    kinds = values.get("mtp_layer_types") or [_FULL]
    is_mixed = any("sliding" in str(kind) for kind in values.get("layer_types") or ())
    if is_mixed and values.get("mtp_layer_types") is None:
        raise UnsupportedError(
            f"an MTP module inside a {model_type}",
            ["the target mixes sliding and full attention and its config has no mtp_layer_types"],
        )
    values |= {
        "num_hidden_layers": 1,
        "vocab_size": 2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    changes = {
        "layer_types": kinds[:1],
        "mlp_layer_types": ["sparse" if is_sparse else "dense"],
        "first_k_dense_replace": 0 if is_sparse else 1,
        "mlp_only_layers": [] if is_sparse else [0],
    }
    values |= {key: value for key, value in changes.items() if values.get(key) is not None}
    for key in ("quantization_config", "transformers_version", "architectures", "dtype", "torch_dtype"):
        values.pop(key, None)
    return AutoConfig.for_model(model_type, **values)


@contextlib.contextmanager
def _as_if_exported() -> Iterator[None]:
    """Make transformers take the branches it takes under torch.export: its experts then run in any dtype."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class _quiet:  # noqa: N801  a context manager, used like a function
    """Keep transformers from reporting on the skeleton, which nobody asked to see."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("transformers")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
