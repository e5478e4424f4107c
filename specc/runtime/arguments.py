"""Read the arguments of `Compiled.generate`: everything is checked here, before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.contracts import ACCEPT_RULES, AcceptRule
from specc.errors import InputError, UnknownNameError, UnsupportedError
from specc.models.generation import GLOBAL_DEFAULTS, asked_names, eos_ids, merge_generation, pad_id
from specc.runtime.host_accept import OwnRules, read_processors
from specc.runtime.scheduler import Request
from specc.sampling import WARPERS, bind_all
from specc.sampling.constraint import Constraint
from specc.step import MAX_EOS

_SETTINGS = frozenset(warper.name for warper in WARPERS)
_OWN = frozenset({
    "max_new_tokens", "max_length", "do_sample", "eos_token_id", "pad_token_id", "bos_token_id",
    "num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states",
    "stop_strings", "use_cache", "logits_processor", "constraint",
})  # fmt: skip
# Settings of transformers that change nothing here, at whatever value: how its own caches and loops run.
_IGNORED = frozenset({
    "cache_implementation", "cache_config", "length_penalty", "early_stopping", "diversity_penalty",
    "num_beam_groups", "disable_compile", "compile_config", "max_cache_len",
    "continuous_batching_config", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "prefill_chunk_size",
    "decoder_start_token_id", "return_legacy_cache", "low_memory", "_from_model_config", "transformers_version",
})  # fmt: skip


_EXTRAS = {"logits": "output_logits", "scores": "output_scores", "hidden": "output_hidden_states"}


@dataclass(frozen=True)
class Arguments:
    """One call of `generate`, checked and resolved."""

    requests: tuple[Request, ...]
    prompts: Tensor  # int64 [sequences, columns] as given, repeated for num_return_sequences
    pad: int
    stop_strings: tuple[str, ...]
    extras: tuple[str, ...]
    returns_dict: bool
    notes: tuple[str, ...]  # what a caller should know of a call that goes on


def read_arguments(
    input_ids: Tensor | Sequence[Sequence[int]] | Sequence[int],
    attention_mask: Tensor | None,
    *,
    defaults: Mapping[str, Any],
    generation_config: object,
    given: Mapping[str, Any],
    seed: int | Sequence[int] | None,
    accept: AcceptRule,
    vocab: int,
    capacity: int,
) -> Arguments:
    """Resolve arguments into requests.

    Raises:
        InputError: a value is wrong, or a prompt does not fit.
        UnknownNameError: an argument that neither transformers nor specc has.
        UnsupportedError: transformers has it, and specc cannot honour it exactly.
    """
    settings = merge_generation(defaults, generation_config, given)
    asked = asked_names(generation_config, given)
    # An unknown key of the model's own file is passed over, as transformers does; of the caller's it is a mistake.
    _refuse_others({n: v for n, v in settings.items() if n in asked or n in _KNOWN}, set(defaults) - asked)
    rows = prompt_rows(input_ids, attention_mask, vocab)
    if accept not in ACCEPT_RULES:
        raise UnknownNameError("accept rule", accept, ACCEPT_RULES)
    copies = _count(settings, "num_return_sequences", 1)
    eos = eos_ids(settings)
    if len(eos) > MAX_EOS:
        raise InputError("eos_token_id", list(eos), f"at most {MAX_EOS} ids")
    warp = {name: settings.get(name) for name in _SETTINGS if settings.get(name) is not None}
    do_sample = _flag(settings, "do_sample")
    ids = [row for row in rows for _ in range(copies)]
    seeds = _seeds(seed, len(ids))
    processors = read_processors(settings.get("logits_processor"), settings)
    constraints = _constraints(settings.get("constraint"), len(ids))
    requests, notes = [], []
    for index, (row, its_seed) in enumerate(zip(ids, seeds, strict=True)):
        wanted = _limit(settings, row.shape[0], capacity)
        if wanted > capacity:
            notes.append(
                f"a prompt of {row.shape[0]} tokens leaves room for {capacity - row.shape[0]} more, not for "
                f"{wanted - row.shape[0]}: max_length={capacity} was set at compile"
            )
        columns, families = bind_all(warp, vocab=vocab, eos=eos, do_sample=do_sample)
        requests.append(
            Request(
                row,
                min(wanted, capacity),
                eos,
                its_seed,
                settings=columns,
                families=families,
                rule=accept,
                key=index,
                own=OwnRules(processors, constraints[index]),
            )
        )
    pad = pad_id(settings)
    extras = tuple(extra for extra, name in _EXTRAS.items() if _flag(settings, name))
    strings = settings.get("stop_strings")
    strings = () if strings is None else (strings,) if isinstance(strings, str) else strings
    if not isinstance(strings, Sequence) or any(not isinstance(s, str) or not s for s in strings):
        raise InputError("stop_strings", strings, "a string or a list of strings, none empty")
    prompts = torch.as_tensor(input_ids) if not isinstance(input_ids, Tensor) else input_ids
    prompts = (prompts[None] if prompts.dim() == 1 else prompts).repeat_interleave(copies, 0)
    return Arguments(
        tuple(requests),
        prompts,
        0 if pad is None else pad,
        tuple(strings),
        extras,
        _flag(settings, "return_dict_in_generate"),
        tuple(dict.fromkeys(notes)),
    )


def prompt_rows(input_ids: Any, attention_mask: Any, vocab: int) -> list[Tensor]:
    """Return each prompt without its left padding, int64 [tokens] on the CPU."""
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        given = type(input_ids).__name__
        raise InputError("input_ids", given, "a tensor or equal-length lists of ids") from error
    if not ids.numel():  # before its dtype: an empty list becomes a float tensor
        raise InputError("input_ids", list(ids.shape), "at least one token in every prompt")
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        raise InputError(
            "input_ids", f"{ids.dtype} {list(ids.shape)}", "integers [batch, tokens] or [tokens]"
        )
    ids = (ids[None] if ids.dim() == 1 else ids).to("cpu", torch.int64)
    try:
        mask = torch.ones_like(ids)
        if attention_mask is not None:
            mask = torch.as_tensor(attention_mask).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        given = type(attention_mask).__name__
        raise InputError("attention_mask", given, "zeros and ones of input_ids' shape") from error
    mask = mask[None] if mask.dim() == 1 else mask
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(
            "attention_mask", list(mask.shape), f"zeros and ones of input_ids' shape {list(ids.shape)}"
        )
    mask = mask.to(torch.int64)
    if bool((mask.diff(dim=1) < 0).any()):
        raise InputError("attention_mask", "zeros after ones", "left padding only: zeros, then ones")
    if bool((mask.sum(1) == 0).any()):
        raise InputError("input_ids", "a prompt of padding only", "at least one token in every prompt")
    rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    for row in rows:
        low, high = int(row.min()), int(row.max())
        if low < 0 or high >= vocab:
            raise InputError("input_ids", low if low < 0 else high, f"ids from 0 to {vocab - 1}")
    return rows


def _limit(settings: Mapping[str, Any], prompt: int, capacity: int) -> int:
    """Return the total tokens at which a prompt's generation would end; by default as many as fit."""
    if prompt > capacity:
        raise InputError(
            "input_ids",
            f"a prompt of {prompt} tokens",
            f"at most max_length={capacity} tokens (set at compile)",
        )
    if settings.get("max_new_tokens") is not None:
        return prompt + _count(settings, "max_new_tokens", 0)
    if settings.get("max_length") is None:
        return capacity
    wanted = _count(settings, "max_length", 0)
    if wanted < prompt:
        raise InputError("max_length", wanted, f"at least the {prompt} tokens of the prompt")
    return wanted


def _count(settings: Mapping[str, Any], name: str, least: int) -> int:
    value = settings[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(name, value, f"a whole number, {least} or more")
    return value


def _flag(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name)
    if value not in (None, False, True):
        raise InputError(name, value, "True or False")
    return bool(value)


def _seeds(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """Return a seed per sequence: consecutive ones from an int, or the given ones."""
    if seed is None:
        seed = int(torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64).item())
    if isinstance(seed, bool) or not isinstance(seed, int | Sequence):
        raise InputError("seed", seed, "a whole number, one per sequence, or None")
    seeds = [seed + i for i in range(count)] if isinstance(seed, int) else list(seed)
    if len(seeds) != count or not all(isinstance(s, int) and not isinstance(s, bool) for s in seeds):
        raise InputError("seed", seed, f"a whole number for each of the {count} sequences")
    return [(s + 2**63) % 2**64 - 2**63 for s in seeds]


def _constraints(given: Any, count: int) -> list[Constraint | None]:
    """Return a constraint, or none, per sequence: a constraint has a state, so sequences cannot share one."""
    listed = [None] * count if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for item in listed:
        if item is not None and not isinstance(item, Constraint):
            raise InputError(
                "constraint", type(item).__name__, "objects with mask(), advance(token), rollback(count)"
            )
    different = {id(item) for item in listed if item is not None}
    if len(listed) != count or len(different) + listed.count(None) != count:
        raise InputError(
            "constraint", f"{len(listed)} given", f"{count} different ones, one per sequence (or None)"
        )
    return listed


def _refuse_others(settings: Mapping[str, Any], inherited: set[str]) -> None:
    """Refuse what would change the output and is not implemented, and names that nobody knows.

    ``inherited`` are the settings that come from the model: the caller can only override them.
    """
    refused = []
    for name, value in settings.items():
        if name in _SETTINGS or name in _OWN or name in _IGNORED or value is None:
            continue
        if name in GLOBAL_DEFAULTS and value == GLOBAL_DEFAULTS[name]:
            continue
        if name in GLOBAL_DEFAULTS or name in _REFUSED:
            # 0 is not "off" everywhere: as guidance_scale or max_time it changes the text.
            if value is not False and value != _REFUSED.get(name):
                refused.append(f"{name}={value!r}")
        else:
            raise UnknownNameError("argument", name, sorted(_SETTINGS | _OWN | set(_REFUSED)))
    if refused:
        theirs = sorted(
            f"{n}={_REFUSED.get(n)}" for n in inherited if any(r.startswith(f"{n}=") for r in refused)
        )
        raise UnsupportedError(
            "these settings cannot be honoured exactly",
            sorted(refused),
            f"They come from the model's generation_config.json: pass {', '.join(theirs)} to do without."
            if theirs
            else "Leave them out, or use transformers' generate for them.",
        )


# Settings of transformers that specc does not honour, with the value at which they do nothing.
_REFUSED: Mapping[str, Any] = {
    "num_beams": 1, "penalty_alpha": 0, "guidance_scale": 1, "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0, "watermarking_config": None,
    "forced_bos_token_id": None, "forced_decoder_ids": None, "exponential_decay_length_penalty": None,
    "remove_invalid_values": False, "renormalize_logits": False, "token_healing": False, "dola_layers": None,
    "max_time": None, "constraints": None, "force_words_ids": None, "prompt_lookup_num_tokens": None,
    "output_attentions": False, "custom_generate": None, "prefix_allowed_tokens_fn": None,
    "stopping_criteria": None, "assistant_model": None, "negative_prompt_ids": None, "past_key_values": None,
    "inputs_embeds": None, "top_h": None, "assistant_ensemble_weight": None, "speculation_type": None, "use_mtp": False,
}  # fmt: skip
_KNOWN = _SETTINGS | _OWN | _IGNORED | set(GLOBAL_DEFAULTS) | set(_REFUSED)
