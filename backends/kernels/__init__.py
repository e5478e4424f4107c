"""Hand-written kernels behind specc's operators; a backend substitutes them in the graphs it lowers."""
