"""The tables and charts of an experiment's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sluice.benchmarks.report import Chart, Estimate, Point, Table

V = TypeVar("V")
Value = str | float
Row = dict[str, Value]
"""The labels of a cell, the seed, and what was measured."""

Rows = Sequence[Row]
Where = Mapping[str, Value | tuple[Value, ...]]
"""Values of labels; several in a tuple are alternatives."""


@dataclass(frozen=True, slots=True)
class Pivot:
    """A table of one figure: a line per value of the labels ``down``, a column per value of
    ``across``.

    Attributes:
        title: of the table.
        figure: mean over seeds and over all rows of a cell of the table.
        down, across: labels.
        digits: after the point.
        note: below the table.
        where: only rows with these labels.
        derive: makes the rows of the table from those of the experiment.
    """

    title: str
    figure: str
    down: Sequence[str] = ("policy",)
    across: str = "load"
    digits: int = 3
    note: str = ""
    where: Where = field(default_factory=dict)
    derive: Callable[[Rows], Rows] | None = None

    def __call__(self, rows: Rows) -> Table:
        """The table of ``rows``."""
        rows = self._own(rows)
        columns = [value for (value,) in grouped(rows, self.across)]
        lines = []
        for labels, own in grouped(rows, *self.down).items():
            by = grouped(own, self.across)
            means = [estimate(by.get((value,), []), self.figure) for value in columns]
            lines.append((*map(shown, labels), *(each.shown(self.digits) for each in means)))
        return Table(self.title, (*self.down, *map(shown, columns)), lines, self.note)

    def chart(self, rows: Rows) -> Chart | None:
        """The same over a numeric label ``across``: a line per value of the last label of ``down``;
        ``None`` if that label has names."""
        rows = self._own(rows)
        if any(isinstance(row[self.across], str) for row in rows):
            return None
        lines = {
            shown(name): [
                Point(float(x), *estimate(cell, self.figure)[:2])
                for (x,), cell in grouped(own, self.across).items()
            ]
            for (name,), own in grouped(rows, self.down[-1]).items()
        }
        return Chart(self.title, self.across, self.figure, lines)

    def _own(self, rows: Rows) -> Rows:
        return having(rows if self.derive is None else self.derive(rows), self.where)


def pivots(
    figures: Mapping[str, str],
    down: Sequence[str] = ("policy",),
    across: str = "load",
    digits: int = 3,
    title: str = "{}",
    where: Where | None = None,
) -> list[Pivot]:
    """A table of each figure; ``figures`` maps it to the words in its ``title``."""
    return [
        Pivot(title.format(words), figure, down, across, digits, where=where or {})
        for figure, words in figures.items()
    ]


@dataclass(frozen=True, slots=True)
class Lines:
    """A table with a line for all rows with equal values of the labels ``down``.

    Attributes:
        title: of the table.
        down: labels, the first columns.
        heads: of the other columns.
        cells: the other columns of the line of these rows.
        note: below the table.
    """

    title: str
    down: Sequence[str]
    heads: Sequence[str]
    cells: Callable[[Rows], Sequence[str]]
    note: str = ""

    def __call__(self, rows: Rows) -> Table:
        """The table of ``rows``."""
        lines = [
            (*map(shown, labels), *self.cells(own))
            for labels, own in grouped(rows, *self.down).items()
        ]
        return Table(self.title, (*self.down, *self.heads), lines, self.note)


def means(
    title: str, down: Sequence[str], figures: Mapping[str, tuple[str, int]], note: str = ""
) -> Lines:
    """A table with a column for each figure's mean over seeds; ``figures`` maps it to its heading
    and its digits after the point."""

    def cells(rows: Rows) -> list[str]:
        return [estimate(rows, name).shown(digits) for name, (_, digits) in figures.items()]

    return Lines(title, down, tuple(words for words, _ in figures.values()), cells, note)


@dataclass(frozen=True, slots=True)
class Rivals:
    """One contender against the others.

    Attributes:
        label: the label that names contenders.
        ours: its value for the one.
        figures: that they are compared by, with their words; each a share of 1.
    """

    label: str
    ours: str
    figures: Mapping[str, str]

    def of(self, rows: Rows, name: str) -> Rows:
        """The rows of one contender."""
        return having(rows, {self.label: name})

    def mean(self, rows: Rows, name: str, figure: str) -> float:
        """The mean of one contender."""
        return mean(self.of(rows, name), figure)

    def best(self, rows: Rows, figure: str) -> str:
        """The rival with the highest mean over ``rows``."""
        names = [str(name) for (name,) in grouped(rows, self.label) if name != self.ours]
        return max(names, key=lambda name: self.mean(rows, name, figure))

    def lead(self, rows: Rows, rival: str, figure: str) -> Estimate:
        """Ours minus a rival's, paired by seed."""
        return difference(self.of(rows, self.ours), self.of(rows, rival), figure)


def having(rows: Rows, labels: Where) -> Rows:
    """The rows that have these labels."""
    wanted = {
        name: value if isinstance(value, tuple) else (value,) for name, value in labels.items()
    }
    return [row for row in rows if all(row.get(name) in values for name, values in wanted.items())]


def grouped(rows: Iterable[dict[str, V]], *labels: str) -> dict[tuple[V, ...], list[dict[str, V]]]:
    """Rows by the values of ``labels``, in order of appearance."""
    groups: dict[tuple[V, ...], list[dict[str, V]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[label] for label in labels), []).append(row)
    return groups


def by_seed(rows: Iterable[Row], figure: str) -> dict[Value, float]:
    """The mean of a figure per seed: the samples of an estimate."""
    return {
        seed: sum(float(row[figure]) for row in own) / len(own)
        for (seed,), own in grouped(rows, "seed").items()
    }


def estimate(rows: Iterable[Row], figure: str) -> Estimate:
    """A figure's mean over seeds; the value of a seed is the mean over its rows."""
    return Estimate.of(list(by_seed(rows, figure).values()))


def mean(rows: Iterable[Row], figure: str) -> float:
    """The mean of :func:`estimate`."""
    return estimate(rows, figure).mean


def difference(rows: Iterable[Row], others: Iterable[Row], figure: str) -> Estimate:
    """The estimate of ``rows`` minus ``others``, paired by seed."""
    ours, theirs = by_seed(rows, figure), by_seed(others, figure)
    return Estimate.of([ours[seed] - theirs[seed] for seed in ours])


def shown(label: Value) -> str:
    """A label as it stands in a table."""
    return label if isinstance(label, str) else f"{label:g}"
