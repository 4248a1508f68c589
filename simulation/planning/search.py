"""The searches of ``sluice simulate``: how many replicas, and how many of each role."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from rich.progress import Progress

from sluice.simulation.capacity import (
    MOST_REPLICAS,
    Pools,
    least_busy,
    pool_demand,
    search,
    search_pools,
)
from sluice.simulation.metrics import TPOTMetric, metric_name
from sluice.simulation.parallel import in_processes
from sluice.simulation.planning.capacity import (
    Judged,
    Measured,
    OutOfTimeError,
    PlannedFleet,
    Run,
    Sizes,
    play,
)
from sluice.simulation.planning.points import CapacityPoint, PoolAnswer, PoolPoint, Range, Status
from sluice.simulation.planning.report import CapacityReport, ClassFacts, FleetFacts, TrafficFacts
from sluice.simulation.planning.traffic import Traffic
from sluice.simulation.workload import Workload


class Question(NamedTuple):
    """What is asked.

    Attributes:
        traffic, fleet: the requests, and the replicas that serve them.
        metric: which TPOT is judged; ``None``: by the anchor of each class.
        target: attainment that is wanted, a share.
        most: largest count of replicas that may be tried.
        only: the only count to try, without a search; ``None``: search.
        disaggregated: whether prefill and decode are to be sized apart, too.
        seeds: each count is simulated once for each.
        time_limit_s: of the whole search.
        jobs: processes.
    """

    traffic: Traffic
    fleet: PlannedFleet
    metric: TPOTMetric | None
    target: float
    most: int
    only: int | None
    disaggregated: bool
    seeds: tuple[int, ...]
    time_limit_s: float
    jobs: int


def answered(question: Question, progress: Progress) -> CapacityReport:
    """Search for the answer, showing each size as it is tried.

    Raises:
        TraceError, ValueError, StuckError: the trace cannot be read or run.
        BrokenProcessPool: a process was killed.
    """
    workload = question.traffic.workload(question.seeds[0])
    stop_at_s = time.monotonic() + question.time_limit_s
    runs = len(question.seeds) * question.traffic.parts
    with in_processes(play, min(question.jobs, runs)) as play_all:
        trial = partial(_trial, question, progress, play_all, stop_at_s)
        status, found, points = _colocated(question, workload, trial)
        pools = _pools(question, workload, trial) if question.disaggregated else None
    total = sum(each.share for each in question.traffic.classes)
    return CapacityReport(
        status=status,
        replicas=found,
        searched=question.only is None,
        target=question.target,
        max_replicas=question.most,
        tpot_metric=metric_name(question.metric, [each.slo for each in question.traffic.classes]),
        traffic=TrafficFacts.of(workload),
        classes=tuple(ClassFacts.of(each, total) for each in question.traffic.classes),
        fleet=FleetFacts.of(question.fleet),
        seeds=question.seeds,
        points=points,
        disaggregated=pools,
    )


Trial = Callable[[Sizes, str], list[Measured]]


def _trial(
    question: Question,
    progress: Progress,
    play_all: Callable[[Sequence[Run]], Iterator[Judged]],
    stop_at_s: float,
    sizes: Sizes,
    words: str,
) -> list[Measured]:
    """Simulate a fleet of these sizes once for each seed and part of the traffic."""
    traffic, parts = question.traffic, range(question.traffic.parts)
    runs = [
        Run(traffic, question.fleet, question.metric, sizes, seed, part, stop_at_s)
        for seed in question.seeds
        for part in parts
    ]
    task = progress.add_task(words, total=len(runs))
    played = play_all(runs)
    done: list[Measured] = []
    for _ in question.seeds:
        own = []
        for _ in parts:
            own.append(next(played))
            progress.advance(task)
        done.append(Measured.of(own, traffic.classes))
    shown = Range.of([each.whole["attainment"] for each in done]).shown(100, 2)
    progress.update(task, description=f"{words}: {shown} %")
    return done


def _colocated(
    question: Question, workload: Workload, trial: Trial
) -> tuple[Status, int | None, tuple[CapacityPoint, ...]]:
    """Search for the count of replicas that do both phases."""
    points: dict[int, CapacityPoint] = {}
    found: int | None = None
    status: Status = "out_of_time"

    def attainment(replicas: int) -> float:
        done = trial(Sizes(replicas), f"{replicas} replicas")
        points[replicas] = CapacityPoint.of(replicas, done)
        return _mean(points[replicas])

    try:
        if question.only is not None:
            found = question.only if attainment(question.only) >= question.target else None
            return _reached(found), found, tuple(points.values())
        start = least_busy(workload, question.fleet.model)
        found = search(attainment, question.target, start, question.most).replicas
        status = _reached(found)
        if found is not None and found < question.most and found + 1 not in points:
            attainment(found + 1)  # What one replica more would give.
    except OutOfTimeError:
        pass
    return status, found, tuple(points[count] for count in sorted(points))


def _pools(question: Question, workload: Workload, trial: Trial) -> PoolAnswer:
    """Search for the sizes of a prefill and a decode pool."""
    points: dict[Pools, PoolPoint] = {}
    found: Pools | None = None
    status: Status = "out_of_time"
    fleet = question.fleet
    demand = pool_demand(workload, fleet.model, fleet.engine)

    def attainment(pools: Pools) -> float:
        done = trial(Sizes(0, *pools), f"{pools[0]} prefill, {pools[1]} decode")
        points[pools] = PoolPoint.of_pools(pools, done)
        return _mean(points[pools])

    try:
        rate = min(workload.rate, MOST_REPLICAS / min(demand))
        start = sum(demand.least(rate))
        found = search_pools(attainment, question.target, demand, start, question.most).pools
        status = _reached(found)
    except OutOfTimeError:
        pass
    return PoolAnswer(
        status=status,
        prefillers=found[0] if found is not None else None,
        decoders=found[1] if found is not None else None,
        prefill_per_decode=demand.ratio,
        points=tuple(points[pools] for pools in sorted(points, key=lambda p: (sum(p), p[0]))),
    )


def _reached(found: int | Pools | None) -> Status:
    return "reached" if found is not None else "not_reachable"


def _mean(point: CapacityPoint) -> float:
    assert point.attainment.mean is not None  # A workload has requests.
    return point.attainment.mean
