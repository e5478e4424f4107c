"""Measure a drafter: accepted length and acceptance per draft position, by category of prompt, greedy.

    python examples/drafters/measure_acceptance.py smollm2-135m shared/prompts --method dspark --each 4

PROMPTS is a folder of JSONL files, one category each, with ``messages`` in every line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import specc
from specc.models.load import load_target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--drafter")
    parser.add_argument("--method", default="dspark")
    parser.add_argument("--block", type=int)
    parser.add_argument("--each", type=int, default=4, help="Prompts of each category.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--backend", default="auto")
    chosen = parser.parse_args()
    target = load_target(chosen.model)
    compiled = specc.compile(
        target, chosen.drafter, method=chosen.method, block=chosen.block, batch=chosen.each, max_length=768,
        backend=chosen.backend,
    )  # fmt: skip
    print(
        f"| category | tokens | accepted length | {' | '.join(str(i + 1) for i in range(compiled.block))} |"
    )
    print("|---|---|---|" + "---|" * compiled.block)
    for file in sorted(chosen.prompts.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[: chosen.each]]
        rows = [
            target.tokenizer.encode(
                target.tokenizer.apply_chat_template(
                    line["messages"], tokenize=False, add_generation_prompt=True
                ),
                add_special_tokens=False,
            )
            for line in lines
        ]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        made = compiled.generate(
            ids, attention_mask=mask, max_new_tokens=chosen.max_new_tokens, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert isinstance(made, specc.Generation)
        stats = made.stats
        steps = max(stats.drafted_at[0] if stats.drafted_at else 0, 1)
        shares = [a / steps for a in [*stats.accepted_at, *[0] * compiled.block][: compiled.block]]
        cells = " | ".join(f"{share:.2f}" for share in shares)
        print(f"| {file.stem} | {stats.tokens} | {stats.mean_accepted_length:.2f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
