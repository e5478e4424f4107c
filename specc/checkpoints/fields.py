"""Read a checkpoint's config.json key by key, so that no key that could change the numbers is overlooked.

`Fields` checks types, remembers what was read, and at the end refuses keys nobody read unless they are
listed as harmless or say nothing (null, false, empty).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specc.drafters.layers import ROPE_TYPES, RopeConfig
from specc.errors import ArtifactError

# Keys that transformers writes into every config, and training settings: none of them changes a forward pass
# in eval mode. Anything else must be read by a layout.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "gradient_checkpointing",
        "initializer_range",
        "max_window_layers",
        "model_type",
        "num_anchors",
        "num_hidden_layers_target",
        "num_target_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
        "vocab_size",
        "tokenizer_class",
        "loss_decay_gamma",
        "ce_loss_alpha",
        "l1_loss_alpha",
        "confidence_head_alpha",
    }
)
_REQUIRED: Any = object()
_MOST = 2**31 - 1
_HUGE = 1e30  # beyond it float32 ends; NaN is not below it either


class Fields:
    """The keys of one JSON object of a checkpoint's config, read once each and accounted for."""

    def __init__(self, path: Path, values: Mapping[str, Any], place: str = "") -> None:
        self.path, self.values, self.place = path, values, place
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether a key is there and not null."""
        return self.values.get(key) is not None

    def raw(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a key's value; null counts as absent."""
        self._read.add(key)
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.refuse(key, "null" if key in self.values else "no such key", "a value")
        return default

    def integer(self, key: str, default: int = _REQUIRED, least: int = 0, most: int = _MOST) -> int:
        value = self.raw(key, default)
        if value is default and default is not _REQUIRED:
            return int(default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refuse(key, repr(value), f"an integer from {least} to {most}")
        return value

    def number(self, key: str, default: float = _REQUIRED, above: float | None = None) -> float:
        """Return a finite number, greater than ``above`` if that is given."""
        value = self.raw(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _HUGE
        if not is_number or (above is not None and value <= above):
            raise self.refuse(key, repr(value), "a number" if above is None else f"a number above {above:g}")
        return float(value)

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, repr(value), "true or false")
        return value

    def choice(self, key: str, allowed: Iterable[str], default: str = _REQUIRED) -> str:
        value, allowed = self.raw(key, default), tuple(allowed)
        if value not in allowed:
            raise self.refuse(key, repr(value), f"one of {', '.join(allowed)}")
        return str(value)

    def integers(self, key: str, default: list[int] = _REQUIRED) -> tuple[int, ...]:
        value = self.raw(key, default)
        if not isinstance(value, list) or not all(
            isinstance(v, int) and not isinstance(v, bool) for v in value
        ):
            raise self.refuse(key, repr(value), "a list of integers")
        return tuple(value)

    def strings(self, key: str, default: list[str] = _REQUIRED) -> tuple[str, ...]:
        value = self.raw(key, default)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.refuse(key, repr(value), "a list of strings")
        return tuple(value)

    def fields(self, key: str) -> Fields:
        """Return a nested JSON object."""
        value = self.raw(key)
        if not isinstance(value, dict):
            raise self.refuse(key, repr(value), "an object")
        return Fields(self.path, value, f"{self.place}{key}.")

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse the first key that was not read, says something, and is not known to be harmless."""
        for key in sorted(self.values.keys() - self._read - HARMLESS - set(harmless)):
            if self.values[key] not in (None, False, "", [], {}):
                raise self.refuse(
                    key,
                    repr(self.values[key]),
                    "no such key in this layout: it may change the numbers, and nothing reads it",
                )

    def refuse(self, key: str, found: object, expected: object) -> ArtifactError:
        """Return the error that refuses this checkpoint for a key."""
        return ArtifactError(self.path, f"config.json {self.place}{key}", found, expected)


def read_rope(fields: Fields) -> RopeConfig:
    """Read rotary parameters as transformers 5 (rope_parameters) or 4 (rope_theta, rope_scaling) has them."""
    partial = fields.number("partial_rotary_factor", 1.0, above=0)
    if fields.has("rope_parameters"):
        rope = fields.fields("rope_parameters")
        fields.raw("rope_theta", None)
        fields.raw("rope_scaling", None)
        theta = rope.number("rope_theta", above=0)
    else:
        theta = fields.number("rope_theta", above=0)
        rope = (
            fields.fields("rope_scaling")
            if fields.has("rope_scaling")
            else Fields(fields.path, {}, fields.place)
        )
    old = rope.raw("type", None)  # transformers 4's name of rope_type
    kind = rope.choice("rope_type", ROPE_TYPES, old if old in ROPE_TYPES else "default")
    if old is not None and old != kind:
        raise rope.refuse("type", repr(old), f"one of {', '.join(ROPE_TYPES)}")
    known: dict[str, Any] = {"partial": rope.number("partial_rotary_factor", partial, above=0)}
    if kind != "default":
        known["factor"] = rope.number("factor", above=0)
    if kind == "llama3":
        known["low_freq_factor"] = rope.number("low_freq_factor", above=0)
        known["high_freq_factor"] = rope.number("high_freq_factor", above=0)
        known["original_max_position"] = rope.integer("original_max_position_embeddings", least=1)
    if kind == "yarn":
        known["original_max_position"] = rope.integer("original_max_position_embeddings", least=1)
        known["beta_fast"] = rope.number("beta_fast", 32.0, above=0)
        known["beta_slow"] = rope.number("beta_slow", 1.0, above=0)
        known["attention_factor"] = (
            rope.number("attention_factor", above=0) if rope.has("attention_factor") else None
        )
        if theta <= 1:
            raise rope.refuse("rope_theta", theta, "more than 1 with yarn")
    if kind == "llama3" and known["high_freq_factor"] <= known["low_freq_factor"]:
        raise rope.refuse("high_freq_factor", known["high_freq_factor"], "more than low_freq_factor")
    rope.finish()
    return RopeConfig(theta=theta, type=kind, **known)  # type: ignore[arg-type]  # choice() checked it
