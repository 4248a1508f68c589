"""The frame of every experiment: a grid of cells, measured for every seed in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from sluice.benchmarks.experiments.tables import Pivot, Row, Rows, Value
from sluice.benchmarks.parallel import in_processes
from sluice.benchmarks.report import Chart, Table

Scale = Literal["quick", "normal", "full"]
"""How much to run: seconds (a smoke test whose figures mean nothing), minutes, or longer."""

COMMON: Mapping[str, str] = {
    "TPOT": "mean since the first token; TDG by the envelope",
    "Arrivals": "generated, Poisson",
    "Load": "load 1 is the rate at which the work of the mean request fills the engine's time in "
    "steps as long as the tightest TPOT objective, or at which its decodes fill the KV; of a "
    "cluster it is that of each replica, with separate prefill and decode of all together",
    "Objectives and priorities": "each workload's own, see simulation/workloads/settings.py",
    "Latency": "setup 8b of benchmarks/experiments/systems.py, 3 % noise, 5 % head-room, online "
    "correction; nothing ran on an accelerator",
}
"""The setting of an experiment that says nothing else."""

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

    def of(self, value: Planned[T]) -> T:
        """The value of a part of a grid in this plan."""
        found: T = value(self) if callable(value) else value
        return found


@dataclass(frozen=True, slots=True)
class Scaled(Generic[T]):
    """A part of a grid that depends on the scale; without ``full``, that is as ``normal``."""

    quick: T
    normal: T
    full: T | None = None

    def __call__(self, plan: Plan) -> T:
        """The value for the scale of ``plan``."""
        if plan.scale == "quick":
            return self.quick
        return self.normal if plan.scale == "normal" or self.full is None else self.full


Planned: TypeAlias = T | Callable[[Plan], T]
"""A part of a grid: itself, or a function of the plan such as :class:`Scaled`."""


Axes: TypeAlias = Mapping[str, Planned[Sequence[Any] | Mapping[Any, Any]]]
"""Values by axis. A mapping has the label of each value; of others it is their own ``label``, or
they are labels themselves."""


class Cell(NamedTuple):
    """One point of an experiment's grid.

    Attributes:
        labels: name the point; equal for all seeds.
        measure: returns the figures of one seed. It is sent to another process, so it is a partial
            call of a module-level function.
    """

    labels: Mapping[str, Value]
    measure: Callable[[int], Mapping[str, float]]


class Grid(Protocol):
    """The cells of an experiment, or a part of them."""

    def cells(self, plan: Plan) -> Sequence[Cell]:
        """The cells in this plan."""


@dataclass(frozen=True, slots=True)
class Product:
    """Every combination of the values of some axes, the last of which changes first.

    Attributes:
        measure: called with the seed, and with the value of each axis by the axis' name.
        axes: see :data:`Axes`.
        fixed: further arguments, which are no labels.
        labels: further labels of all cells.
    """

    measure: Callable[..., Mapping[str, float]]
    axes: Axes
    fixed: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Value] = field(default_factory=dict)

    def cells(self, plan: Plan) -> list[Cell]:
        """The cells in this plan."""
        fixed = {name: plan.of(value) for name, value in self.fixed.items()}
        axes = [
            list(values.items())
            if isinstance(values, Mapping)
            else [(getattr(value, "label", value), value) for value in values]
            for values in map(plan.of, self.axes.values())
        ]
        found = []
        for point in product(*axes):
            labels = {name: label for name, (label, _) in zip(self.axes, point, strict=True)}
            values = {name: value for name, (_, value) in zip(self.axes, point, strict=True)}
            run = partial(self.measure, **values, **fixed)
            found.append(Cell({**labels, **self.labels}, run))
        return found


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    Attributes:
        name: the command's name.
        source: paper and figures that it repeats.
        question: the question that it answers, one sentence.
        setting: the conditions, in words, where they differ from :data:`COMMON`.
        grids: their cells are those of the experiment.
        tables: made of the rows of all cells and seeds, in the order of the cells. A table without
            lines is not shown.
        derive: figures that follow from those of several cells; ``None``: there are none.
        seeds: how many by default.
    """

    name: str
    source: str
    question: str
    _: KW_ONLY
    setting: Mapping[str, str]
    grids: Sequence[Grid]
    tables: Sequence[Callable[[Rows], Table]]
    derive: Callable[[Rows], Rows] | None = None
    seeds: int = 2

    @property
    def conditions(self) -> Mapping[str, str]:
        """The whole setting."""
        return {**COMMON, **self.setting}

    def cells(self, plan: Plan) -> list[Cell]:
        """The cells in this plan."""
        return [cell for grid in self.grids for cell in grid.cells(plan)]

    def findings(self, rows: Rows) -> tuple[list[Table], list[Chart]]:
        """The tables of ``rows``, and a chart for each table over a numeric label."""
        rows = rows if self.derive is None else self.derive(rows)
        tables = [made for made in (table(rows) for table in self.tables) if made.rows]
        charts = [table.chart(rows) for table in self.tables if isinstance(table, Pivot)]
        return tables, [chart for chart in charts if chart is not None]


def measured(cells: Sequence[Cell], seeds: Sequence[int], jobs: int) -> Iterator[Row]:
    """A row for each cell and seed, in their order, as soon as it is measured, by ``jobs`` >= 1
    processes."""
    with in_processes(_row, jobs) as measure_all:
        yield from measure_all([(cell, seed) for cell in cells for seed in seeds])


def _row(work: tuple[Cell, int]) -> Row:
    cell, seed = work
    try:
        return {**cell.labels, "seed": seed, **cell.measure(seed)}
    except Exception as error:
        labels = ", ".join(f"{name} {value}" for name, value in cell.labels.items())
        error.add_note(f"in the cell {labels}, seed {seed}")
        raise
