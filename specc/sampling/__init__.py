"""Sampling inside the step: settings, drawing drafts, judging them.

`bind_all` turns the settings of a request into columns for one slot and the families they need;
`process` applies the families that a step was built with, in transformers' order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from specc.errors import InputError, InvariantError, UnknownNameError
from specc.sampling.bad_words_ids import BadWordsIds
from specc.sampling.begin_suppress_tokens import BeginSuppressTokens
from specc.sampling.epsilon_cutoff import EpsilonCutoff
from specc.sampling.eta_cutoff import EtaCutoff
from specc.sampling.forced_eos_token_id import ForcedEosTokenId
from specc.sampling.frequency_penalty import FrequencyPenalty
from specc.sampling.logit_bias import LogitBias
from specc.sampling.min_length import MinLength
from specc.sampling.min_new_tokens import MinNewTokens
from specc.sampling.min_p import MinP
from specc.sampling.no_repeat_ngram_size import NoRepeatNgramSize
from specc.sampling.presence_penalty import PresencePenalty
from specc.sampling.repetition_penalty import RepetitionPenalty
from specc.sampling.sequence_bias import SequenceBias
from specc.sampling.suppress_tokens import SuppressTokens
from specc.sampling.temperature import Temperature
from specc.sampling.top_k import TopK
from specc.sampling.top_p import TopP
from specc.sampling.typical_p import TypicalP
from specc.sampling.warper import Column, SamplingContext, Warper, family_bucket, family_key

__all__ = [
    "WARPERS", "Column", "SamplingContext", "Warper", "bind_all", "fit", "get", "is_sampled", "join",
    "neutral", "process", "settings_columns", "split",
]  # fmt: skip

# The order of transformers 5.24; logit_bias and the two penalties that it lacks stand by their likes.
# A user's own processors come before temperature.
WARPERS: tuple[Warper, ...] = (
    SequenceBias(), LogitBias(), RepetitionPenalty(), PresencePenalty(), FrequencyPenalty(),
    NoRepeatNgramSize(), BadWordsIds(), MinLength(), MinNewTokens(), ForcedEosTokenId(),
    SuppressTokens(), BeginSuppressTokens(),
    Temperature(), TopK(), TopP(), MinP(), TypicalP(), EpsilonCutoff(), EtaCutoff(),
)  # fmt: skip
_BY_NAME: Mapping[str, Warper] = MappingProxyType({warper.name: warper for warper in WARPERS})


def get(family: str) -> Warper:
    """Return the warper of a family's key; UnknownNameError if there is none."""
    name = family.partition(":")[0]
    if name not in _BY_NAME:
        raise UnknownNameError("sampling setting", name, _BY_NAME)
    return _BY_NAME[name]


def join(*families: Iterable[str]) -> tuple[str, ...]:
    """Return the families that cover all given ones, in order, each with the widest bucket asked for."""
    buckets: dict[str, tuple[int, ...]] = {}
    for family in (family for group in families for family in group):
        warper = get(family)
        bucket = family_bucket(warper, family)
        known = buckets.get(warper.name, bucket)
        buckets[warper.name] = tuple(map(max, known, bucket))
    return tuple(family_key(warper, buckets[warper.name]) for warper in WARPERS if warper.name in buckets)


def is_sampled(families: Iterable[str]) -> bool:
    """Return whether a step of these families samples at all; if not, it holds no softmax and no noise."""
    return any(get(family).name == "temperature" for family in families)


def split(families: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the families that come before a user's own processors, and those that come after."""
    ordered = join(families)
    before = tuple(family for family in ordered if not get(family).is_sampling)
    return before, ordered[len(before) :]


def settings_columns(families: Iterable[str]) -> dict[str, Column]:
    """Return the columns of the families by name, shapes per slot."""
    columns: dict[str, Column] = {}
    for family in join(families):
        warper = get(family)
        columns.update(warper.columns(family_bucket(warper, family)))
    return columns


def neutral(families: Iterable[str], slots: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the columns [slots, ...] with every setting off, which makes every slot greedy."""
    return {
        name: torch.full((slots, *column.shape), column.neutral, dtype=column.dtype, device=device)
        for name, column in settings_columns(families).items()
    }


def bind_all(
    settings: Mapping[str, object], *, vocab: int, eos: Sequence[int] = (), do_sample: bool = False
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Check the settings of one request.

    Greedy requests (``do_sample`` false, or a temperature of 0) have their sampling settings checked but
    not used, as in transformers.

    Args:
        settings: Values by argument name; None means not set. Defaults are the caller's business.
        vocab: Rows of the output head.
        eos: Ids that end the text.
        do_sample: Whether the request samples.

    Returns:
        The columns of one slot that are not neutral, and the families that they need.
    """
    for name in settings:
        get(name)
    bound = {warper: warper.bind(settings.get(warper.name), vocab, tuple(eos)) for warper in WARPERS}
    _check_forced(settings, bound)
    hot = do_sample and bound[_BY_NAME["temperature"]] is not None
    values: dict[str, Tensor] = {}
    families: list[str] = []
    for warper, columns in bound.items():
        if columns is None or (warper.is_sampling and not hot):
            continue
        families.append(family_key(warper, tuple(next(iter(columns.values())).shape)))
        values.update(columns)
    return values, tuple(families)


def _check_forced(
    settings: Mapping[str, object], bound: Mapping[Warper, Mapping[str, Tensor] | None]
) -> None:
    """Refuse to force only ids that are suppressed, as transformers does: nothing would be left to emit."""
    name = "forced_eos_token_id"
    listed = {warper.name: set(columns[warper.name].tolist()) - {-1} for warper, columns in bound.items()
              if columns is not None and warper.name in (name, "suppress_tokens")}  # fmt: skip
    if name in listed and listed[name] <= listed.get("suppress_tokens", set()):
        raise InputError(name, settings[name], "at least one id that suppress_tokens leaves")


def fit(values: Mapping[str, Tensor], families: Iterable[str]) -> dict[str, Tensor]:
    """Return one slot's value for every column of the families: padded to its bucket, or neutral."""
    columns = settings_columns(families)
    for name in values:
        if name not in columns:
            raise InvariantError(f"the step was built without the column {name!r}")
    out = {name: value[0] for name, value in neutral(families, 1).items()}
    for name, value in values.items():
        target = out[name]
        if target.dim() == 2:  # sequences are aligned to the right
            target[: value.shape[0], target.shape[1] - value.shape[1] :] = value
        elif target.dim() == 1:
            target[: value.shape[0]] = value
        else:
            target.copy_(value)
    return out


def process(logits: Tensor, context: SamplingContext, families: Iterable[str]) -> Tensor:
    """Apply the named families to logits [slots, rows, vocab] in order, in float32."""
    scores = logits.float()
    for family in join(families):
        scores = get(family).apply(scores, context)
    return scores
