"""The frame of experiments: cells, measured per seed in processes, and tables of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from sluice.benchmarks.options import in_processes
from sluice.benchmarks.report import Estimate, Table

Scale = Literal["quick", "normal", "full"]
"""How much to run: seconds (a smoke test whose figures mean nothing), minutes, or longer."""

T = TypeVar("T")
V = TypeVar("V")
Value = str | float
Row = dict[str, Value]
"""The labels of a cell, the seed, and what was measured."""

Rows = Sequence[Row]
Where = Mapping[str, Value | tuple[Value, ...]]
"""Values of labels; several in a tuple are alternatives."""


class Plan(NamedTuple):
    """How much of an experiment to run: every cell once for each seed, and recorded traces of a
    folder beside the generated workloads."""

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


def few(values: Any, plan: Plan, count: int = 1) -> Any:
    """All of ``values``, a sequence or a mapping; in quick scale the first ``count``."""
    if plan.scale != "quick":
        return values
    if isinstance(values, Mapping):
        return dict(islice(values.items(), count))
    return values[:count]


def first(values: Any, count: int = 1) -> Callable[[Plan], Any]:
    """:func:`few` as a part of a grid."""
    return partial(few, values, count=count)


Axes: TypeAlias = Mapping[str, Planned[Sequence[Any] | Mapping[Any, Any]]]
"""Values by axis; a mapping has their labels, others are or have a ``label``."""


class Cell(NamedTuple):
    """One point of a grid: its labels, and what returns the figures of a seed: a partial of a
    module-level function, as it is sent to a process."""

    labels: Mapping[str, Value]
    measure: Callable[[int], Mapping[str, float]]


class Grid(Protocol):
    """The cells of an experiment, or a part of them."""

    def cells(self, plan: Plan) -> Sequence[Cell]:
        """The cells in this plan."""


@dataclass(frozen=True, slots=True)
class Product:
    """Every combination of the axes' values, the last changes first. ``measure`` gets the seed,
    these and ``fixed``, which are no labels; ``labels`` are further ones."""

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
    """A paper's figures or a question of ours: grids of cells, and tables of their rows after
    ``derive``. ``setting`` says what the grid does not show."""

    name: str
    source: str
    question: str
    _: KW_ONLY
    setting: str
    grids: Sequence[Grid]
    tables: Sequence[Callable[[Rows], Table]]
    derive: Callable[[Rows], Rows] = lambda rows: rows
    seeds: int = 2

    def cells(self, plan: Plan) -> list[Cell]:
        """The cells in this plan."""
        return [cell for grid in self.grids for cell in grid.cells(plan)]

    def findings(self, rows: Rows) -> list[Table]:
        """The tables of ``rows``."""
        rows = self.derive(rows)
        return [made for made in (table(rows) for table in self.tables) if made.rows]


def measured(cells: Sequence[Cell], seeds: Sequence[int], jobs: int) -> Iterator[Row]:
    """A row for each cell and seed, in order, as soon as it is measured."""
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


# Tables.


@dataclass(frozen=True, slots=True)
class Pivot:
    """A table of the mean of one figure over seeds: a line per value of the labels ``down``, a
    column per value of ``across``, of the rows ``where`` labels are as stated, after ``derive``."""

    title: str
    figure: str
    down: Sequence[str] = ("policy",)
    across: str = "load"
    digits: int = 3
    note: str = ""
    where: Where = field(default_factory=dict)
    derive: Callable[[Rows], Rows] = lambda rows: rows

    def __call__(self, rows: Rows) -> Table:
        """The table of ``rows``."""
        rows = having(self.derive(rows), self.where)
        columns = [value for (value,) in grouped(rows, self.across)]
        lines = []
        for labels, own in grouped(rows, *self.down).items():
            by = grouped(own, self.across)
            means = [estimate(by.get((value,), []), self.figure) for value in columns]
            lines.append((*map(shown, labels), *(each.shown(self.digits) for each in means)))
        return Table(self.title, (*self.down, *map(shown, columns)), lines, self.note)


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
    """A table with a line per values of ``down``; ``cells`` makes the columns ``heads``."""

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
    """A table of means over seeds; ``figures`` maps each to its heading and digits."""

    def cells(rows: Rows) -> list[str]:
        return [estimate(rows, name).shown(digits) for name, (_, digits) in figures.items()]

    return Lines(title, down, tuple(words for words, _ in figures.values()), cells, note)


@dataclass(frozen=True, slots=True)
class Rivals:
    """The contender labelled ``ours`` against the others."""

    label: str
    ours: str

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

    def lead_over_best(self, rows: Rows, figure: str) -> Estimate:
        """Ours minus, on each seed, that of the rival that is best on the others: chosen on the
        same seed, noise would favour it. With one seed there is no other."""
        seeds = grouped(rows, "seed").items()
        leads = []
        for (seed,), own in seeds:
            others = [row for row in rows if row["seed"] != seed] or own
            leads.append(self.lead(own, self.best(others, figure), figure).mean)
        return Estimate.of(leads)


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
