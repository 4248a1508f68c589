"""Means with confidence ranges over seeds; results as JSON and terminal tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import inf, isfinite, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rich import table as rich_table
from rich.console import Console

from sluice.deploy.tables import print_table

METHOD = (
    "mean over seeds; the range is the 95 % t-interval of that mean, with the seeds as independent "
    "samples"
)

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""


class Estimate(NamedTuple):
    """Mean over seeds with the figure, half its 95 % range (nan below two), and their number."""

    mean: float
    half_width: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The mean of ``values``; nan: a seed lacks the figure. Infinite values: unknown range."""
        known = [value for value in values if not isnan(value)]
        if not known:
            return cls(nan, nan, 0)
        mean = fmean(known)
        if len(known) < 2 or abs(mean) == inf:
            return cls(mean, nan, len(known))
        freedom = len(known) - 1
        quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96
        return cls(mean, quantile * stdev(known) / sqrt(len(known)), len(known))

    def shown(self, digits: int = 3) -> str:
        """As it stands in a table: ``0.972 ± 0.004``, or ``-`` where there is nothing."""
        if isnan(self.mean):
            return "-"
        mean = f"{self.mean:.{digits}f}"
        return mean if isnan(self.half_width) else f"{mean} ± {self.half_width:.{digits}f}"


class Table(NamedTuple):
    """Cells as they are shown; the figures behind them are in a report's rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def shown(self) -> rich_table.Table:
        """For a terminal."""
        shown = rich_table.Table(title=self.title, caption=self.note or None)
        for index, column in enumerate(self.columns):
            shown.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            shown.add_row(*row)
        return shown


class Report(NamedTuple):
    """All of one experiment's results, with the command that repeats it."""

    name: str
    source: str
    question: str
    setting: str
    method: str
    command: str
    tables: Sequence[Table]
    rows: Sequence[Mapping[str, Any]]

    def as_json(self) -> str:
        """Everything; values that JSON has no number for are ``null``."""
        rows = [
            {
                name: None if isinstance(value, float) and not isfinite(value) else value
                for name, value in row.items()
            }
            for row in self.rows
        ]
        tables = [table._asdict() for table in self.tables]
        return json.dumps(
            {**self._asdict(), "tables": tables, "rows": rows}, indent=1, allow_nan=False
        )

    def show(self) -> None:
        """Print the tables; wide where no terminal sets a width."""
        console = wide_console()
        for table in self.tables:
            print_table(table.shown(), console)


def wide_console() -> Console:
    """The terminal; 160 columns where the output is none."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
