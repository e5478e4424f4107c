"""DFlash 2's candidate selector: score a row's likeliest tokens by the token before (methods.md 6.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SelectorConfig:
    """Sizes of the selector, and what the family does to logits before they are scored.

    ``multiplier`` and ``softcap`` are 1 and None where the head in use has applied them already.
    """

    rank: int
    top_k: int
    multiplier: float = 1.0
    softcap: float | None = None


class CandidateSelector(nn.Module):
    """score(a, b) = capped logit of b + sum of predecessor[a] * projected hidden * successor[b]."""

    def __init__(self, config: SelectorConfig, vocab: int, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.hidden_projection = nn.Linear(hidden, config.rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, config.rank))

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids int64 [.., top_k] and capped logits float32 [.., top_k] of the likeliest tokens."""
        raw, ids = logits.topk(self.config.top_k, dim=-1)
        unary = raw.float() * self.config.multiplier
        if self.config.softcap is not None:
            unary = self.config.softcap * torch.tanh(unary / self.config.softcap)
        return ids, unary

    def score(self, hidden: Tensor, ids: Tensor, unary: Tensor, previous: Tensor) -> Tensor:
        """Return the candidates' scores, float32 [.., top_k].

        Args:
            hidden: [.., hidden], the row's output after the final norm.
            ids: int64 [.., top_k].
            unary: float32 [.., top_k].
            previous: int64 [..], the token drafted before; -1 and the like are clamped.
        """
        previous = previous.clamp(0, self.predecessor_codebook.shape[0] - 1)
        before = nn.functional.embedding(previous, self.predecessor_codebook)
        after = nn.functional.embedding(ids, self.successor_codebook)  # [.., top_k, rank]
        edge = (before * self.hidden_projection(hidden))[..., None]
        scores: Tensor = unary + (after @ edge)[..., 0].float()
        return scores
