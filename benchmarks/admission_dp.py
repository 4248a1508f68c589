"""Cost of SLOs-Serve's admission in one process.

Run with ``python -m sluice.benchmarks.admission_dp [--json]``. The cases are seeded: new requests
of a few TPOT tiers beside guaranteed requests, a tenth of which still prefill, under a load at
which some but not all new requests fit. ``memory``: KV blocks are scarce too, which adds the memory
axis.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.planning import measure
from sluice.scheduling.admission.slos_serve_selection import Demand, Supply, admissible
from sluice.scheduling.kernels import Floats
from sluice.scheduling.objective import Anchor

TPOTS_S = (0.05, 0.1, 0.08, 0.2)
PREFILLING = 0.1
STEP_S = 0.005
NEW = (1, 10, 50)
PROMISED = (50, 200, 500)


class Case(NamedTuple):
    """One row of the table: counts of each input. ``priorities`` counts distinct values."""

    new: int
    promised: int
    tiers: int
    priorities: int
    memory: bool


CASES = (
    *(Case(new, promised, 3, 1, False) for new, promised in product(NEW, PROMISED)),
    Case(10, 200, 3, 1, True),
    Case(10, 200, 3, 2, False),
    Case(10, 200, 4, 1, False),
    Case(10, 200, 4, 1, True),
    Case(10, 200, 4, 2, True),
)


def _demand(case: Case, count: int, prefill_s: Floats, random: np.random.Generator) -> Demand:
    return Demand(
        random.uniform(0.2, 4.0, count),
        prefill_s,
        np.array(TPOTS_S[: case.tiers])[random.integers(0, case.tiers, count)],
        random.uniform(1e-5, 1e-4, (count, 1)),
        random.integers(20, 120, count).astype(np.float64),
        random.integers(1, case.priorities + 1, count).astype(np.float64),
    )


def make(case: Case, seed: int) -> tuple[Demand, Demand, Supply]:
    """The inputs of one decision."""
    random = np.random.default_rng(seed)
    new = _demand(case, case.new, random.uniform(0.02, 0.5, case.new), random)
    pending = random.random(case.promised) < PREFILLING
    prefill_s = np.where(pending, random.uniform(0.005, 0.05, case.promised), 0.0)
    promised = _demand(case, case.promised, prefill_s, random)
    blocks = float(new.blocks.sum()) / (2 if case.memory else 1)
    supply = Supply(np.array([STEP_S]), np.ones(1), 0.3, blocks, 1_000, Anchor.LAST_TOKEN)
    return new, promised, supply


def deciding(repeats: int, seeds: int) -> list[dict[str, float]]:
    """Cost of a decision per case, and the mean share of the new requests that are admitted."""
    results = []
    for case in CASES:
        inputs = [make(case, seed) for seed in range(seeds)]
        calls: list[Callable[[], object]] = [partial(admissible, *one) for one in inputs]
        admitted = float(np.mean([admissible(*one).mean() for one in inputs]))
        times = measure(calls, repeats)
        results.append({**case._asdict(), "admitted": round(admitted, 3), **times})
    return results


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--repeats", default=40, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--seeds", default=10, show_default=True, type=click.IntRange(1, 1_000))
def main(as_json: bool, repeats: int, seeds: int) -> None:
    """Measure SLOs-Serve's dynamic program over requests, tiers, priorities and memory."""
    results = deciding(repeats, seeds)
    if as_json:
        click.echo(json.dumps(results, indent=2))
        return
    table = Table(title="admission by dynamic program")
    for name in results[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in results:
        table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
