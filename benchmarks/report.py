"""Means with confidence ranges over seeds; results as JSON, Markdown, plots and terminal tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import inf, isfinite, isnan, nan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

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

_T_MORE = 1.96


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
        quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else _T_MORE
        return cls(mean, quantile * stdev(known) / sqrt(len(known)), len(known))

    def shown(self, digits: int = 3) -> str:
        """As it stands in a table: ``0.972 ± 0.004``, or ``-`` where there is nothing."""
        if isnan(self.mean):
            return "-"
        mean = f"{self.mean:.{digits}f}"
        return mean if isnan(self.half_width) else f"{mean} ± {self.half_width:.{digits}f}"


class ReportError(RuntimeError):
    """A report cannot be written; the message says why."""


class Table(NamedTuple):
    """Cells as they are shown; the figures behind them are in a report's rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Point(NamedTuple):
    """A point of a chart; ``error`` is half of its range, nan if unknown."""

    x: float
    y: float
    error: float


class Chart(NamedTuple):
    """Lines over a common axis."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[Point]]


class Report(NamedTuple):
    """All of one experiment's results, with the command that repeats it."""

    name: str
    source: str
    question: str
    setting: str
    method: str
    command: str
    tables: Sequence[Table]
    charts: Sequence[Chart]
    rows: Sequence[Mapping[str, Any]]

    def as_json(self) -> str:
        """Everything but the charts; values that JSON has no number for are ``null``."""
        fields = {key: value for key, value in self._asdict().items() if key != "charts"}
        fields["tables"] = [table._asdict() for table in self.tables]
        fields["rows"] = [
            {
                name: None if isinstance(value, float) and not isfinite(value) else value
                for name, value in row.items()
            }
            for row in self.rows
        ]
        return json.dumps(fields, indent=1, allow_nan=False)

    def as_markdown(self) -> str:
        """The setting and the tables."""
        lines = [f"## {self.name}", "", self.question, "", f"`{self.command}`", ""]
        lines += [f"- Source: {self.source}.", f"- {self.setting}", f"- Ranges: {self.method}.", ""]
        for table in self.tables:
            lines += [f"### {table.title}", "", *markdown(table), ""]
        return "\n".join(lines)

    def write(self, folder: Path, plots: bool = True) -> list[Path]:
        """Write JSON, Markdown and PNGs; their paths. Raises :class:`ReportError`."""
        texts = {f"{self.name}.json": self.as_json(), f"{self.name}.md": self.as_markdown()}
        written = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                path = folder / name
                path.write_text(text + "\n", encoding="utf-8")
                written.append(path)
        except OSError as error:
            raise ReportError(f"cannot write to {folder}: {error.strerror}") from error
        if plots:
            for number, chart in enumerate(self.charts, 1):
                path = folder / f"{self.name}-{number}.png"
                draw(chart, path)
                written.append(path)
        return written

    def show(self) -> None:
        """Print the tables; wide where no terminal sets a width."""
        console = wide_console()
        for table in self.tables:
            shown = rich_table.Table(title=table.title, caption=table.note or None)
            for index, column in enumerate(table.columns):
                justify: Literal["left", "right"] = "left" if index == 0 else "right"
                shown.add_column(column, justify=justify, overflow="fold")
            for row in table.rows:
                shown.add_row(*row)
            print_table(shown, console)


def wide_console() -> Console:
    """The terminal; 160 columns where the output is none."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def markdown(table: Table) -> list[str]:
    """The lines of a table in Markdown, with its note."""
    lines = [
        f"| {' | '.join(table.columns)} |",
        f"|{'---|' * len(table.columns)}",
        *(f"| {' | '.join(row)} |" for row in table.rows),
    ]
    return [*lines, "", table.note] if table.note else lines


def require_matplotlib() -> None:
    """Raise :class:`ReportError` without matplotlib, before hours of work."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportError(
            "plots need matplotlib, which is not installed: pip install 'sluice-serve[bench]', or "
            "leave them out with --no-plots"
        ) from error


def draw(chart: Chart, path: Path) -> None:
    """Draw a chart into a file; raises :class:`ReportError`."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in chart.lines.items():
        errors = [point.error if isfinite(point.error) else 0.0 for point in points]
        xs, ys = [point.x for point in points], [point.y for point in points]
        axes.errorbar(xs, ys, yerr=errors, label=name, marker="o", markersize=3, capsize=2)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if all(float(point.x).is_integer() for points in chart.lines.values() for point in points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}") from error
