"""The ways of running a step graph, one per file, and the order in which they are tried."""

if __name__ != "specc.backends":  # two names for one module would be two registries
    raise ImportError(f"this package is specc.backends; it cannot be imported as {__name__}")
