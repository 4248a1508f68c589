"""Cost of a local plan, in one process, from views to planned tokens: ``sluice bench planning``."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

import click
import numpy as np

from sluice.benchmarks.experiments.policies import LOCAL
from sluice.benchmarks.live.report import quantiles, table
from sluice.benchmarks.options import as_json, number_option, show
from sluice.scheduling.batching.base import BatchPolicy
from sluice.scheduling.batching.batch import BatchBudget
from sluice.scheduling.batching.deadline_triage import DeadlineTriage
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView

QUEUE_SIZES = (32, 128, 512)
DEFAULT = DeadlineTriage.name
NOW_S = 1_000.0
BLOCK_TOKENS = 16
LATENCY = LinearLatency(a=0.004, b=0.000_02, c=0.000_000_02, d=0.000_000_000_1)
BUDGET = BatchBudget(tokens=8192, sequences=1024, kv_blocks=100_000, block_tokens=BLOCK_TOKENS)


def make_queue(size: int, seed: int, sessions: bool = False) -> QueueView:
    """A queue of ``size`` requests, half of them in decode, the rest waiting or in prefill; each of
    a session of its own, of one of four tenants."""
    rng = random.Random(seed)
    requests = []
    for index in range(size):
        prompt = rng.randint(32, 4096)
        age_s = rng.uniform(0.0, 2.0)
        slo = SLO(
            ttft_s=rng.choice((0.5, 1.0, 5.0)),
            tpot_s=rng.choice((0.03, 0.05, 0.1)),
            priority=rng.randint(1, 3),
        )
        decoding = rng.random() < 0.5
        emitted = rng.randint(1, 400) if decoding else 0
        begun = decoding or rng.random() < 0.2
        computed = prompt + emitted - 1 if decoding else prompt // 2 if begun else 0
        arrival_s = NOW_S - age_s - emitted * 0.04
        requests.append(
            RequestView(
                request_id=f"request-{index}",
                slo=slo,
                arrival_s=arrival_s,
                prompt_tokens=prompt,
                computed_tokens=computed,
                pending_tokens=1 if decoding else prompt - computed,
                emitted_tokens=emitted,
                first_token_s=arrival_s + rng.uniform(0.1, 1.0) if decoding else None,
                kv_blocks=-(-computed // BLOCK_TOKENS),
                running=begun,
                tenant=index % 4,
                program=1 + index if sessions else 0,
            )
        )
    return QueueView(sorted(requests, key=lambda request: request.arrival_s))


def measure(calls: list[Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median and P99, milliseconds of processor time, which others on the core do not change."""
    for call in calls:
        call()
    gc.collect()
    gc.disable()
    try:
        times = []
        for _ in range(repeats):
            for call in calls:
                started = time.thread_time_ns()
                call()
                times.append(time.thread_time_ns() - started)
    finally:
        gc.enable()
    p50_ms, p99_ms = quantiles(np.array(times) / 1e6, digits=4)
    return {"median_ms": p50_ms, "p99_ms": p99_ms}


def _plan(policy: BatchPolicy, requests: Sequence[RequestView], clock: Iterator[int]) -> object:
    """A whole plan, as an engine makes it: from views to planned tokens by request."""
    now_s = NOW_S + 1e-6 * next(clock)  # at the same time no session has had more
    return policy.plan(QueueView(requests), now_s, LATENCY, BUDGET).entries


@click.command(name="planning")
@as_json
@number_option("--repeats", default=40, least=1, most=10_000)
@number_option("--seeds", default=10, least=1, most=1_000)
def planning(as_json: bool, repeats: int, seeds: int) -> None:
    """Time plan() of every batch policy.

    Of the default one also where all requests have sessions. The JSON maps policy -> requests ->
    median_ms and p99_ms.

    \b
    Example:
      sluice bench planning --json
    """
    results: dict[str, dict[str, dict[str, float]]] = {}
    cases = [(name, name, False) for name in LOCAL]
    cases.append((f"{DEFAULT}, sessions", DEFAULT, True))
    for label, name, sessions in cases:
        policy, clock = LOCAL.make(name), count()
        results[label] = {}
        for size in QUEUE_SIZES:
            queues = [make_queue(size, seed, sessions).requests for seed in range(seeds)]
            calls: list[Callable[[], object]] = [partial(_plan, policy, q, clock) for q in queues]
            results[label][str(size)] = measure(calls, repeats)
    rows = [{"policy": name, **sizes} for name, sizes in results.items()]
    columns = [f"{size}.{figure}" for size in QUEUE_SIZES for figure in ("median_ms", "p99_ms")]
    title = "plan(), by number of requests"
    show(results, [table(rows, "policy", *columns, title=title)], as_json)
