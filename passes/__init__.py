"""The rewrites of a step graph, one per file, and the order in which they run."""

if __name__ != "specc.passes":  # two names for one module would be two registries
    raise ImportError(f"this package is specc.passes; it cannot be imported as {__name__}")
