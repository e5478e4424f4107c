"""What the commands print: commentary on stderr, results on stdout, so that results can be piped."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

JSON = Mapping[str, Any]
_SIDE_BY_SIDE = 6  # records that a narrow terminal shows as columns, when as lines they are too wide


def _text(value: object) -> str:
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_text(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items()) or "none"
    return str(value)


def plain(value: object) -> object:
    """Return the value as JSON can hold it: paths as text, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def show_options(context: typer.Context, resolved: JSON | None = None) -> None:
    """Print on stderr what the command will do: every option with its value, resolved ones last."""
    options = {**context.params, **(resolved or {})}
    shown = ", ".join(f"{name}={_text(value)}" for name, value in options.items() if name != "json_output")
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"[dim]specc {context.info_name}: {escape(shown)}[/dim]"
    )


def say(line: str) -> None:
    """Print one line of commentary on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[dim]{escape(line)}[/dim]")


class _Logs(logging.Handler):
    """Writes log records as commentary; looks standard error up for each, since callers may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


# What takes long enough that a person wants to know what is being waited for.
_SLOW = (
    "specc.api",
    "specc.device",
    "specc.models",
    "specc.runtime",
    "specc.benchmark",
    "specc.training",
    "specc.tuning",
)


def show_logs(*, verbose: bool) -> None:
    """Show specc's log on stderr: what takes long, or with ``verbose`` everything."""
    logger = logging.getLogger("specc")
    for handler in [h for h in logger.handlers if isinstance(h, _Logs)]:
        logger.removeHandler(handler)
    handler = _Logs()
    if not verbose:
        handler.addFilter(lambda record: record.levelno > logging.INFO or record.name.startswith(_SLOW))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def print_json(document: JSON) -> None:
    """Print the command's only output for machines."""
    print(json.dumps(plain(document), indent=2, allow_nan=False))


def _rows(title: str, rows: Sequence[JSON]) -> Table:
    """Lay out records as one table; a column is every key that any of them has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left")
    for column in columns:
        values = [row.get(column) for row in rows]
        numeric = all(isinstance(value, int | float) for value in values if value is not None)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if row.get(key) is None else escape(_text(row[key])) for key in columns))
    return table


def _turned(title: str, rows: Sequence[JSON]) -> Table:
    """Lay out records side by side: one column each, headed by its first value, and a line for every other key."""
    first, *others = dict.fromkeys(key for row in rows for key in row)
    table = Table(title=title, title_justify="left")
    table.add_column(first.replace("_", " "))
    for row in rows:
        table.add_column(escape(_text(row.get(first))), justify="right", overflow="fold")
    for key in others:
        cells = ("" if row.get(key) is None else escape(_text(row[key])) for row in rows)
        table.add_row(key.replace("_", " "), *cells)
    return table


def show(document: JSON, title: str = "", *, stderr: bool = False) -> None:
    """Print a record as tables: its plain values in one, every list of records and record in its own."""
    console = Console(stderr=stderr, highlight=False)
    records, nested = {}, {}
    for key, value in document.items():
        is_rows = isinstance(value, Sequence) and not isinstance(value, str) and value
        if isinstance(value, Mapping) or (is_rows and all(isinstance(item, Mapping) for item in value)):
            nested[key] = value
        else:
            records[key] = value
    if records:
        table = Table(title=title, title_justify="left", show_header=False)
        for key, value in records.items():
            table.add_row(key.replace("_", " "), escape("none" if value is None else _text(value)))
        console.print(table)
    for key, value in nested.items():
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            show(value, name, stderr=stderr)
        else:
            table = _rows(name, value)
            wanted = console.measure(table, options=console.options.update(max_width=10_000)).maximum
            if wanted > console.width and len(value) <= _SIDE_BY_SIDE:
                table = _turned(name, value)
            console.print(table)
