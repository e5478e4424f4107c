"""Running what was built: state, the engine that steps it, scheduling of requests, and `Compiled`."""
