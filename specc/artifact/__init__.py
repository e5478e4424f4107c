"""The compiled package: one file with a compiled step, its weights and its tokenizer."""
