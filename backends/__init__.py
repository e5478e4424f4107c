"""The ways of running a step graph, one per file, and the order in which they are tried."""

from __future__ import annotations

if __name__ != "specc.backends":  # two names for one module would be two registries
    raise ImportError(f"this package is specc.backends; it cannot be imported as {__name__}")

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from specc.backends.eager import Eager
from specc.backends.inductor import Inductor
from specc.backends.native import Native
from specc.contracts import Backend
from specc.errors import UnknownNameError, UnsupportedError

# "auto" takes the first that does not reject the device.
BACKENDS: Mapping[str, Callable[[], Backend]] = MappingProxyType(
    {"inductor": Inductor, "native": Native, "eager": Eager}
)


def choose(name: str, device: torch.device) -> tuple[Backend, str]:
    """Return a new backend and why it was chosen.

    Raises:
        UnknownNameError: there is no backend of that name.
        UnsupportedError: it cannot run on this device.
    """
    if name != "auto":
        if name not in BACKENDS:
            raise UnknownNameError("backend", name, ("auto", *BACKENDS))
        backend = BACKENDS[name]()
        reasons = backend.reject(device)
        if reasons:
            raise UnsupportedError(f"backend {name!r} cannot run on {device}", reasons)
        return backend, "asked for"
    refused: list[str] = []
    for candidate in BACKENDS.values():
        backend = candidate()
        reasons = backend.reject(device)
        if not reasons:
            return backend, "; ".join(refused) or "the first in order"
        refused.append(f"{backend.name}: {', '.join(reasons)}")
    raise UnsupportedError(f"no backend runs on {device}", refused)
