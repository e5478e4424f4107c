"""EAGLE-3 with a tree of drafts: several guesses for each position, verified in one pass, for few sequences at a time.

Run: python examples/eagle3_tree.py MODEL DRAFTER
"""

import argparse

import specc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="smollm2-135m", help="a folder, a hub id, or a built-in name")
parser.add_argument("drafter", nargs="?", help="a checkpoint folder; default: the one that comes with specc")
parser.add_argument("--prompt", default="Once upon a time there was a")
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--backend", default="auto")


def main() -> None:
    options = parser.parse_args()
    compiled = specc.compile(
        options.model,
        options.drafter,
        method="eagle3_tree",
        block=15,
        max_length=512,
        backend=options.backend,
    )
    tree = compiled.method.tree(compiled.block)
    print(f"{compiled.block} drafts, down to {tree.height} in a row; children of each node: {tree.children}")
    inputs = compiled.tokenizer(options.prompt, return_tensors="pt")
    result = compiled.generate(
        inputs["input_ids"], max_new_tokens=options.tokens, return_dict_in_generate=True
    )
    print(compiled.tokenizer.decode(result.sequences[0]))
    print(f"{result.stats.mean_accepted_length:.2f} tokens per step, {result.stats.steps} steps")
    print("accepted by depth:", [round(share, 2) for share in result.stats.acceptance_by_position])


if __name__ == "__main__":
    main()
