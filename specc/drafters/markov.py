"""DSpark's heads: a bias that depends on the tokens drafted so far, and a guess whether a draft is accepted.

Source: methods.md 5.3 and 5.5. ``w1`` is indexed by target ids, ``w2`` gives logits over the draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

MarkovType = Literal["vanilla", "gated", "rnn"]
MARKOV_TYPES: tuple[MarkovType, ...] = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class MarkovConfig:
    """The kind of sequential head and the rank of its tables."""

    type: MarkovType
    rank: int


@dataclass(frozen=True)
class ConfidenceConfig:
    """What the confidence head reads beside the row's output after the final norm.

    ``temperatures`` divide its logits, one per draft position, so that their survival is calibrated (methods.md
    5.5); None = they are taken as they are.
    """

    with_markov: bool
    bias: bool = True
    temperatures: tuple[float, ...] | None = None


class MarkovHead(nn.Module):
    """The vanilla head: bias = w2 @ w1[previous token]."""

    def __init__(self, config: MarkovConfig, vocab: int, draft_vocab: int) -> None:
        super().__init__()
        self.rank = config.rank
        self.markov_w1 = nn.Embedding(vocab, config.rank)
        self.markov_w2 = nn.Linear(config.rank, draft_vocab, bias=False)

    def start(self, embedded: Tensor) -> Tensor:
        """Return the state before the first draft."""
        return torch.zeros_like(embedded)

    def look_up(self, previous: Tensor) -> Tensor:
        """Return the row of w1 of each previous token: [..] -> [.., rank]; -1 and the like are clamped."""
        found: Tensor = self.markov_w1(previous.clamp(0, self.markov_w1.num_embeddings - 1))
        return found

    def latent(self, hidden: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what w2 multiplies [.., rank], and the next state.

        Args:
            hidden: [.., hidden], the row's output after the final norm.
            embedded: [.., rank], `look_up` of the token before the one to draft.
            state: [.., rank], from `start` or the last call.
        """
        return embedded, state

    def bias(self, latent: Tensor, candidates: Tensor | None = None) -> Tensor:
        """Return the bias on the logits: [.., draft_vocab], or [.., count] of ``candidates``, draft ids."""
        if candidates is None:
            whole: Tensor = self.markov_w2(latent)
            return whole
        rows = nn.functional.embedding(candidates, self.markov_w2.weight)  # [.., count, rank]
        return (rows @ latent[..., None])[..., 0]


class GatedMarkovHead(MarkovHead):
    """The latent is w1[previous], gated by sigmoid(gate_proj([hidden; w1[previous]]))."""

    def __init__(self, config: MarkovConfig, vocab: int, draft_vocab: int, hidden: int) -> None:
        super().__init__(config, vocab, draft_vocab)
        self.gate_proj = nn.Linear(hidden + config.rank, config.rank)

    def latent(self, hidden: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, state


class RecurrentMarkovHead(MarkovHead):
    """A gated recurrence: joint_proj([state; w1[previous]; hidden]) gives gate, content and output."""

    def __init__(self, config: MarkovConfig, vocab: int, draft_vocab: int, hidden: int) -> None:
        super().__init__(config, vocab, draft_vocab)
        self.joint_proj = nn.Linear(2 * config.rank + hidden, 3 * config.rank)

    def latent(self, hidden: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joint = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1))
        gate, content, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(content)


def make_markov(config: MarkovConfig, vocab: int, draft_vocab: int, hidden: int) -> MarkovHead:
    """Return the head of the configured type."""
    if config.type == "vanilla":
        return MarkovHead(config, vocab, draft_vocab)
    kind = GatedMarkovHead if config.type == "gated" else RecurrentMarkovHead
    return kind(config, vocab, draft_vocab, hidden)


class ConfidenceHead(nn.Module):
    """The logit that a draft is accepted if all before it are; it never sees the draft itself."""

    def __init__(self, config: ConfidenceConfig, hidden: int, rank: int) -> None:
        super().__init__()
        self.with_markov = config.with_markov
        self.proj = nn.Linear(hidden + rank if config.with_markov else hidden, 1, bias=config.bias)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Return logits [..]; ``embedded`` is `MarkovHead.look_up` [.., rank] of the previous token."""
        if self.with_markov:
            assert embedded is not None, "this confidence head reads the Markov table"
            hidden = torch.cat([hidden, embedded], dim=-1)
        logits: Tensor = self.proj(hidden)[..., 0]
        return logits
