"""What specc knows about transformers models: the only package that imports transformers."""
