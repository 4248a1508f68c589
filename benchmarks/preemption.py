"""What a long prefill costs a short, urgent request, by where it can be preempted.

Run with ``sluice bench preemption``. One real vLLM engine on the CPU, one thread, a small model
with random weights. A long prompt is being computed, and a short one arrives at a random moment.
The same moments are used for every way of preemption. Stock vLLM with priorities is an engine of
its own; requests that arrive during its step are there for the next one.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from benchmarks.preemption_engine import PreemptiveEngine, Result, Work
from replica.local_model import local_model
from replica.preemption.checks import Granularity

_WHOLE = 1 << 20
"""More tokens than any prompt has."""

WAYS: dict[str, tuple[Granularity | None, int]] = {
    "operator": ("operator", _WHOLE),
    "layer": ("layer", _WHOLE),
    "512-token chunks": (None, 512),
    "none": (None, _WHOLE),
}
"""Checks, and most tokens of a task."""

_LATE = 1000.0
_URGENT = 100.0
_VOCABULARY = (300, 1000)


class Moment(NamedTuple):
    """One arrival during a long prefill. Times are seconds."""

    short_ttft_s: float
    long_ttft_s: float
    same: bool


class Row(NamedTuple):
    """All arrivals under one way of preemption.

    Attributes:
        blocked_ms: from the signal to the stop, mean and greatest; None where nothing stopped.
        short_ttft_ms, long_ttft_ms: means.
        ratio: short TTFT over that of the first row.
        same: share of runs whose tokens are those of runs alone.
    """

    way: str
    preemptions: int
    blocked_ms: float | None
    blocked_most_ms: float | None
    short_ttft_ms: float
    long_ttft_ms: float
    ratio: float
    same: float


@click.command(context_settings={"show_default": True})
@click.option("--long", "long_tokens", default=2048, type=click.IntRange(64, 8000))
@click.option("--short", "short_tokens", default=64, type=click.IntRange(2, 4000))
@click.option("--repeats", default=10, type=click.IntRange(1, 1000))
@click.option("--trials", default=0, type=click.IntRange(0, 100_000))
@click.option("--layers", default=8, type=click.IntRange(1, 64))
@click.option("--hidden", default=512, type=click.IntRange(64, 8192))
@click.option("--seed", default=0)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def preemption(
    long_tokens: int,
    short_tokens: int,
    repeats: int,
    trials: int,
    layers: int,
    hidden: int,
    seed: int,
    as_json: bool,
) -> None:
    """Measure how long a short request waits for a long prefill, by where that can be preempted.

    With --trials, prefills are also stopped at that many random places, nested up to three deep,
    and their tokens are compared with those of runs alone.

    \b
    Example:
      sluice bench preemption --repeats 10 --json
    """
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        directory = Path(name)
        model = local_model(directory, layers=layers, hidden=hidden)
        engine = PreemptiveEngine(
            model,
            directory,
            {"granularity": "operator", "depth": 3, "least_tokens": 1},
            max_model_len=long_tokens + 64,
            max_num_batched_tokens=max(2048, long_tokens),
            kv_cache_memory_bytes=256 << 20,
        )
        try:
            bench = _Bench(engine, long_tokens, short_tokens, seed)
            rows = bench.rows(repeats)
            overhead = bench.overhead(repeats)
            trial = random_trials(engine, trials, seed) if trials else None
        finally:
            engine.close()
    found = {
        "rows": [row._asdict() for row in rows],
        "long_alone_ms": round(1e3 * bench.long_alone_s, 2),
        "short_alone_ms": round(1e3 * bench.short_alone_s, 2),
        "overhead_of_checks": round(overhead, 5),
        "trials": trial,
    }
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(rows, found)


class _Bench:
    """Runs of a long and a short prompt on one engine."""

    def __init__(
        self, engine: PreemptiveEngine, long_tokens: int, short_tokens: int, seed: int
    ) -> None:
        chance = random.Random(seed)
        self._chance = chance
        self._engine = engine
        self._most = max(2048, long_tokens)
        self._long = Work("long", _prompt(chance, long_tokens), 1, _LATE)
        self._short = Work("short", _prompt(chance, short_tokens), 1, _URGENT)
        self._use("operator")
        engine.alone(self._long)
        self.expected = {work.name: engine.alone(work) for work in (self._long, self._short)}
        self.long_alone_s = median(engine.alone(self._long).ttft_s for _ in range(3))
        self.short_alone_s = median(engine.alone(self._short).ttft_s for _ in range(3))

    def rows(self, repeats: int) -> list[Row]:
        """One row for each way, in turns, so that all see the same machine."""
        moments = [self._chance.uniform(0.05, 0.9) * self.long_alone_s for _ in range(repeats)]
        runs: dict[str, list[Moment]] = {way: [] for way in WAYS}
        blocked: dict[str, list[float]] = {way: [] for way in WAYS}
        for after_s in moments:
            for way in WAYS:
                self._use(way)
                self._engine.stats.latest_blocked_s.clear()
                runs[way].append(self._run(after_s))
                blocked[way] += self._engine.stats.latest_blocked_s
        base_s = mean(run.short_ttft_s for run in runs["operator"])
        return [_row(way, runs[way], blocked[way], base_s) for way in WAYS]

    def overhead(self, repeats: int) -> float:
        """Time of a long prefill with the checks of all operators over that without any, minus 1;
        the median of pairs."""
        ratios: list[float] = []
        for _ in range(max(5, repeats)):
            times = []
            for way in ("operator", "none"):
                self._use(way)
                self._engine.alone(self._long)
                times.append(self._engine.stats.latest_busy_s)
            ratios.append(times[0] / times[1])
        return median(ratios) - 1

    def _use(self, way: str) -> None:
        granularity, chunk = WAYS[way]
        self._engine.use(granularity, chunk=chunk, most=self._most)

    def _run(self, after_s: float) -> Moment:
        engine = self._engine
        engine.reset()
        engine.add(self._long)
        arrival = _later(after_s, lambda: engine.post(lambda: engine.add(self._short)))
        results = engine.run()
        arrival.join()
        if self._short.name not in results:  # the long one was over before it came
            results |= engine.run()
        short, long = results["short"], results["long"]
        return Moment(short.ttft_s, long.ttft_s, self._same(results))

    def _same(self, results: dict[str, Result]) -> bool:
        return all(results[name].tokens == self.expected[name].tokens for name in results)


def random_trials(engine: PreemptiveEngine, trials: int, seed: int) -> dict[str, int]:
    """Stop prefills at random places, by operator and layer, nested one to three deep, whole and
    in chunks, some with a common prefix; how many runs had the tokens of runs alone."""
    chance = random.Random(seed)
    kinds: list[tuple[Granularity, int]] = [
        ("operator", _WHOLE),
        ("operator", 128),
        ("layer", _WHOLE),
        ("layer", 128),
    ]
    same = stops = 0
    for trial in range(trials):
        granularity, chunk = kinds[trial % len(kinds)]
        checks = engine.use(granularity, chunk=chunk)
        # What a chunk has published would make the others' batches another shape.
        shared = 96 * chance.randrange(2) if chunk == _WHOLE else 0
        made = nested_work(chance, 1 + trial % 3, shared)
        expected = {work.name: engine.alone(work) for work in made}
        engine.reset()
        before = engine.stops
        results = run_nested(engine, made, chance, checks)
        stops += engine.stops - before
        same += all(matches(results[work.name], expected[work.name]) for work in made)
    return {"trials": trials, "stops": stops, "same": same}


def nested_work(chance: random.Random, nested: int, shared: int = 0, output: int = 3) -> list[Work]:
    """A long prompt and ``nested`` others, each more urgent than the one before. The first
    ``shared`` tokens are the same in all."""
    prefix = _prompt(chance, shared)
    made = []
    for index in range(nested + 1):
        length = chance.randrange(64, 200) if index else chance.randrange(300, 700)
        made.append(Work(f"w{index}", prefix + _prompt(chance, length), output, 4000.0 / 2**index))
    return made


def run_nested(
    engine: PreemptiveEngine, made: list[Work], chance: random.Random, checks: int
) -> dict[str, Result]:
    """Run ``made`` so that each stops the one before it at a random one of its first ``checks``
    checks."""
    actions: dict[int, Callable[[], None]] = {}
    at = 0
    for work in made[1:]:
        at += chance.randrange(1, checks + 1)
        actions[at] = lambda work=work: engine.add(work)  # type: ignore[misc]
    engine.at_checks(actions)
    engine.add(made[0])
    return engine.run()


def matches(result: Result, expected: Result) -> bool:
    """Whether the tokens are the same, and the first one's probability to the last bit."""
    return result.tokens == expected.tokens and result.logprobs[:1] == expected.logprobs[:1]


def _prompt(chance: random.Random, tokens: int) -> list[int]:
    return [chance.randrange(*_VOCABULARY) for _ in range(tokens)]


def _later(after_s: float, action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(after_s, action)
    timer.start()
    return timer


def _row(way: str, runs: list[Moment], blocked_s: list[float], base_s: float) -> Row:
    short_s = mean(run.short_ttft_s for run in runs)
    return Row(
        way,
        len(blocked_s),
        round(1e3 * mean(blocked_s), 2) if blocked_s else None,
        round(1e3 * max(blocked_s), 2) if blocked_s else None,
        round(1e3 * short_s, 2),
        round(1e3 * mean(run.long_ttft_s for run in runs), 2),
        round(short_s / base_s, 2),
        mean(run.same for run in runs),
    )


def _show(rows: list[Row], found: dict[str, Any]) -> None:
    table = Table("preempted at", "stops", "blocked ms", "most", "short TTFT ms", "long TTFT ms")
    for row in rows:
        table.add_row(
            row.way,
            str(row.preemptions),
            "" if row.blocked_ms is None else f"{row.blocked_ms:.1f}",
            "" if row.blocked_most_ms is None else f"{row.blocked_most_ms:.1f}",
            f"{row.short_ttft_ms:.1f} ({row.ratio:.1f}x)",
            f"{row.long_ttft_ms:.1f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"alone: long {found['long_alone_ms']} ms, short {found['short_alone_ms']} ms; "
        f"checks cost {100 * found['overhead_of_checks']:.2f} %"
    )
    if found["trials"]:
        console.print(f"random places: {found['trials']}")
