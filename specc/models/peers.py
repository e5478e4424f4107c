"""Transformers' own ways of generating, timed: what specc is measured against."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from specc.errors import UnknownNameError
from specc.models.reading import quiet

LOOKUP_TOKENS = 10  # the number transformers' documentation uses for prompt lookup
# What each peer adds to a plain call of generate.
_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "transformers": {},
    "transformers-static": {"cache_implementation": "static", "disable_compile": True},
    "transformers-compiled": {"cache_implementation": "static"},
    "assisted": {},
    "prompt_lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
})  # fmt: skip
PEERS: tuple[str, ...] = tuple(_OPTIONS)


@dataclass(frozen=True)
class PeerRun:
    """One answer: its new tokens int64 [tokens], how long it took, and the target's forward passes."""

    tokens: Tensor
    seconds: float
    first_token_s: float
    passes: int


@dataclass
class _Watch:
    """A streamer that notes when the first token came."""

    begin: float
    puts: int = 0
    first: float | None = None

    def put(self, _: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:  # the first call brings the prompt
            self.first = time.perf_counter() - self.begin

    def end(self) -> None:
        return


@dataclass
class Peer:
    """One of transformers' ways of generating with a model.

    Attributes:
        name: One of `PEERS`.
        module: The model, used as it is.
        assistant: The draft model of "assisted".
    """

    name: str
    module: nn.Module
    assistant: nn.Module | None = None
    _passes: list[int] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.name not in _OPTIONS:
            raise UnknownNameError("peer", self.name, PEERS)

    @torch.no_grad()
    def run(self, ids: Tensor, max_new_tokens: int, **settings: Any) -> PeerRun:
        """Generate from ``ids`` int64 [tokens]; ``settings`` as transformers' generate takes them."""
        options = dict(_OPTIONS[self.name]) | (
            {"assistant_model": self.assistant} if self.assistant is not None else {}
        )
        passes = 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        model: Any = self.module
        hook = model.register_forward_pre_hook(count)
        place = next(model.parameters()).device
        given = ids[None].to(place)
        watch = _Watch(time.perf_counter())
        try:
            with quiet():
                out: Tensor = model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    max_new_tokens=max_new_tokens,
                    streamer=watch,
                    **options,
                    **settings,
                )
            seconds = time.perf_counter() - watch.begin
        finally:
            hook.remove()
        new = out[0, ids.shape[0] :].cpu()
        return PeerRun(new, seconds, watch.first if watch.first is not None else seconds, passes)
