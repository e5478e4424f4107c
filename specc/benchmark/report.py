"""What a benchmark says, and how it is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class BenchReport:
    """Contestants side by side: medians over interleaved rounds, with their spread.

    Attributes:
        model, dtype, device, versions, command: what was measured, where, and how to measure it again.
        bandwidth_gb_per_s: measured read bandwidth of the device, from which the floors are made.
        settings: repeats, prompts, tokens and sampling.
        rows: a record per contestant: rates, ratios, times, accepted length, floor.
        by_category: the same ratios per kind of prompt, where prompts have kinds.
        by_position: acceptance per draft position.
        memory: bytes by part, per compiled method.
        notes: what could not be measured, and what disturbs.
    """

    model: str
    dtype: str
    device: str
    versions: str
    command: str
    bandwidth_gb_per_s: float
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    by_category: tuple[Row, ...] = ()
    by_position: tuple[Row, ...] = ()
    memory: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)

    def render(self) -> str:
        """Return the report as text with tables in Markdown."""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        lines = [
            f"`{self.command}`",
            "",
            f"{self.model} in {self.dtype} on {self.device}; {self.versions}; read bandwidth "
            f"{self.bandwidth_gb_per_s:.1f} GB/s; {settings}. Medians over rounds, in brackets extremes.",
            "",
        ]
        tables = (
            (self.rows, ""),
            (self.by_category, "By kind of prompt"),
            (self.by_position, "Acceptance by position"),
        )
        for rows, title in tables:
            if rows:
                lines += ([f"{title}:", ""] if title else []) + [*_table(rows), ""]
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    columns = [
        c for c in dict.fromkeys(key for row in rows for key in row) if not c.endswith(("_least", "_most"))
    ]
    lines = [
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|" + "|".join("---" if column in ("method", "category") else "--:" for column in columns) + "|",
    ]
    return lines + ["| " + " | ".join(_cell(row, column) for column in columns) + " |" for row in rows]


def _cell(row: Row, column: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    text = _number(value)
    least, most = row.get(f"{column}_least"), row.get(f"{column}_most")
    return text if least is None or most is None else f"{text} ({_number(least)} to {_number(most)})"


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
