"""The compiled package: one file that holds a compiled step, its weights and its tokenizer, and loads anywhere."""
