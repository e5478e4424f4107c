"""Read a JSON object so that every key is read, known to be harmless, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from specc.checkpoints.reading import Folder
from specc.errors import ArtifactError

T = TypeVar("T")

# Keys of transformers configs that do not change what a drafter's forward computes in eval mode.
HARMLESS = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "hidden_dropout", "initializer_range", "is_decoder", "is_encoder_decoder", "max_window_layers", "name_or_path",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "return_dict", "torch_dtype",
    "transformers_version", "unk_token_id", "use_cache",
})


class Keys:
    """The keys of one JSON object of a checkpoint; a null value counts as an absent key."""

    def __init__(self, folder: Folder, values: Mapping[str, Any], where: str = "") -> None:
        self.folder, self._where = folder, where
        self._values = {key: value for key, value in values.items() if value is not None}
        self._left = set(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def need(self, key: str, kind: type[T], least: float | None = None) -> T:
        """Return a key's value; ArtifactError if it is absent, of another type, or below ``least``."""
        if key not in self._values:
            raise self.refuse(key, "no such key", f"a value of type {kind.__name__}")
        self._left.discard(key)
        value = self._values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refuse(key, repr(value), f"a value of type {kind.__name__}")
        if least is not None and value < least:  # type: ignore[operator]  # only given for numbers
            raise self.refuse(key, repr(value), f"at least {least}")
        return value

    def get(self, key: str, kind: type[T], default: T, least: float | None = None) -> T:
        return self.need(key, kind, least) if key in self._values else default

    def maybe(self, key: str, kind: type[T], least: float | None = None) -> T | None:
        return self.need(key, kind, least) if key in self._values else None

    def only(self, key: str, allowed: tuple[object, ...], why: str = "") -> None:
        """Refuse a present key whose value is not one of those specc knows the meaning of."""
        self._left.discard(key)
        if key in self._values and self._values[key] not in allowed:
            expected = " or ".join(repr(value) for value in allowed)
            raise self.refuse(key, repr(self._values[key]), expected + (f" ({why})" if why else ""))

    def inner(self, key: str) -> Keys:
        """Return the keys of an object inside this one."""
        return Keys(self.folder, self.need(key, dict), f"{self._where}{key}.")

    def layer_ids(self, key: str) -> tuple[int, ...] | None:
        """Return a list of layer numbers, or None when the key is absent."""
        found = self.maybe(key, list)
        if found is None:
            return None
        if not found or any(not isinstance(item, int) or isinstance(item, bool) for item in found):
            raise self.refuse(key, repr(found), "a list of layer numbers")
        return tuple(found)

    def ignore(self, *names: str) -> None:
        """Note keys that are known not to matter to this layout."""
        self._left.difference_update(names)

    def refuse(self, key: str, found: object, expected: object) -> ArtifactError:
        return self.folder.refuse(f"{self._where}{key}", found, expected)

    def finish(self) -> None:
        """Refuse keys nobody read: they could change what the drafter computes."""
        for key in sorted(self._left - HARMLESS):
            raise self.refuse(
                key, repr(self._values[key]), "a key this layout is known to have: ignoring it could change the numbers"
            )
