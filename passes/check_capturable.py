"""Refuse a step that could not be captured: a host wait, or a shape that depends on data.

Before, After: the same graph. The check itself is the fact `capturable` in `specc.pipeline`, and it is
checked again after every later pass.
"""

from __future__ import annotations

from specc.contracts import Pass

check_capturable = Pass(
    "check_capturable", lambda graph: graph, needs=frozenset({"one-graph"}), gives=frozenset({"capturable"})
)
