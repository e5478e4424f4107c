"""``sequence_bias``: add to the logit of the token that would complete a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.errors import InputError
from specc.sampling.history import completes
from specc.sampling.validate import bias, pad_sequences, token_ids
from specc.sampling.warper import Column, SamplingContext

_ALLOWED = "a non-empty dict of token id tuples to floats, or a list of [token ids, float]"


@dataclass(frozen=True)
class SequenceBias:
    """Biases of all sequences that end in one id add up, as in transformers' SequenceBiasLogitsProcessor."""

    name: str = "sequence_bias"
    is_sampling: bool = False
    bucket: tuple[int, ...] = (64, 8)

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {
            "sequence_bias_ids": Column(bucket, torch.int64, -1),
            "sequence_bias_values": Column(bucket[:1], torch.float32, 0.0),
        }

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        if not isinstance(value, (Mapping, list)) or not value:
            raise InputError(self.name, value, _ALLOWED)
        if not isinstance(value, Mapping):
            if any(not isinstance(item, (list, tuple)) or len(item) != 2 for item in value):
                raise InputError(self.name, value, _ALLOWED)
            pairs = [(item[0], item[1]) for item in value]
        else:
            pairs = list(value.items())
        biases = {
            token_ids(self.name, ids, vocab, value): bias(self.name, amount, value) for ids, amount in pairs
        }
        if () in biases:
            raise InputError(self.name, value, _ALLOWED)
        ids = pad_sequences(list(biases), self.bucket)
        values = torch.zeros(ids.shape[0])
        values[: len(biases)] = torch.tensor(list(biases.values()))
        return {"sequence_bias_ids": ids, "sequence_bias_values": values}

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        ids = context.settings["sequence_bias_ids"]
        values = context.settings["sequence_bias_values"]
        last = ids[..., -1]
        amount = torch.where(completes(ids, context), values[:, None], 0.0)  # [slots, rows, count]
        same = (last[:, :, None] == last[:, None, :]) & (last >= 0)[:, :, None]
        total = torch.where(same[:, None], amount[:, :, None], 0.0).sum(-1)
        # Only the first sequence of each last id carries the sum: the additions below never meet on one
        # id, so their order, which a GPU does not fix, cannot matter.
        earlier = torch.ones_like(same[0]).tril(-1)
        leads = (last >= 0) & ~(same & earlier).any(-1)
        total = torch.where(leads[:, None], total, 0.0)
        where = last.clamp(min=0)[:, None].expand(-1, context.rows, -1)
        return logits.scatter_add(2, where, total)
