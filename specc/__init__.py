"""A compiler for speculative decoding: the draft, verify, accept and commit of a step as one graph."""
