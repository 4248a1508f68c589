"""The frame of every experiment: a grid of cells, measured for every seed in parallel processes,
and the tables and charts made of the rows."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from sluice.simulation.estimate import Estimate
from sluice.simulation.planning.plots import Chart, Point, Table

Scale = Literal["quick", "normal", "full"]
"""How much to run: seconds (a smoke test whose figures mean nothing), minutes, or longer."""

Value = str | float
Row = dict[str, Value]
"""The labels of a cell, the seed, and what was measured."""

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

    def pick(self, quick: T, normal: T, full: T) -> T:
        """The value for the scale."""
        return {"quick": quick, "normal": normal, "full": full}[self.scale]


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
    charts: Sequence[Chart] = ()


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
        findings: tables and charts of the rows of all cells and seeds, in the order of the cells.
    """

    name: str
    source: str
    question: str
    setting: Mapping[str, str]
    seeds: int
    cells: Callable[[Plan], Sequence[Cell]]
    findings: Callable[[Sequence[Row]], Findings]


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


def grouped(rows: Iterable[Row], *labels: str) -> dict[tuple[Value, ...], list[Row]]:
    """Rows by the values of ``labels``, in order of appearance."""
    groups: dict[tuple[Value, ...], list[Row]] = {}
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


def difference(rows: Iterable[Row], others: Iterable[Row], figure: str) -> Estimate:
    """The estimate of ``rows`` minus ``others``, paired by seed."""
    ours, theirs = by_seed(rows, figure), by_seed(others, figure)
    return Estimate.of([ours[seed] - theirs[seed] for seed in ours])


def pivot(
    title: str,
    rows: Sequence[Row],
    down: Sequence[str],
    across: str,
    figure: str,
    digits: int = 3,
    note: str = "",
) -> Table:
    """A table of one figure: a line per value of the labels ``down``, a column per value of
    ``across``."""
    columns = [value for (value,) in grouped(rows, across)]
    lines = []
    for labels, own in grouped(rows, *down).items():
        of_column = grouped(own, across)
        shown = [estimate(of_column.get((value,), []), figure).shown(digits) for value in columns]
        lines.append((*map(_shown, labels), *shown))
    return Table(title, (*down, *map(_shown, columns)), lines, note)


def _shown(label: Value) -> str:
    return label if isinstance(label, str) else f"{label:g}"


def chart(title: str, rows: Sequence[Row], line: str, x: str, figure: str, words: str) -> Chart:
    """A chart of one figure over the label ``x``, with a line per value of the label ``line``."""
    return Chart(
        title,
        x,
        words,
        {
            str(name): [
                Point(float(at), *estimate(cell, figure)[:2])
                for (at,), cell in grouped(own, x).items()
            ]
            for (name,), own in grouped(rows, line).items()
        },
    )
