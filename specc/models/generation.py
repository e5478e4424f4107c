"""Generation settings with transformers' precedence, and what specc asks of tokenizers and streamers.

Settings are plain values, so that a package can carry them and merge them without transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from specc.errors import InputError

# What transformers uses for a setting that neither the model nor the caller set (GenerationConfig's table).
# The lengths are not here: an unset max_length means DEFAULT_NEW_TOKENS more than the prompt.
GLOBAL_DEFAULTS: Mapping[str, Any] = MappingProxyType({
    "do_sample": False, "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "num_return_sequences": 1,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "num_beam_groups": 1, "diversity_penalty": 0.0,
    "output_scores": False, "return_dict_in_generate": False, "remove_invalid_values": False,
    "use_cache": True, "early_stopping": False,
})  # fmt: skip
DEFAULT_NEW_TOKENS = 20
_NOISE = frozenset({"transformers_version", "_from_model_config"})


@runtime_checkable
class Streamer(Protocol):
    """What receives tokens as they are decided; transformers' streamers are ones.

    ``put`` gets the prompt [batch, length] first, then new token ids [count] on the CPU; ``end`` follows.
    """

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def generation_defaults(module: nn.Module) -> dict[str, Any]:
    """Return what the model's generation configuration sets, as plain values; unset ones are left out."""
    return _set_values(getattr(module, "generation_config", None))


def _set_values(config: Any) -> dict[str, Any]:
    """Return the settings that a GenerationConfig, or a mapping, sets."""
    if config is not None and not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise InputError(
            "generation_config", type(config).__name__, "a GenerationConfig or a mapping of settings"
        )
    values = config if isinstance(config, Mapping) else config.to_dict() if config is not None else {}
    return {key: _plain(value) for key, value in values.items() if value is not None and key not in _NOISE}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def merge_generation(
    defaults: Mapping[str, Any], generation_config: Any = None, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return one set of settings: arguments over ``generation_config`` over the model's over global ones.

    An argument that is given as None switches its setting off, as in transformers. None inside a
    configuration means "not set".

    Args:
        defaults: What `generation_defaults` returned for the model.
        generation_config: A transformers GenerationConfig, a mapping of settings, or None.
        given: The caller's own arguments.
    """
    merged = {**GLOBAL_DEFAULTS, **_set_values(defaults), **_set_values(generation_config)}
    merged.update({key: _plain(value) for key, value in (given or {}).items()})
    return merged


def asked_names(generation_config: Any = None, given: Mapping[str, Any] | None = None) -> set[str]:
    """Return the names of the settings that a caller gave, as opposed to the model's own and the global ones."""
    return set(_set_values(generation_config)) | set(given or {})


def generation_lengths(settings: Mapping[str, Any], prompt: int, limit: int) -> tuple[int, int]:
    """Return (largest, smallest) total length for a prompt of ``prompt`` tokens, as transformers counts them.

    Args:
        settings: What `merge_generation` returned.
        prompt: Tokens of the prompt, padding not counted.
        limit: The model's last position plus one; it bounds the default length only.
    """
    if (new := settings.get("max_new_tokens")) is not None:
        largest = prompt + int(new)
    elif (total := settings.get("max_length")) is not None:
        largest = int(total)
    else:
        largest = min(prompt + DEFAULT_NEW_TOKENS, limit)
    fewest = settings.get("min_new_tokens")
    smallest = prompt + int(fewest) if fewest is not None else int(settings.get("min_length") or 0)
    return largest, smallest


def eos_ids(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a sequence: none, one or several."""
    value = settings.get("eos_token_id")
    if value is None:
        return ()
    if not isinstance(value, int | Sequence) or isinstance(value, str):
        raise InputError("eos_token_id", value, "an id or a list of ids, each 0 or more")
    ids = [value] if isinstance(value, int) else list(value)
    bad = [item for item in ids if not isinstance(item, int) or isinstance(item, bool) or item < 0]
    if bad:
        raise InputError("eos_token_id", value, "an id or a list of ids, each 0 or more")
    return tuple(ids)


def pad_id(settings: Mapping[str, Any]) -> int | None:
    """Return the id that fills ended sequences: the pad id, else the first end id, else None."""
    value = settings.get("pad_token_id")
    if value is not None:
        if isinstance(value, bool) or not isinstance(
            value, int
        ):  # negative ones mark padding, and are never read
            raise InputError("pad_token_id", value, "an id")
        return value
    ends = eos_ids(settings)
    return ends[0] if ends else None


def check_streamer(streamer: object) -> Streamer:
    """Return ``streamer``; InputError when it cannot be streamed to."""
    if not isinstance(streamer, Streamer):
        raise InputError("streamer", type(streamer).__name__, "an object with put(tokens) and end()")
    return streamer


@dataclass(frozen=True)
class TokenizerFacts:
    """What a tokenizer says about its ids."""

    vocab: int
    eos: int | None
    bos: int | None
    pad: int | None
    has_chat_template: bool


def tokenizer_facts(tokenizer: Any) -> TokenizerFacts:
    """Return the facts of a transformers tokenizer."""
    return TokenizerFacts(
        len(tokenizer),
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.pad_token_id,
        bool(getattr(tokenizer, "chat_template", None)),
    )


def tokenizer_difference(first: Any, second: Any) -> str | None:
    """Return the first id at which two tokenizers differ, in words, or None when they are the same.

    Only ids that tokenizers produce are compared: models may pad their vocabularies beyond them.
    """
    count = min(len(first), len(second))
    for start in range(0, count, 8192):
        ids = list(range(start, min(start + 8192, count)))
        tokens, others = first.convert_ids_to_tokens(ids), second.convert_ids_to_tokens(ids)
        for index, token, other in zip(ids, tokens, others, strict=True):
            if token != other:
                return f"id {index} is {token!r} in one tokenizer and {other!r} in the other"
    if len(first) != len(second):
        extra = (first if len(first) > len(second) else second).convert_ids_to_tokens(count)
        return f"id {count} is {extra!r} in one tokenizer; the other has only {count} ids"
    return None


def encode_prompt(
    tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]], *, chat: bool = True, **template: Any
) -> Tensor:
    """Return the ids of a prompt, int64 [1, length].

    Args:
        tokenizer: The target's.
        prompt: A user's message, or a list of messages with "role" and "content".
        chat: Apply the chat template where the tokenizer has one; without, a string is encoded as it stands.
        **template: Passed on to the chat template.
    """
    if tokenizer is None:
        raise InputError("prompt", prompt, "text needs a tokenizer, and none came with the model: give ids")
    messages = None if isinstance(prompt, str) else [dict(message) for message in prompt]
    if chat and getattr(tokenizer, "chat_template", None):
        turns = messages if messages is not None else [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **template)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes them itself
    elif messages is None:
        ids = tokenizer(prompt)["input_ids"]
    else:
        raise InputError("prompt", "messages", "the tokenizer has no chat template: give one text")
    if not ids:
        raise InputError("prompt", prompt, "it has no tokens")
    return torch.tensor([ids], dtype=torch.int64)
