"""How many replicas a service needs, of one role or of two, and the load that one serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, inf, sqrt
from typing import NamedTuple

import numpy as np

from sluice.scheduling.autoscaling.role_shares import PoolDemand, demand_of_work
from sluice.scheduling.latency.model import LatencyModel
from sluice.simulation.config import EngineConfig
from sluice.simulation.workload import Arrival, Workload

MAX_REPLICAS = 4096
"""Most replicas of a simulated cluster, see :class:`~sluice.simulation.config.ClusterConfig`."""

_MAX_FIXED = 0.9
"""Share of the TPOT that steps without tokens may take, as far as the formula goes."""

_MAX_OF_TPOT = 0.7
"""The same in :func:`full_rate`."""

_ONE_LESS = ((-1, 0), (0, -1), (1, -2), (-2, 1))
_AS_MANY = ((1, -1), (-1, 1))
"""Steps from pools to their neighbours."""


class Search(NamedTuple):
    """The least count that reaches the target, or ``None``, and every attainment tried."""

    replicas: int | None
    attainment: dict[int, float]


def search(attainment: Callable[[int], float], target: float, start: int, most: int) -> Search:
    """The smallest count of replicas whose attainment reaches ``target``, by galloping from
    ``start`` and bisection: ``O(log(start + answer))`` trials.

    Attainment is taken to grow with the count; nan is below any target. Raises
    :class:`ValueError`."""
    if not 0 < target <= 1:
        raise ValueError(f"target must be above 0 and at most 1, got {target}")
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    tried: dict[int, float] = {}

    def holds(count: int) -> bool:
        tried[count] = attainment(count)
        return tried[count] >= target

    start = min(max(start, 1), most)
    if holds(start):
        low, high = _below(holds, start, max(start // 8, 1))
    else:
        low, high = _above(holds, start, max(start // 8, 1), most)
    if high > most:
        return Search(None, tried)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return Search(high, tried)


def _below(holds: Callable[[int], bool], high: int, step: int) -> tuple[int, int]:
    """A count that does not hold (0 if every one does), and one above it that does."""
    while high > 1:
        count = max(high - step, 1)
        if not holds(count):
            return count, high
        high, step = count, 2 * step
    return 0, high


def _above(holds: Callable[[int], bool], low: int, step: int, most: int) -> tuple[int, int]:
    """A count that does not hold, and one above it that does (``most + 1`` if none does)."""
    while low < most:
        count = min(low + step, most)
        if holds(count):
            return low, count
        low, step = count, 2 * step
    return low, most + 1


def least_busy(workload: Workload, model: LatencyModel) -> int:
    """A start for :func:`search`, 1 to :data:`MAX_REPLICAS`: engines that the work keeps busy,
    without fixed parts and cached prefixes."""
    between_s = workload.duration_s - (workload.arrivals[0].arrival_s if len(workload) else 0.0)
    if between_s <= 0:
        return 1
    work_s = sum(sum(_work_s(arrival, model)) for arrival in workload.arrivals)
    return min(max(ceil(work_s / between_s), 1), MAX_REPLICAS)


def _work_s(arrival: Arrival, model: LatencyModel) -> tuple[float, float]:
    """Time of a request's prompt, and of later output tokens and prompts of stages."""
    prompt_s = model.work_s(arrival.prompt_tokens, 0)
    later, context = 0.0, arrival.prompt_tokens
    for stage in arrival.stages:
        if stage.prompt_tokens:
            later += model.work_s(stage.prompt_tokens, context)
        context += stage.prompt_tokens
    # Decodes cost a line over the context, so their mean is that of the middle one.
    middle = context + arrival.output_tokens // 2
    return prompt_s, later + (arrival.output_tokens - 1) * model.work_s(1, middle)


def full_rate(workload: Workload, model: LatencyModel, engine: EngineConfig) -> float:
    """Requests per second that fill an engine's time at the tightest TPOT, or its KV."""
    work_s, held_tokens = 0.0, 0.0
    for arrival in workload.arrivals:
        prompts = [arrival.prompt_tokens, *(stage.prompt_tokens for stage in arrival.stages)]
        output, context = arrival.output_tokens, 0
        for prompt in prompts:
            work_s += model.work_s(prompt, context) if prompt else 0.0
            context += prompt
        middle = context + output // 2
        work_s += output * model.work_s(1, middle)
        held_tokens += output * middle
    work_s, held_tokens = work_s / len(workload), held_tokens / len(workload)
    tpot_s = workload.tightest_tpot_s
    if tpot_s == inf:
        return 1 / work_s
    busy = (1 - min(model.fixed_s / tpot_s, _MAX_OF_TPOT)) / work_s
    return min(busy, engine.kv_tokens / (held_tokens * tpot_s))


def greatest_loads(
    attainment: Callable[[float], float],
    shares: Sequence[float],
    least: float,
    most: float,
    steps: int,
) -> dict[float, float]:
    """By share in (0, 1]: the greatest load from ``least`` to ``most`` at which it attains, else 0,
    by ``steps`` bisections of the logarithm and a line of the log odds at the end."""
    at = cache(attainment)

    def found(share: float) -> float:
        low, high = least, most
        for _ in range(steps):
            middle = sqrt(low * high)
            low, high = (middle, high) if at(middle) >= share else (low, middle)
        if at(low) < share:
            return 0.0
        if at(high) >= share:
            return high
        odds = np.clip((at(low), share, at(high)), 0.002, 0.998)
        below, wanted, above = np.log(odds / (1 - odds))
        return low * float((high / low) ** ((below - wanted) / max(below - above, 1e-9)))

    return {share: found(share) for share in shares}


def pool_demand(workload: Workload, model: LatencyModel, engine: EngineConfig) -> PoolDemand:
    """A workload's demand on each role per request and second (SLOs-Serve's formula), at the
    smallest TPOT. Decode replicas also compute prompts of later stages. Raises
    :class:`ValueError`."""
    if not len(workload):
        raise ValueError(f"workload {workload.name} has no request to measure")
    prefill_s = decode_s = tokens = held_tokens = 0.0
    for arrival in workload.arrivals:
        prompt_s, later_s = _work_s(arrival, model)
        prefill_s += prompt_s
        decode_s += later_s + model.work_s(1, arrival.prompt_tokens)
        tokens += arrival.output_tokens
        held_tokens += arrival.output_tokens * (arrival.prompt_tokens + arrival.output_tokens / 2)
    tpot_s = workload.tightest_tpot_s
    # Where steps are too slow for the TPOT, nothing attains with any number of replicas.
    fixed_s = min(model.fixed_s, _MAX_FIXED * tpot_s)
    count = len(workload)
    return demand_of_work(
        prefill_s / count,
        tokens / count,
        decode_s / tokens,
        tpot_s,
        fixed_s,
        min(engine.max_sequences, engine.kv_tokens * tokens / held_tokens),
    )


Pools = tuple[int, int]
"""Numbers of prefill and of decode replicas."""


class PoolSearch(NamedTuple):
    """The found sizes of two pools, or ``None``, and every attainment tried."""

    pools: Pools | None
    attainment: dict[Pools, float]


def search_pools(
    attainment: Callable[[Pools], float], target: float, demand: PoolDemand, start: int, most: int
) -> PoolSearch:
    """The fewest prefill and decode replicas together that reach ``target``: :func:`search` over
    totals split by the formula, then, as that knows neither bursts nor TTFT, neighbours with a
    replica less. Raises :class:`ValueError`."""
    if most < 2:
        raise ValueError(f"most must be at least 2, one replica of each role, got {most}")
    tried: dict[Pools, float] = {}

    def reached(pools: Pools) -> float:
        if pools not in tried:
            tried[pools] = attainment(pools)
        return tried[pools]

    def beside(pools: Pools, steps: tuple[Pools, ...]) -> list[Pools]:
        moved = [(pools[0] + step[0], pools[1] + step[1]) for step in steps]
        return [own for own in moved if min(own) >= 1]

    # One replica of each role is the least, so totals are counted from 2 on.
    totals = search(lambda less: reached(demand.split(less + 1)), target, start - 1, most - 1)
    if totals.replicas is None:
        return PoolSearch(None, tried)
    found = demand.split(totals.replicas + 1)
    while True:
        fewer = next((own for own in beside(found, _ONE_LESS) if reached(own) >= target), None)
        if fewer is None:
            break
        found = fewer
    equal = [found, *beside(found, _AS_MANY)]
    return PoolSearch(max((p for p in equal if reached(p) >= target), key=reached), tried)
