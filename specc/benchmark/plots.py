"""Charts of a benchmark; needs matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from typing import Any

from specc.benchmark.report import BenchReport
from specc.errors import UnsupportedError


def require_plots() -> None:
    """Raise UnsupportedError where charts cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "charts cannot be drawn", ["matplotlib is not installed"], "pip install 'specc[plot]'"
        )


def draw(report: BenchReport, folder: Path) -> list[Path]:
    """Write acceptance by position, and speed-up by block where several were measured, as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    if report.by_position:
        figure, axes = _figure("draft position", "share of steps in which it is accepted")
        for row in report.by_position:
            shares = [row[key] for key in row if key.startswith("position_") and row[key] is not None]
            axes.plot(
                range(1, len(shares) + 1), shares, marker="o", label=f"{row['method']}, block {row['block']}"
            )
        axes.set_ylim(0, 1)
        made.append(_save(figure, axes, folder / "acceptance_by_position.png"))
    by_method: dict[str, list[Any]] = defaultdict(list)
    for row in report.rows:
        if row.get("block") and row.get("vs_plain") is not None:
            by_method[row["method"]].append(row)
    if any(len(rows) > 1 for rows in by_method.values()):
        figure, axes = _figure("draft tokens per step", "tokens per second, as a multiple of plain decoding")
        for method, rows in by_method.items():
            rows.sort(key=lambda row: row["block"])
            middle = [row["vs_plain"] for row in rows]
            below = [m - row["vs_plain_least"] for m, row in zip(middle, rows, strict=True)]
            above = [row["vs_plain_most"] - m for m, row in zip(middle, rows, strict=True)]
            axes.errorbar(
                [r["block"] for r in rows], middle, yerr=[below, above], marker="o", capsize=3, label=method
            )
        axes.axhline(1.0, color="gray", linewidth=1)
        made.append(_save(figure, axes, folder / "speedup_by_block.png"))
    return made


def _figure(across: str, up: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")  # no pyplot: no global state, no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(across)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # positions and blocks are whole
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> Path:
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
