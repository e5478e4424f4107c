"""Drive a drafting method eagerly, without the compiler: slots, committed tokens, observe and draft.

The text of each slot is known in advance (a target's greedy continuation), so a step accepts the drafts that
agree with it. Everything a method must not read is poisoned: fresh state and the features of garbage rows are
NaN, their tokens are no ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specc.contracts import Draft, Method, MethodContext, ModelInfo, Rows

NO_TOKEN = -(10**6)


class GreedyDraw:
    """A Draw that takes the likeliest candidate and keeps the logits it saw."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.tokens: list[Tensor] = []

    def __call__(self, logits: Tensor, index: int, ids: Tensor | None = None) -> Tensor:
        assert index == len(self.tokens), "draft tokens are drawn in order"
        best = logits.argmax(-1)
        if ids is not None:
            best = ids[best] if ids.dim() == 1 else ids.gather(1, best[:, None])[:, 0]
        self.logits.append(logits)
        self.tokens.append(best)
        return best

    def draft(self, confidence: Tensor | None = None, valid: Tensor | None = None) -> Draft:
        tokens = torch.stack(self.tokens, dim=1)
        return Draft(tokens if valid is None else torch.where(valid, tokens, -1), confidence=confidence)


def model_info(model: Any, name: str = "target") -> ModelInfo:
    """Return the facts of a transformers Llama-like model."""
    config = model.config
    return ModelInfo(
        name=name,
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        tokenizer_vocab=None,
        max_position=config.max_position_embeddings,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        tied_head=config.tie_word_embeddings,
        dtype=model.dtype,
        config=config.to_dict(),
    )


def record(model: Any, ids: Tensor, taps: Sequence[int]) -> Tensor:
    """Return the residual stream after each of ``taps`` layers, [length, taps * hidden], not normed."""
    states: dict[int, Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: object, output: Any) -> None:
            states[index] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    inner = model.model
    hooks = [inner.embed_tokens.register_forward_hook(keep(0))]
    hooks += [layer.register_forward_hook(keep(index + 1)) for index, layer in enumerate(inner.layers)]
    with torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([states[tap] for tap in taps], dim=-1)


@dataclass
class Text:
    """What a slot holds: the whole text, how much of it is the prompt, and the features of its positions."""

    ids: Tensor
    prompt: int
    features: Tensor
    steps: list[int] = field(default_factory=list)  # accepted drafts per step
    anchors: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)


class Driver:
    """Slots that run one method, each over a known text."""

    def __init__(
        self,
        method: Method,
        drafter: Any,
        model: Any,
        *,
        slots: int,
        capacity: int,
        block: int,
        info: ModelInfo | None = None,
    ) -> None:
        self.method, self.drafter, self.model, self.block = method, drafter, model, block
        self.slots, self.capacity = slots, capacity
        self.tokens = torch.full((slots, capacity + 1), NO_TOKEN)
        self.length = torch.zeros(slots, dtype=torch.int64)
        self.running = torch.zeros(slots, dtype=torch.bool)
        specs = method.state(info or model_info(model), drafter, slots, capacity)
        self.state = {
            name: torch.full(
                spec.shape, float("nan") if spec.dtype.is_floating_point else 0, dtype=spec.dtype
            )
            for name, spec in specs.items()
        }
        self.draw = GreedyDraw()

    def context(self) -> MethodContext:
        self.draw = GreedyDraw()
        return MethodContext(
            slots=self.slots,
            block=self.block,
            capacity=self.capacity,
            tokens=self.tokens,
            length=self.length,
            running=self.running,
            state=self.state,
            drafter=self.drafter,
            embed=self.model.get_input_embeddings(),
            head=self.model.get_output_embeddings(),
            draw=self.draw,
            vocab=self.model.config.vocab_size,
        )

    def commit(self, slot: int, tokens: Tensor) -> None:
        """Append committed tokens to a slot."""
        begin = int(self.length[slot])
        self.tokens[slot, begin : begin + len(tokens)] = tokens
        self.length[slot] = begin + len(tokens)
        self.running[slot] = True

    def clear(self, slot: int) -> None:
        """Hand a slot to another request; the method's state stays as it is."""
        self.tokens[slot] = NO_TOKEN
        self.length[slot] = 0
        self.running[slot] = False

    def observe(self, rows: Sequence[tuple[int, int, bool]], features: Sequence[Tensor]) -> None:
        """Hand rows (slot, position, is live) to the method, with the features of each slot's text."""
        width = max(table.shape[1] for table in features)  # slots without a text have an empty table
        newest, has_newest = torch.full((self.slots,), 10**6), torch.zeros(self.slots, dtype=torch.bool)
        token, following, fed = [], [], []
        for index, (slot, position, live) in enumerate(rows):
            token.append(int(self.tokens[slot, position]) if live else NO_TOKEN)
            following.append(int(self.tokens[slot, position + 1]) if live else NO_TOKEN)
            fed.append(features[slot][position] if live else torch.full((width,), float("nan")))
            if live:
                newest[slot], has_newest[slot] = index, True
        live_rows = torch.tensor([live for _, _, live in rows])
        position_rows = torch.tensor([position for _, position, _ in rows])
        drawn = self.draw
        with torch.no_grad():
            self.method.observe(
                self.context(),
                Rows(
                    token=torch.tensor(token),
                    next_token=torch.tensor(following),
                    slot=torch.tensor([slot for slot, _, _ in rows]),
                    position=position_rows,
                    cache_row=torch.where(live_rows, position_rows, self.capacity),
                    features=torch.stack(fed),
                    newest=newest,
                    has_newest=has_newest,
                ),
            )
        self.draw = drawn  # what the last draft drew, for tests to look at

    def draft(self) -> Draft:
        with torch.no_grad():
            return self.method.draft(self.context())

    def prefill(self, slot: int, text: Text, chunk: int = 7, spare: int = 2) -> None:
        """Commit a prompt and its first new token, and observe the prompt in chunks with garbage rows."""
        self.clear(slot)
        self.commit(slot, text.ids[: text.prompt + 1])
        features = [text.features] * self.slots
        for begin in range(0, text.prompt, chunk):
            rows = [(slot, at, True) for at in range(begin, min(begin + chunk, text.prompt))]
            self.observe(rows + [(slot, 0, False)] * spare, features)

    def step(self, texts: Sequence[Text | None], allowed: Callable[[int, int], int] | None = None) -> Draft:
        """Run one step of every slot that has a text; ``allowed`` may cut a slot's accepted count."""
        draft = self.draft()
        rows: list[tuple[int, int, bool]] = []
        for slot, text in enumerate(texts):
            if text is None:
                continue
            anchor = int(self.length[slot]) - 1
            proposed = draft.tokens[slot].tolist()
            true = text.ids[anchor + 1 : anchor + 1 + self.block].tolist()
            count = 0
            while count < min(self.block, len(true)) and proposed[count] == true[count]:
                count += 1
            if allowed is not None:
                count = min(count, allowed(slot, len(text.steps)))
            text.steps.append(count)
            text.anchors.append(anchor)
            text.drafts.append(proposed)
            self.commit(slot, text.ids[anchor + 1 : anchor + 2 + count])
            rows += [(slot, anchor + row, row <= count) for row in range(self.block + 1)]
        self.observe(rows, [text.features if text is not None else torch.empty(0, 0) for text in texts])
        return draft

    def walk(self, texts: Sequence[Text], count: int) -> None:
        """Prefill every slot and step each until ``count`` new tokens exist."""
        for slot, text in enumerate(texts):
            self.prefill(slot, text)
        while True:
            active = [
                text if int(self.length[slot]) < text.prompt + count else None
                for slot, text in enumerate(texts)
            ]
            if not any(text is not None for text in active):
                return
            self.running = torch.tensor([text is not None for text in active])
            self.step(active)
