"""``logit_bias``: add to the logits of single tokens, by id. Not a transformers setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.errors import InputError
from specc.sampling.validate import bias, pad_ids, token_ids
from specc.sampling.warper import Column, SamplingContext


@dataclass(frozen=True)
class LogitBias:
    """A bias per id, the same in every row."""

    name: str = "logit_bias"
    is_sampling: bool = False
    bucket: tuple[int, ...] = (64,)

    def columns(self, bucket: tuple[int, ...]) -> Mapping[str, Column]:
        return {
            "logit_bias_ids": Column(bucket, torch.int64, -1),
            "logit_bias_values": Column(bucket, torch.float32, 0.0),
        }

    def bind(self, value: object, vocab: int, eos: tuple[int, ...]) -> Mapping[str, Tensor] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InputError(self.name, value, "a dict of token ids to biases")
        if not value:
            return None
        ids = pad_ids(token_ids(self.name, value.keys(), vocab, value), self.bucket[0])
        values = torch.zeros(ids.shape[0])
        values[: len(value)] = torch.tensor([bias(self.name, amount, value) for amount in value.values()])
        return {"logit_bias_ids": ids, "logit_bias_values": values}

    def apply(self, logits: Tensor, context: SamplingContext) -> Tensor:
        ids, values = context.settings["logit_bias_ids"], context.settings["logit_bias_values"]
        dense = logits.new_zeros(logits.shape[0], logits.shape[2])
        dense = dense.scatter_add(1, ids.clamp(min=0), torch.where(ids >= 0, values, 0.0))
        return logits + dense[:, None]
