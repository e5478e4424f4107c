"""What the parts of specc promise each other: passes, methods, backends, drafts, rows.

Read this file first. Tensor shapes are in words; ``rows`` is any flat list of (token, slot, position).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from specc.graph import StepGraph
    from specc.tree import Tree

Stage = Literal["draft", "verify", "accept", "commit"]
STAGES: tuple[Stage, ...] = ("draft", "verify", "accept", "commit")
AcceptRule = Literal["ratio", "coupled"]
ACCEPT_RULES: tuple[AcceptRule, ...] = ("ratio", "coupled")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def size_bytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class ModelInfo:
    """The facts about a causal LM that methods and checks need. Layers count from 0; taps are "after j layers"."""

    name: str
    model_type: str
    layers: int
    hidden: int
    vocab: int  # rows of the output head, padding included
    tokenizer_vocab: int | None  # ids the tokenizer can produce, when a tokenizer is known
    max_position: int
    heads: int
    kv_heads: int
    head_dim: int
    tied_head: bool
    dtype: torch.dtype
    config: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True)
class DrafterInfo:
    """The facts about a drafter that `Method.reject` compares with the target's.

    ``vocab`` is the width of its logits, ``target_vocab`` the number of target ids it can embed or name;
    ``taps`` are the target states it reads, each "after j layers", in the order they are concatenated.
    """

    name: str
    method: str
    layout: str  # which checkpoint layout it was read from
    hidden: int
    target_hidden: int | None
    vocab: int
    target_vocab: int | None
    taps: tuple[int, ...]
    max_position: int | None  # rope tables that end: drafting stops there; None = no end
    block: int | None  # the block it was trained for, in draft tokens
    mask_token: int | None = None
    config: object = None
    proposed: int | None = None  # draft tokens a step that its makers propose; None = the whole block


@dataclass(frozen=True)
class Rows:
    """A flat list of N rows handed to a method whose context they extend.

    A garbage row (padding, rejected, past the end) has ``cache_row`` in the scratch rows; everything else
    in it may hold anything, and nothing computed from it may be read.
    """

    token: Tensor  # int64 [rows]  token at the row's position
    next_token: Tensor  # int64 [rows]  committed token at position + 1
    slot: Tensor  # int64 [rows]
    position: Tensor  # int64 [rows]  for rope and position tables, clamped to the model's range
    cache_row: Tensor  # int64 [rows]  where K/V go
    features: Tensor | None  # [rows, taps * hidden], the taps concatenated in the method's order
    newest: Tensor  # int64 [slots]  index among the rows of each slot's newest true row (garbage if none)
    has_newest: Tensor  # bool [slots]  whether the slot has a true row here at all
    reach: Tensor | None = None  # int64 [rows]  sequence length that chooses rotary frequencies (longrope)


@dataclass(frozen=True)
class Proposal:
    """The distributions the draft tokens were drawn from; ``None`` in a Draft means point masses.

    ``probs`` is [slots, block, candidates]; ``ids`` names the candidates as target ids, int64 [candidates] or
    [slots, block, candidates], or is None when candidate c is target id c.
    """

    probs: Tensor
    ids: Tensor | None = None


@dataclass(frozen=True)
class Draft:
    """What the draft stage hands to verify and accept."""

    tokens: Tensor  # int64 [slots, block], target ids; -1 = no draft here: rejected, not counted
    proposal: Proposal | None = None
    drawn: Tensor | None = None  # float32 [slots, block], q of each drawn token; None with point masses
    confidence: Tensor | None = (
        None  # float32 [slots, block], logit that draft i is accepted if all before are
    )


class Draw(Protocol):
    """How a method turns logits into draft tokens: it knows each slot's temperature, seed and accept rule."""

    def __call__(self, logits: Tensor, index: int, ids: Tensor | None = None) -> Tensor:
        """Draw draft token ``index`` (0-based) of every slot and remember its distribution.

        Args:
            logits: [slots, candidates], any float dtype; -inf where a candidate must not be drawn.
            index: which draft token of the block this is.
            ids: target ids of the candidates, int64 [candidates] or [slots, candidates]; None = identity.

        Returns:
            int64 [slots]: the drawn tokens as target ids.
        """

    def draft(self, confidence: Tensor | None = None, valid: Tensor | None = None) -> Draft:
        """Return the draft of all tokens drawn so far; ``valid`` bool [slots, block] turns others into -1."""


@dataclass(frozen=True)
class MethodContext:
    """What a method sees while its draft or commit stage is traced: plain tensors and callables."""

    slots: int
    block: int
    capacity: int  # tokens a slot can hold; cache rows capacity.. are scratch
    tokens: Tensor  # int64 [slots, capacity + 1] committed tokens
    length: Tensor  # int64 [slots] n, the number of committed tokens
    running: Tensor  # bool [slots] the slot takes part in this step
    state: Mapping[str, Tensor]  # the method's own state, by the names it declared
    drafter: Any  # the drafter module with its weights bound, or a RowsModel for draft_model
    embed: Callable[[Tensor], Tensor]  # the target's token embedding (scale included): ids -> [.., hidden]
    head: Callable[
        [Tensor], Tensor
    ]  # the target's output head (softcap included): [.., hidden] -> [.., vocab]
    draw: Draw
    vocab: int = 0  # width of the target's logits
    drafter_limit: int | None = None  # positions the drafter's tables cover; None = no end
    tree: Tree | None = None  # `draft` only: the shape of a draft that is a tree; draft i is node i + 1

    @property
    def anchor(self) -> Tensor:
        """Return the newest committed token of each slot, int64 [slots]."""
        return self.tokens.gather(1, (self.length - 1).clamp(min=0)[:, None])[:, 0]

    def cache_rows(self, position: Tensor, live: Tensor | bool = True) -> Tensor:
        """Return where K/V of ``position`` go: itself, or the scratch row when past the end or not live."""
        scratch = torch.full_like(position, self.capacity)
        inside = (position >= 0) & (position < self.capacity) & live
        return torch.where(inside, position, scratch)


@runtime_checkable
class Method(Protocol):
    """A drafting method: stateless, and it answers before it acts."""

    @property
    def name(self) -> str: ...

    @property
    def default_block(self) -> int:
        """Draft tokens per step when nothing else says; cite where the number comes from."""

    @property
    def needs_drafter(self) -> bool: ...

    @property
    def history(self) -> int:
        """Rows older than this step's that the context must see again (methods.md 3.3 b); 0 for most."""

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        """Return every reason why this pair cannot run; empty when it can."""

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        """Return the block the drafter was made for, or None when any block does."""

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        """Return the target states read, each "after j layers", in concatenation order."""

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        """Declare the method's state tensors. K/V are [slots, heads, capacity + 1, size]: the last row is scratch."""

    def draft(self, context: MethodContext) -> Draft:
        """Draft ``block`` tokens per slot; traced, so no value may reach Python."""

    def observe(self, context: MethodContext, rows: Rows) -> None:
        """Extend the method's context by rows whose tokens are committed; traced, writes only its own state."""


def drafts_with(method: Method) -> str:
    """Return the method whose drafters ``method`` takes: its own, unless its ``drafts_with`` names another."""
    name: str = getattr(method, "drafts_with", method.name)
    return name


@runtime_checkable
class DraftsTree(Protocol):
    """A method whose drafts are a tree rather than a chain; all of them are point masses."""

    def tree(self, block: int) -> Tree:
        """Return the shape of a draft of ``block`` tokens, 1 or more: always the same for the same block."""


@runtime_checkable
class Backend(Protocol):
    """One way of running a step graph."""

    @property
    def name(self) -> str: ...

    def reject(self, device: torch.device) -> tuple[str, ...]:
        """Return every reason why this backend cannot run here; empty when it can."""

    def build(self, graph: StepGraph) -> Callable[..., tuple[Tensor, ...]]:
        """Return a callable that takes the graph's inputs in order and returns its outputs."""


@dataclass(frozen=True)
class Pass:
    """One rewrite of a graph.

    Attributes:
        name: The verb phrase that is also the file's and the object's name.
        run: Takes a graph and returns it, rewritten or not.
        needs: Facts that must hold before; an earlier pass gives them.
        gives: Facts that hold afterwards, each with a check in `pipeline.FACTS`.
        expects_match: Whether finding nothing to rewrite is a fault.
    """

    name: str
    run: Callable[[StepGraph], StepGraph]
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()
    expects_match: bool = False


@dataclass(frozen=True)
class DrafterBundle:
    """A drafter ready for a method: its facts, its module (weights loaded, eval mode) and what was left over."""

    info: DrafterInfo
    module: nn.Module
    unused: tuple[str, ...] = ()  # tensors in the files that nothing reads, named
    notes: tuple[str, ...] = ()  # decisions taken while reading, for `specc inspect` and `specc check`


@runtime_checkable
class ReadsFinalNorm(Protocol):
    """A drafter that reads the target's last hidden state after the final norm, and applies that norm itself."""

    def attach(self, norm: nn.Module) -> None:
        """Take the target's own final norm; its weight is shared, not copied."""
