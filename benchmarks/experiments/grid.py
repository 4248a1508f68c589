"""The frame of every experiment: a grid of cells, measured for every seed in parallel processes,
and the tables and charts of the rows."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from sluice.simulation.estimate import Estimate
from sluice.simulation.planning.plots import Chart, Point, Table

Scale = Literal["quick", "normal", "full"]
"""How much to run: seconds (a smoke test whose figures mean nothing), minutes, or longer."""

Value = str | float
Row = dict[str, Value]
"""The labels of a cell, the seed, and what was measured."""

Rows = Sequence[Row]
T = TypeVar("T")


class Plan(NamedTuple):
    """How much of an experiment to run.

    Attributes:
        scale: see :data:`Scale`.
        seeds: of workloads and noise; every cell runs once for each.
        traces: folder of recorded traces, which are used beside generated workloads.
    """

    scale: Scale
    seeds: tuple[int, ...]
    traces: Path | None = None

    def pick(self, quick: T, normal: T, full: T | None = None) -> T:
        """The value for the scale; without ``full``, that is as ``normal``."""
        larger = normal if full is None else full
        return {"quick": quick, "normal": normal, "full": larger}[self.scale]


class Cell(NamedTuple):
    """One point of an experiment's grid.

    Attributes:
        labels: name the point; equal for all seeds.
        measure: returns the figures of one seed. It is sent to another process, so it is a partial
            call of a module-level function.
    """

    labels: Mapping[str, Value]
    measure: Callable[[int], Mapping[str, float]]


class Findings(NamedTuple):
    """What an experiment shows."""

    tables: Sequence[Table]
    charts: Sequence[Chart]


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
    """

    title: str
    figure: str
    down: Sequence[str]
    across: str = "load"
    digits: int = 3
    note: str = ""
    where: Mapping[str, Value] = field(default_factory=dict)

    def __call__(self, rows: Rows) -> Table:
        """The table of ``rows``."""
        rows = having(rows, self.where)
        columns = [value for (value,) in grouped(rows, self.across)]
        lines = []
        for labels, own in grouped(rows, *self.down).items():
            by = grouped(own, self.across)
            means = [estimate(by.get((value,), []), self.figure) for value in columns]
            lines.append((*map(shown, labels), *(mean.shown(self.digits) for mean in means)))
        return Table(self.title, (*self.down, *map(shown, columns)), lines, self.note)


@dataclass(frozen=True, slots=True)
class Curves:
    """A chart of one figure over the label ``x``, with a line per value of the label ``line``.

    Attributes:
        title: of the chart.
        figure: mean over seeds and over all rows of a point.
        words: of the vertical axis.
        line, x: labels.
        where: only rows with these labels.
    """

    title: str
    figure: str
    words: str
    line: str = "policy"
    x: str = "load"
    where: Mapping[str, Value] = field(default_factory=dict)

    def __call__(self, rows: Rows) -> Chart:
        """The chart of ``rows``."""
        lines = {
            str(name): [
                Point(float(at), *estimate(cell, self.figure)[:2])
                for (at,), cell in grouped(own, self.x).items()
            ]
            for (name,), own in grouped(having(rows, self.where), self.line).items()
        }
        return Chart(self.title, self.x, self.words, lines)


class Experiment(NamedTuple):
    """One experiment.

    Attributes:
        name: the command's name.
        source: paper and figures that it repeats.
        question: the question that it answers, one sentence.
        setting: the conditions, in words: which TPOT is judged, how arrivals are scaled, how
            objectives and priorities are assigned, which latency constants apply.
        seeds: how many by default.
        cells: the grid.
        tables, charts: made of the rows of all cells and seeds, in the order of the cells. A table
            without lines is not shown.
        derive: figures that follow from those of several cells; ``None``: there are none.
    """

    name: str
    source: str
    question: str
    setting: Mapping[str, str]
    seeds: int
    cells: Callable[[Plan], Sequence[Cell]]
    tables: Sequence[Callable[[Rows], Table]]
    charts: Sequence[Callable[[Rows], Chart]] = ()
    derive: Callable[[Rows], Rows] | None = None

    def findings(self, rows: Rows) -> Findings:
        """What ``rows`` show."""
        rows = rows if self.derive is None else self.derive(rows)
        made = (table(rows) for table in self.tables)
        return Findings([each for each in made if each.rows], [make(rows) for make in self.charts])


def measured(cells: Sequence[Cell], seeds: Sequence[int], jobs: int) -> Iterator[Row]:
    """A row for each cell and seed, in their order, as soon as it is measured.

    Args:
        cells: the grid.
        seeds: each cell is measured once for each of them.
        jobs: processes, >= 1; with one, everything runs in this process.
    """
    work = [(cell, seed) for cell in cells for seed in seeds]
    if jobs == 1:
        yield from map(_row, work)
        return
    # Forked processes would inherit threads; new ones load the compiled loops from their cache.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            yield from pool.map(_row, work, chunksize=4)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _row(work: tuple[Cell, int]) -> Row:
    cell, seed = work
    try:
        return {**cell.labels, "seed": seed, **cell.measure(seed)}
    except Exception as error:
        labels = ", ".join(f"{name} {value}" for name, value in cell.labels.items())
        error.add_note(f"in the cell {labels}, seed {seed}")
        raise


def having(rows: Rows, labels: Mapping[str, Value]) -> Rows:
    """The rows that have these labels."""
    return [row for row in rows if all(row.get(name) == value for name, value in labels.items())]


def grouped(rows: Iterable[Row], *labels: str) -> dict[tuple[Value, ...], list[Row]]:
    """Rows by the values of ``labels``, in order of appearance."""
    groups: dict[tuple[Value, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[label] for label in labels), []).append(row)
    return groups


def by_label(rows: Iterable[Row], label: str) -> dict[str, list[Row]]:
    """Rows by the value of one label, in order of appearance."""
    return {str(value): own for (value,), own in grouped(rows, label).items()}


def by_seed(rows: Iterable[Row], figure: str) -> dict[Value, float]:
    """The mean of a figure per seed: the samples of an estimate."""
    return {
        seed: sum(float(row[figure]) for row in own) / len(own)
        for (seed,), own in grouped(rows, "seed").items()
    }


def estimate(rows: Iterable[Row], figure: str) -> Estimate:
    """A figure's mean over seeds; the value of a seed is the mean over its rows."""
    return Estimate.of(list(by_seed(rows, figure).values()))


def difference(rows: Iterable[Row], others: Iterable[Row], figure: str) -> Estimate:
    """The estimate of ``rows`` minus ``others``, paired by seed."""
    ours, theirs = by_seed(rows, figure), by_seed(others, figure)
    return Estimate.of([ours[seed] - theirs[seed] for seed in ours])


def shown(label: Value) -> str:
    """A label as it stands in a table."""
    return label if isinstance(label, str) else f"{label:g}"
