"""N-gram drafts: what followed the same tokens earlier in the text. No drafter is needed.

Run: python examples/ngram.py [MODEL]
"""

import argparse

import specc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="smollm2-135m", help="a folder, a hub id, or a built-in name")
parser.add_argument(
    "--prompt",
    default="Repeat three times: red apple, green pear, yellow lemon. red apple, green pear, yellow lemon.",
)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--backend", default="auto")


def main() -> None:
    options = parser.parse_args()
    compiled = specc.compile(options.model, method="ngram", block=4, max_length=512, backend=options.backend)
    inputs = compiled.tokenizer(options.prompt, return_tensors="pt")
    result = compiled.generate(
        inputs["input_ids"], max_new_tokens=options.tokens, return_dict_in_generate=True
    )
    print(compiled.tokenizer.decode(result.sequences[0]))
    print(f"{result.stats.mean_accepted_length:.2f} tokens per step, {result.stats.steps} steps")
    print("accepted by position:", [round(share, 2) for share in result.stats.acceptance_by_position])


if __name__ == "__main__":
    main()
