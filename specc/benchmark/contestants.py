"""What is compared: a compiled method, or one of transformers' own ways of generating."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from specc.models.peers import Peer
from specc.runtime.compiled import Compiled
from specc.runtime.generation import Generation


@dataclass(frozen=True)
class Run:
    """One answer to one prompt.

    ``steps`` are the target's passes that emitted tokens, ``decode_s`` the time of those after the prompt's;
    ``accepted_at[i]`` and ``drafted_at[i]`` count the steps that accepted, or had, a draft i.
    """

    tokens: tuple[int, ...]
    seconds: float
    first_token_s: float
    steps: int
    decode_s: float
    decode_steps: int
    accepted_at: tuple[int, ...] = ()
    drafted_at: tuple[int, ...] = ()


class Contestant(Protocol):
    """Something that answers a prompt and says how long it took."""

    @property
    def name(self) -> str: ...
    @property
    def block(self) -> int | None: ...

    def run(self, ids: Tensor, max_new_tokens: int) -> Run:
        """Answer ``ids``, int64 [tokens]."""


@dataclass(frozen=True)
class SpeccContestant:
    """A compiled method with the settings of its calls."""

    name: str
    compiled: Compiled
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> int | None:
        return self.compiled.block

    def run(self, ids: Tensor, max_new_tokens: int) -> Run:
        # A slot keeps its last text for prompts that begin alike. Every round asks the same prompts, and
        # reading them would cost nothing from the second round on.
        for slot in range(self.compiled.engine.slots):
            self.compiled.engine.forget(slot, 0)
        out = self.compiled.generate(
            ids[None], max_new_tokens=max_new_tokens, return_dict_in_generate=True, **self.settings
        )
        assert isinstance(out, Generation)
        stats = out.stats
        return Run(
            tuple(out.sequences[0, ids.shape[0] :].tolist()),
            stats.seconds,
            stats.first_token_s or stats.seconds,
            stats.steps,
            stats.step_seconds,
            stats.device_steps - stats.prefill_steps,
            tuple(stats.accepted_at),
            tuple(stats.drafted_at),
        )


@dataclass(frozen=True)
class PeerContestant:
    """One of transformers' ways, with the settings of its calls."""

    peer: Peer
    block: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def name(self) -> str:
        return self.peer.name

    def run(self, ids: Tensor, max_new_tokens: int) -> Run:
        with torch.random.fork_rng(devices=[]):
            if self.seed is not None:
                torch.manual_seed(self.seed)
            made = self.peer.run(ids, max_new_tokens, **self.settings)
        decode = made.seconds - made.first_token_s
        return Run(
            tuple(made.tokens.tolist()),
            made.seconds,
            made.first_token_s,
            made.passes,
            decode,
            max(made.passes - 1, 0),
        )
