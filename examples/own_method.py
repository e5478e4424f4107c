"""A drafting method of your own, whole, in one file: guess that a token is followed by what followed it last.

Run: python examples/own_method.py [MODEL]
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import specc
from specc.contracts import Draft, DrafterInfo, MethodContext, ModelInfo, Rows, TensorSpec
from specc.ops import put

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="smollm2-135m", help="a folder, a hub id, or a built-in name")
parser.add_argument("--prompt", default="one two three four one two three four one two")
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--backend", default="auto")


@dataclass(frozen=True)
class LastFollower:
    """Per sequence, a table from each token to the one that followed it most recently."""

    name: str = "last_follower"
    default_block: int = 3
    needs_drafter: bool = False
    history: int = 0

    def reject(self, target: ModelInfo, drafter: DrafterInfo | None, block: int) -> tuple[str, ...]:
        return () if drafter is None else (f"{self.name} takes no drafter; got {drafter.name}",)

    def blocks(self, drafter: DrafterInfo | None) -> int | None:
        return None

    def taps(self, target: ModelInfo, drafter: DrafterInfo | None) -> tuple[int, ...]:
        return ()

    def state(self, target: ModelInfo, drafter: Any, slots: int, capacity: int) -> Mapping[str, TensorSpec]:
        # Follower id + 1, so that zeroed memory means "nothing seen". The last column takes what must not count.
        return {"follower": TensorSpec((slots, target.vocab + 1), torch.int64)}

    def draft(self, context: MethodContext) -> Draft:
        token, tokens = context.anchor, []
        for _ in range(context.block):
            token = context.state["follower"].gather(1, token.clamp(min=0)[:, None])[:, 0] - 1
            tokens.append(token)  # -1 = no guess; nothing behind the first -1 counts
        return Draft(torch.stack(tokens, 1))  # no distribution: the guesses are certain, point masses

    def observe(self, context: MethodContext, rows: Rows) -> None:
        # Rejected guesses and padding arrive as rows, too: their cache row is scratch, and so is their column.
        true = rows.cache_row < context.capacity
        put(
            context.state["follower"],
            rows.next_token + 1,
            rows.slot,
            torch.where(true, rows.token, context.vocab),
        )


def main() -> None:
    options = parser.parse_args()
    compiled = specc.compile(options.model, method=LastFollower(), max_length=512, backend=options.backend)
    inputs = compiled.tokenizer(options.prompt, return_tensors="pt")
    result = compiled.generate(
        inputs["input_ids"], max_new_tokens=options.tokens, return_dict_in_generate=True
    )
    print(compiled.tokenizer.decode(result.sequences[0]))
    print(f"{result.stats.mean_accepted_length:.2f} tokens per step, {result.stats.steps} steps")


if __name__ == "__main__":
    main()
