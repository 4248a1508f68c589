"""The delay of a short, urgent request by a long prefill, by where the prefill can be preempted.

Run with ``python -m tests.replica.preemption.waits``. Real vLLM engines on the CPU, one thread, a
small model with random weights. While a long prompt is computed, a short one arrives at a random
moment. Every way of preemption gets the same moments, one way after the other, so that all see the
same machine. Stock vLLM with priorities runs in a process of its own.
"""

from __future__ import annotations

import os
import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import comb
from pathlib import Path
from statistics import mean, median
from typing import Any

import click

from sluice.benchmarks.live.report import Json, table
from sluice.benchmarks.options import as_json, number_option, show
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, SchedulerSettings, to_xargs
from sluice.replica.vllm.local_model import local_model
from sluice.replica.vllm.setup import preemption_arguments
from sluice.scheduling.preemption import DecodeTurns, TaskBounds
from sluice.scheduling.request.objective import SLO
from tests.replica.engines import (
    EngineProcess,
    OneEngine,
    Result,
    StockEngine,
    Work,
    quiet_vllm,
)

WHOLE = 1 << 20
"""More tokens than any prompt has."""

BOUNDS = TaskBounds(depth=3, min_tokens=1)

VOCABULARY = (300, 1000)
"""Tokens of the prompts: the first, and the one after the last."""

WAYS: dict[str, tuple[bool, int]] = {
    "operator": (True, WHOLE),
    "512-token chunks": (False, 512),
    "none": (False, WHOLE),
}
"""Whether there are checks, and max tokens of a task; requests by S-EDF."""

STOCK: dict[str, tuple[int, int]] = {
    "stock, 2048": (2048, 0),
    "stock, 512": (512, 0),
    "stock, 256": (256, 0),
    "stock, 512, threshold 256": (512, 256),
}
"""Stock vLLM with priorities: max tokens of a step, and its long-prefill threshold. Stock vLLM
serves running before waiting requests, so only the threshold leaves tokens for a more urgent
prompt."""

LAYERS, HIDDEN = 8, 512
"""Of the model."""

LONG, SHORT = 2048, 64
"""Tokens of the two prompts."""

_MAX_LIVE = 4096
_OVERHEAD_TOKENS = 512
_DECODED = 32
_ALONE = 5
_MIN_PAIRS = 6
"""With fewer pairs, no interval of their median has 95 % confidence."""


@click.command(context_settings={"show_default": True})
@number_option("--repeats", default=10, least=1, most=1000)
@number_option("--pairs", default=40, least=_MIN_PAIRS, most=10_000)
@as_json
def main(repeats: int, pairs: int, as_json: bool) -> None:
    """Measure how long a short request waits for a long prefill, by where that can be preempted.

    \b
    Example:
      python -m tests.replica.preemption.waits --repeats 10 --json
    """
    quiet_vllm()
    args = {
        "max_model_len": LONG + 64,
        "max_num_batched_tokens": LONG,
        "kv_cache_memory_bytes": 256 << 20,
        "enforce_eager": True,
    }
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        model = local_model(Path(name), layers=LAYERS, hidden=HIDDEN)
        make = partial(StockEngine, model, max_num_seqs=16, block_size=32, **args)
        with (
            closing(EngineProcess(make)) as stock,
            closing(PreemptiveEngine(model, Path(name), **args)) as engine,
        ):
            found = Bench(engine, stock, LONG, SHORT).all(repeats, pairs)
    ways = ("way", "stops", "blocked", "blocked_most", "waited", "short", "short_ratio", "long")
    costs = [{"of": name, **each} for name, each in found["overhead"].items()]
    tables = [
        table(found["rows"], *ways, title="milliseconds"),
        table(costs, *costs[0], title="overhead without preemption"),
    ]
    show(found, tables, as_json, f"alone, and alone on stock vLLM, ms: {found['alone_ms']}")


def random_prompt(chance: random.Random, tokens: int) -> list[int]:
    """``tokens`` random tokens."""
    return [chance.randrange(*VOCABULARY) for _ in range(tokens)]


class Turns(DecodeTurns):
    """Keeps the times of all stops."""

    def __init__(self, checks: int) -> None:
        super().__init__(checks)
        self.took_s: list[float] = []

    def stopped(self, took_s: float, task_s: float) -> None:
        self.took_s.append(took_s)
        super().stopped(took_s, task_s)


class PreemptiveEngine(OneEngine):
    """An engine core with a queue of events, as in a process of its own; only this class fills it.
    ``args``: vLLM's engine arguments."""

    def __init__(self, model: Path, directory: Path, **args: Any) -> None:
        super().__init__()
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        needed = {name.replace("-", "_"): it for name, it in preemption_arguments(1).items()}
        path = directory / "state"
        self.table = StateTable.create(_MAX_LIVE, path)
        settings = SchedulerSettings(state_table=path, policy="s_edf", preemption=BOUNDS)
        self._start(
            model,
            additional_config=settings.to_additional_config(),
            block_size=32,
            max_num_seqs=16,
            **needed,
            **args,
        )
        self.core: Any = self._llm.llm_engine.engine_core.engine_core
        self.core.input_queue = queue.Queue()
        self.core._handle_client_request = self._handle
        self.scheduler: Any = self.core.scheduler
        self.executor: Any = self.core.model_executor
        self._checks: Any = self.executor._tasks.checks

    def add(self, work: Work, arrived_s: float | None = None) -> None:
        """A request arrives now, or arrived some time ago; on the engine's thread."""
        now_s = time.monotonic() if arrived_s is None else arrived_s
        request = self._request(work, now_s, extra_args=self.extra_args(work, now_s))
        self._llm.llm_engine.add_request(*request)

    def extra_args(self, work: Work, arrived_s: float) -> dict[str, Any]:
        """vLLM's extra arguments of a request, in which Sluice's scheduler reads its objective."""
        slo = SLO(ttft_s=work.ttft_s, tpot_s=work.tpot_s)
        return to_xargs(RequestArgs(work.name, arrived_s, slo, work.best_effort))

    def post(self, action: Callable[[], None]) -> None:
        """Have the engine's thread run ``action`` when it next reads events; from any thread."""
        from vllm.v1.engine import EngineCoreRequestType

        self.core.input_queue.put_nowait((EngineCoreRequestType.ADD, action))

    def run(self) -> dict[str, Result]:
        """Run until no request is left and no event waits."""
        results: dict[str, Result] = {}
        while not self.core.input_queue.empty():
            self._handle(*self.core.input_queue.get_nowait())
        while self._llm.llm_engine.has_unfinished_requests() or self.stack:
            self._step(results)
        self._arrived_s.clear()
        self._first_s.clear()
        return results

    def use(self, checked: bool = True, **bounds: int) -> int:
        """Set other bounds of tasks, which are not batched; returns the number of checks. Nothing
        may be live. Not ``checked``: a task that receives the stop signal continues to its end."""
        model = self.executor.driver_worker.worker.model_runner.get_model()
        self._checks.remove()
        self.executor.checks = self._checks.install(model) if checked else 1
        self.scheduler.turns = self.turns = Turns(self.executor.checks)
        self.scheduler.bounds = replace(BOUNDS, batch_tokens=0, **bounds)
        return int(self.executor.checks)

    @property
    def stack(self) -> tuple[Any, ...]:
        """Tasks in flight, as the engine sees them."""
        loop = self.core.__dict__.get("_preemption")
        return () if loop is None else tuple(loop._stack)

    @property
    def stats(self) -> Any:
        """Counts of its preemptions."""
        return self.core._preemption.stats

    def _handle(self, kind: Any, action: Callable[[], None]) -> None:
        """Replaces a core's handling of a client's requests."""
        from vllm.v1.engine import EngineCoreRequestType

        if kind == EngineCoreRequestType.ADD:
            action()


def moment(
    engine: PreemptiveEngine | StockEngine, long: Work, short: Work, after_s: float
) -> dict[str, Result]:
    """Let ``short`` arrive ``after_s`` after ``long``."""

    def arrive() -> None:
        arrived_s = time.monotonic()
        engine.post(lambda: engine.add(short, arrived_s))

    engine.reset()
    engine.add(long)
    arrival = threading.Timer(after_s, arrive)
    arrival.start()
    results = engine.run()
    arrival.join()
    if short.name not in results:  # the long one ended before it arrived
        results |= engine.run()
    return results


def alone(engine: PreemptiveEngine | StockEngine, work: Work) -> tuple[Result, float]:
    """``work`` alone, and its whole duration, seconds."""
    engine.reset()
    engine.add(work)
    began_s = time.perf_counter()
    result = engine.run()[work.name]
    return result, time.perf_counter() - began_s


def _several(run: Callable[[Work], tuple[Result, float]], work: Work) -> Result:
    """The result of ``work`` alone, with the median TTFT of some runs; the first one warms up."""
    run(work)
    results = [run(work)[0] for _ in range(_ALONE)]
    return results[0]._replace(ttft_s=median(each.ttft_s for each in results))


class Bench:
    """Runs on one engine with preemption, and on a :class:`StockEngine` in another process."""

    def __init__(
        self, engine: PreemptiveEngine, stock: EngineProcess, long: int, short: int, seed: int = 0
    ) -> None:
        self._engine = engine
        self._stock = stock
        self._chance = random.Random(seed)
        self._long = Work("long", random_prompt(self._chance, long), 1, ttft_s=1000.0)
        self._short = Work("short", random_prompt(self._chance, short), 1, ttft_s=100.0)
        self._use("operator")
        both = partial(alone, engine), partial(stock.call, alone)
        self._alone = [
            {work.name: _several(run, work) for work in (self._long, self._short)} for run in both
        ]

    def all(self, repeats: int, pairs: int) -> Json:
        """Rows, times alone and overheads, as plain data."""
        alone_ms = [
            {name: round(1e3 * result.ttft_s, 2) for name, result in results.items()}
            for results in self._alone
        ]
        return {"rows": self.rows(repeats), "alone_ms": alone_ms, "overhead": self.overheads(pairs)}

    def rows(self, repeats: int) -> list[Json]:
        """One row for each way; see :meth:`_row`."""
        long, short, chance = self._long, self._short, self._chance
        longest_s = self._alone[0][long.name].ttft_s
        moments = [chance.uniform(0.05, 0.8) * longest_s for _ in range(repeats)]
        ways = (*WAYS, *STOCK)
        runs: dict[str, list[dict[str, Result]]] = {way: [] for way in ways}
        blocked_s: dict[str, list[float]] = {way: [] for way in ways}
        for after_s in moments:
            for way in ways:
                if way in STOCK:
                    self._stock.call(StockEngine.use, *STOCK[way])
                    runs[way].append(self._stock.call(moment, long, short, after_s))
                else:
                    self._use(way)
                    runs[way].append(moment(self._engine, long, short, after_s))
                    blocked_s[way] += self._engine.turns.took_s
        rows = [self._row(way, runs[way], blocked_s[way]) for way in ways]
        return [{**row, "short_ratio": round(row["short"] / rows[0]["short"], 2)} for row in rows]

    def _row(self, way: str, runs: list[dict[str, Result]], blocked_s: list[float]) -> Json:
        """All arrivals under one way. Times are milliseconds: ``blocked`` from the signal to the
        stop; ``waited`` how much longer the short request's TTFT was than alone; ``short`` and
        ``long`` the TTFT. ``same``: share of runs with the tokens of runs alone on that engine."""
        expected = self._alone[way in STOCK]
        short_s = [run["short"].ttft_s for run in runs]
        same = [
            all(run[name].tokens == result.tokens for name, result in expected.items())
            for run in runs
        ]
        return {
            "way": way,
            "stops": len(blocked_s),
            "blocked": round(1e3 * median(blocked_s), 2) if blocked_s else None,
            "blocked_most": round(1e3 * max(blocked_s), 2) if blocked_s else None,
            "waited": round(1e3 * (median(short_s) - expected["short"].ttft_s), 2),
            "short": round(1e3 * median(short_s), 2),
            "long": round(1e3 * median(run["long"].ttft_s for run in runs), 2),
            "same": mean(same),
        }

    def overheads(self, pairs: int) -> dict[str, Json]:
        """Costs without preemption: of the checks alone, by the processor time of a prefill with
        and without them; of the engine, by the time of a prefill or decode request on it and on
        the stock engine."""
        prefill = self._long._replace(prompt=self._long.prompt[:_OVERHEAD_TOKENS])
        decode = self._short._replace(output=_DECODED)
        engine = self._engine
        self._stock.call(StockEngine.use, max(2048, len(self._long.prompt)))

        def checked_s(way: str) -> float:
            self._use(way)
            began_s = time.process_time()
            engine.alone(prefill)
            return time.process_time() - began_s

        def ours_s(work: Work) -> float:
            return alone(engine, work)[1]

        def stock_s(work: Work) -> float:
            seconds: float = self._stock.call(alone, work)[1]
            return seconds

        checks = spread(pairs, partial(checked_s, "operator"), partial(checked_s, "none"))
        self._use("operator")
        return {
            "checks": checks,
            "prefill": spread(pairs, partial(ours_s, prefill), partial(stock_s, prefill)),
            "decode": spread(pairs, partial(ours_s, decode), partial(stock_s, decode)),
        }

    def _use(self, way: str) -> None:
        checked, chunk = WAYS[way]
        self._engine.use(checked, chunk_tokens=chunk)


def spread(pairs: int, one_s: Callable[[], float], other_s: Callable[[], float]) -> Json:
    """Ratios, less 1, of the time of ``one_s`` to that of ``other_s``, each first in every second
    pair: their median, its interval of at least 95 % confidence, whatever the distribution, by the
    sign test, and the medians of both times, milliseconds."""
    one_s(), other_s()
    times_s: list[tuple[float, float]] = []
    for pair in range(pairs):
        one, other = (other_s, one_s) if pair % 2 else (one_s, other_s)
        first, second = one(), other()
        times_s.append((second, first) if pair % 2 else (first, second))
    ratios = sorted(one / other - 1 for one, other in times_s)
    outside, tail = 0, 0.5**pairs
    while 2 * (tail + comb(pairs, outside + 1) * 0.5**pairs) <= 0.05:
        outside += 1
        tail += comb(pairs, outside) * 0.5**pairs
    one_ms, other_ms = (round(1e3 * median(each_s), 3) for each_s in zip(*times_s, strict=True))
    return {
        "pairs": pairs,
        "median": round(median(ratios), 5),
        "interval": [round(ratios[outside], 5), round(ratios[-1 - outside], 5)],
        "one_ms": one_ms,
        "other_ms": other_ms,
    }


if __name__ == "__main__":
    main()
