"""A smaller model of the same tokenizer drafts; with a seed the sampled text is that of plain decoding.

Run: python examples/draft_model.py MODEL DRAFTER
"""

import argparse

import specc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="smollm2-135m", help="a folder, a hub id, or a built-in name")
parser.add_argument("drafter", help="a smaller causal LM with the same tokenizer")
parser.add_argument("--prompt", default="Once upon a time there was a")
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--backend", default="auto")


def main() -> None:
    options = parser.parse_args()
    compiled = specc.compile(
        options.model,
        options.drafter,
        method="draft_model",
        block=4,
        accept="coupled",
        max_length=512,
        backend=options.backend,
    )
    inputs = compiled.tokenizer(options.prompt, return_tensors="pt")
    result = compiled.generate(
        inputs["input_ids"],
        max_new_tokens=options.tokens,
        do_sample=True,
        temperature=0.8,
        seed=7,
        return_dict_in_generate=True,
    )
    print(compiled.tokenizer.decode(result.sequences[0]))
    print(f"{result.stats.mean_accepted_length:.2f} tokens per step, {result.stats.steps} steps")
    print("accepted by position:", [round(share, 2) for share in result.stats.acceptance_by_position])


if __name__ == "__main__":
    main()
