"""The cost of checking drafted tokens in a step, on this machine's device.

Run with ``python -m sluice.benchmarks.speculation_gpu --model PATH``, on a GPU or on CPUs. Some
decodes run together, with n-grams of their repetitive text as drafts, and each checks as many as it
has up to a length that is fixed for the run. Reported are the median times of those steps, and how
well the latency model of replicas describes them: plans with speculation assume that a checked
token costs as much as a prefill token.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.speculation import Arrival
from sluice.benchmarks.speculation_engine import Asked, SpeculatingEngine
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.fit import fit
from sluice.scheduling.latency import StepSample
from sluice.scheduling.objective import SLO

_OUTPUT = 48
_PHRASE_TOKENS = 6
_TOKENS = (300, 1000)


class StepTime(NamedTuple):
    """Steps of decodes alone.

    Attributes:
        decodes: how many ran together.
        most: max drafted tokens that each may check.
        checked: how many each checked, mean.
        steps: how many steps.
        median_ms: their time.
    """

    decodes: int
    most: int
    checked: float
    steps: int
    median_ms: float


def step_times(
    engine: SpeculatingEngine,
    batches: Sequence[int],
    lengths: Sequence[int],
    context: int,
    seed: int = 0,
) -> tuple[list[StepTime], list[StepSample]]:
    """Run all combinations of batch sizes and lengths on prompts of ``context`` tokens.

    Returns:
        One row for each, and every step in these rows.
    """
    rows: list[StepTime] = []
    every: list[StepSample] = []
    for decodes in batches:
        for most in lengths:
            engine.use(most)
            chance = random.Random(f"{seed}/{decodes}")
            asked = [_repeating(str(number), context, chance) for number in range(decodes)]
            engine.serve([Arrival(0.0, each) for each in asked])  # the first one warms up
            engine.table.clear_samples()
            engine.serve([Arrival(0.0, each) for each in asked])
            # A step with a prompt in it has more tokens than its decodes may have.
            steps = [
                step
                for step in engine.table.samples()
                if step.prefills + step.decodes == decodes
                and step.new_tokens <= decodes * (1 + most)
            ]
            every += steps
            if steps:
                rows.append(
                    StepTime(
                        decodes,
                        most,
                        round(mean(step.new_tokens / decodes - 1 for step in steps), 2),
                        len(steps),
                        round(1e3 * median(step.seconds for step in steps), 3),
                    )
                )
    return rows, every


def _device_args() -> dict[str, Any]:
    """A GPU compiles the model, and has as much KV as fits."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {}
    return {
        "enforce_eager": False,
        "kv_cache_memory_bytes": None,
        "distributed_executor_backend": None,
    }


def _repeating(name: str, tokens: int, chance: random.Random) -> Asked:
    phrase = [chance.randrange(*_TOKENS) for _ in range(_PHRASE_TOKENS)]
    return Asked(name, (phrase * tokens)[:tokens], _OUTPUT, SLO(), 0.0)


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(path_type=Path), help="Default: a small random one.")
@click.option("--batch", "batches", multiple=True, default=(1, 8, 32), type=click.IntRange(1, 64))
@click.option("--most", default=8, type=click.IntRange(1, 32), help="Longest length.")
@click.option("--context", default=512, type=click.IntRange(16, 100_000))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(
    model: Path | None, batches: tuple[int, ...], most: int, context: int, as_json: bool
) -> None:
    """Measure the time of a step by how many drafted tokens its decodes check."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        directory = Path(name)
        path = local_model(directory) if model is None else model
        args = {"max_model_len": context + 256, "dtype": "auto"} | _device_args()
        engine = SpeculatingEngine(path, directory, "fcfs", most, **args)
        try:
            rows, steps = step_times(engine, batches, range(most + 1), context)
        finally:
            engine.close()
    fitted, report = fit(steps)
    found = {
        "rows": [row._asdict() for row in rows],
        "model": repr(fitted),
        "mean_error": round(report.mape, 4),
    }
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(rows, found)


def _show(rows: list[StepTime], found: dict[str, Any]) -> None:
    table = Table("decodes", "most checked", "checked", "steps", "median ms")
    for row in rows:
        table.add_row(*map(str, row))
    console = Console()
    console.print(table)
    console.print(f"{found['model']}: mean error {found['mean_error']:.1%}")


if __name__ == "__main__":
    main()
