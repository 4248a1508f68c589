"""Tables on a terminal of any width: a number or a name is never cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_ANY_WIDTH = 1 << 16


def print_table(table: Table, console: Console | None = None) -> None:
    """Print ``table`` on ``console``, by default standard output: beyond its width where even
    :func:`fit` makes the table wider."""
    console = console or Console()
    console.width = max(console.width, fit(table, console.width))
    console.print(table)


def fit(table: Table, width: int) -> int:
    """Set the columns of ``table`` so that it is at most ``width`` wide, with line breaks between
    words only; without lines and margins if it needs to.

    Returns how wide it is: more than ``width`` if its words do not fit.
    """
    least = [_widest(column, str.split) for column in table.columns]
    if sum(least) + _overhead(table, least) > width:
        compact(table)
    overhead = _overhead(table, least)
    full = [_widest(column, str.splitlines) for column in table.columns]
    widths = _shared(least, full, width - overhead)
    for column, each in zip(table.columns, widths, strict=True):
        column.width = each
    return sum(widths) + overhead


def compact(table: Table) -> Table:
    """``table`` with a blank between columns and nothing else."""
    table.box, table.padding, table.collapse_padding, table.pad_edge = None, (0, 1), True, False
    return table


def _shared(least: Sequence[int], full: Sequence[int], room: int) -> list[int]:
    """Widths from ``least`` to ``full`` that sum up to ``room``, the narrow ones widened first."""
    widths = list(least)
    for _ in range(room - sum(least)):
        tight = [index for index, width in enumerate(widths) if width < full[index]]
        if not tight:
            break
        widths[min(tight, key=widths.__getitem__)] += 1
    return widths


def _overhead(table: Table, widths: Sequence[int]) -> int:
    """The width of a table beyond its columns. Sets the columns to ``widths``."""
    for column, width in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap, column.overflow = width, False, "fold"
    console = Console(width=_ANY_WIDTH)
    return console.measure(table).maximum - sum(widths)


def _widest(column: Column, parts: Callable[[str], list[str]]) -> int:
    """The width of the widest part of a column's texts."""
    texts = (
        each.plain if isinstance(each, Text) else Text.from_markup(str(each)).plain
        for each in chain([column.header], column.cells)
    )
    return max((cell_len(part) for text in texts for part in parts(text)), default=0)
