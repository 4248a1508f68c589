"""The measurements of :mod:`sluice.benchmarks.preemption_gpu` that run in the engine's process."""

from __future__ import annotations

import platform
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import psutil

from sluice.benchmarks.one_engine import Result, Work
from sluice.benchmarks.preemption import alone, moment
from sluice.benchmarks.preemption_engine import PreemptiveEngine
from sluice.benchmarks.preemption_trials import WHOLE, random_prompt
from sluice.benchmarks.stock_engine import StockEngine
from sluice.replica.preemption.checks import Granularity
from sluice.replica.preemption.pacing import Pacer
from sluice.scheduling.fit import fit
from sluice.scheduling.latency import LatencyModel, StepSample

UNPACED = 1 << 12
"""More checks than any model has: launches run ahead as far as they can."""

DEPTH = 3

_LATE = 4000.0
_PROMPT_SHARES = (0.02, 0.06, 0.12, 0.25, 0.5, 1.0)
_SWEEPS = 3
_MIB = 1 << 20

_Requests = Sequence[tuple[float, Work]]
"""When each arrives, seconds from the start."""


class Way(NamedTuple):
    """A way to stop a prefill.

    Attributes:
        name: in the table.
        granularity: where its checks are; None: it stops only between chunks.
        chunk: max tokens of a task.
        ahead: max checks by which launches run ahead of the device.
    """

    name: str
    granularity: Granularity | None = "operator"
    chunk: int = WHOLE
    ahead: int = 2


@dataclass(frozen=True, slots=True)
class Blocking:
    """One way, over all arrivals. Times are milliseconds.

    Attributes:
        way: its name.
        tokens_s: of the long prompt alone, per second.
        cost: its time over that without checks, less 1; median of rounds.
        stops: how often it stopped.
        stop, stop_most: from the signal until the device stopped, mean and max; None without stops.
        short, long: TTFT, means; None without preemption.
    """

    way: str
    tokens_s: float
    cost: float
    stops: int = 0
    stop: float | None = None
    stop_most: float | None = None
    short: float | None = None
    long: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Memory while prefills are suspended, or about to be. MiB.

    Attributes:
        prefills: how many, each of as many tokens as a task can have.
        held: additional to the memory in use without any.
        reserved: for their activations.
    """

    prefills: int
    held: float
    reserved: float


def make(
    model: Path, directory: Path, options: dict[str, Any], args: dict[str, Any]
) -> PreemptiveEngine:
    """An engine whose prefills can be suspended."""
    return PreemptiveEngine(model, directory, options, **args)


def device_name(engine: PreemptiveEngine) -> str:
    """The device on which it computes."""
    import torch

    device = _device(engine)
    if device.type == "cpu":
        return f"CPU ({platform.machine()})"
    return str(torch.cuda.get_device_name(device))


def learn(engine: PreemptiveEngine, most: int, seed: int) -> LatencyModel:
    """Have the engine plan with a latency model that was measured now.

    Args:
        engine: nothing may be live.
        most: max tokens of a step.
        seed: of the prompts.
    """
    chance = random.Random(seed)
    engine.use("operator", chunk=WHOLE, most=most)
    engine.table.clear_samples()
    for _ in range(_SWEEPS):
        for share in _PROMPT_SHARES:
            tokens = max(2, round(share * most) - 4)
            engine.alone(Work("sweep", random_prompt(chance, tokens), 4, _LATE))
    model, _ = fit(engine.table.samples())
    engine.table.set_model(model)
    return model


def blocking(
    engine: PreemptiveEngine, ways: Sequence[Way], tokens: tuple[int, int], rounds: int, seed: int
) -> list[Blocking]:
    """Each of ``ways`` in turn in each round: a long prompt alone, and one during which a short one
    arrives at a random moment, the same for all. The last of ``ways`` has no checks.

    Args:
        engine: nothing may be live.
        ways: to compare.
        tokens: of the long and of the short prompt.
        rounds: how many.
        seed: of the prompts and the moments.
    """
    chance = random.Random(seed)
    long = Work("long", random_prompt(chance, tokens[0]), 1, _LATE)
    short = Work("short", random_prompt(chance, tokens[1]), 1, _LATE / 2)
    alone_s: dict[Way, list[float]] = {way: [] for way in ways}
    results: dict[Way, list[dict[str, Result]]] = {way: [] for way in ways}
    stops_s: dict[Way, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        share = chance.uniform(0.05, 0.9)
        for way in ways:
            engine.pace(way.ahead)
            engine.use(way.granularity, chunk=way.chunk, most=tokens[0])
            _, seconds = alone(engine, long)
            engine.stats.latest_stop_s.clear()
            result = moment(engine, long, short, share * seconds)
            if turn:  # the first one warms up
                alone_s[way].append(seconds)
                results[way].append(result)
                stops_s[way] += engine.stats.latest_stop_s
    unchecked_s = alone_s[ways[-1]]
    return [
        Blocking(
            way.name,
            round(tokens[0] / median(alone_s[way])),
            round(median(a / b for a, b in zip(alone_s[way], unchecked_s, strict=True)) - 1, 5),
            len(stops_s[way]),
            _ms(mean(stops_s[way])) if stops_s[way] else None,
            _ms(max(stops_s[way])) if stops_s[way] else None,
            _ms(mean(each["short"].ttft_s for each in results[way])),
            _ms(mean(each["long"].ttft_s for each in results[way])),
        )
        for way in ways
    ]


def stock_alone(
    engine: StockEngine, tokens: int, rounds: int, seed: int, unchecked: Blocking
) -> Blocking:
    """The long prompt alone on stock vLLM, compiled where the device compiles. ``unchecked`` is the
    way without checks, which runs the model uncompiled."""
    long = Work("long", random_prompt(random.Random(seed), tokens), 1, _LATE)
    engine.use(tokens)
    alone(engine, long)
    tokens_s = tokens / median(alone(engine, long)[1] for _ in range(rounds))
    cost = unchecked.tokens_s / tokens_s - 1
    return Blocking("stock vLLM", round(tokens_s), round(cost, 5))


class _Meter:
    """A pacer that records the memory in use at each check."""

    def __init__(self, pacer: Pacer, used: Callable[[], int]) -> None:
        self.ahead = pacer.ahead
        self.start, self.stop = pacer.start, pacer.stop
        self._pacer = pacer
        self._used = used
        self.seen: list[int] = []

    def pace(self) -> None:
        """Record the memory, and wait as the pacer does."""
        self._pacer.pace()
        self.seen.append(self._used())


def memory(engine: PreemptiveEngine, tokens: int, seed: int) -> list[Held]:
    """Suspend prefills one inside the other, each at the check where it holds most."""
    chance = random.Random(seed)
    used = partial(_used, _device(engine))
    works = [
        Work(f"w{depth}", random_prompt(chance, tokens), 1, _LATE / 2**depth)
        for depth in range(DEPTH + 1)
    ]
    engine.use("operator", chunk=WHOLE, most=tokens)
    engine.alone(works[0])
    idle = used()
    meter = _Meter(engine.pacer, used)
    engine.pacer = meter
    engine.alone(works[0])
    engine.pacer = meter._pacer
    worst = max(range(len(meter.seen)), key=meter.seen.__getitem__) + 1
    found: list[int] = []

    def next_comes() -> None:
        found.append(used() - idle)
        engine.add(works[len(found)])

    engine.reset()
    engine.at_checks({worst * depth: next_comes for depth in range(1, DEPTH + 1)})
    engine.add(works[0])
    engine.run()
    reserved = engine.executor.reserve.prefill
    return [
        Held(depth, round(held / _MIB, 1), round(depth * reserved / _MIB, 1))
        for depth, held in enumerate(found, start=1)
    ]


def serve(engine: PreemptiveEngine | StockEngine, requests: _Requests) -> list[float]:
    """Time to the first token of each of ``requests``, seconds, in their order."""
    engine.reset()
    arrived = threading.Event()

    def arrive(work: Work) -> None:
        arrived_s = time.monotonic()
        engine.post(lambda: engine.add(work, arrived_s))
        arrived.set()

    def clients() -> None:
        start_s = time.monotonic()
        for at_s, work in requests:
            time.sleep(max(0.0, start_s + at_s - time.monotonic()))
            arrive(work)

    thread = threading.Thread(target=clients)
    thread.start()
    results: dict[str, Result] = {}
    while len(results) < len(requests):
        arrived.wait()
        arrived.clear()
        results |= engine.run()
    thread.join()
    return [results[work.name].ttft_s for _, work in requests]


def serve_preempting(
    engine: PreemptiveEngine, way: Way, most: int, together: int, requests: _Requests
) -> list[float]:
    """:func:`serve` with prefills that stop in this way."""
    engine.pace(way.ahead)
    engine.use(way.granularity, chunk=way.chunk, most=most, together=together)
    return serve(engine, requests)


def serve_stock(engine: StockEngine, most: int, threshold: int, requests: _Requests) -> list[float]:
    """:func:`serve` by stock vLLM with priorities, and a threshold of long prefills."""
    engine.use(most, threshold)
    return serve(engine, requests)


def prefill_s(model: LatencyModel, tokens: int, most: int) -> float:
    """Predicted time of a prompt alone, in steps of at most ``most`` tokens."""
    return sum(
        model.step_s(StepSample.of([(min(most, tokens - done), done)]))
        for done in range(0, tokens, most)
    )


def _device(engine: PreemptiveEngine) -> Any:
    return engine.executor.driver_worker.worker.device


def _used(device: Any) -> int:
    """Bytes in use: by tensors on a GPU, or by this process."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    import torch

    return int(torch.cuda.memory_allocated(device))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
