"""The searches of ``sluice simulate``, and their answers as JSON and tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite, isnan, nan
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from rich.progress import Progress
from rich.table import Table

from sluice.benchmarks.options import in_processes
from sluice.benchmarks.planning import capacity
from sluice.benchmarks.report import METHOD, Estimate, wide_console
from sluice.deploy.tables import print_table
from sluice.scheduling.request.objective import TPOTAnchor
from sluice.simulation.capacity import (
    MAX_REPLICAS,
    Pools,
    least_busy,
    pool_demand,
    search,
    search_pools,
)
from sluice.simulation.config import EngineConfig
from sluice.simulation.metrics import metric_name
from sluice.simulation.workload import Workload

Status = Literal["reached", "not_reachable", "out_of_time"]
Json = dict[str, Any]


class Part(BaseModel):
    """Of a report: strict, and not to be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Range(Part):
    """A mean over seeds and half of its 95 % range; null without a figure, or one seed."""

    mean: float | None
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The range of one value per seed; nan means that a seed lacks the figure."""
        estimate = Estimate.of(values)
        return cls(mean=_known(estimate.mean), half_width=_known(estimate.half_width))

    def shown(self, scale: float, digits: int) -> str:
        """As it stands in a table."""
        mean, half = (nan if v is None else v * scale for v in (self.mean, self.half_width))
        return Estimate(mean, half, 0).shown(digits)


def _known(value: float) -> float | None:
    return None if isnan(value) else value


class Group(Part):
    """A group's size, share that met all objectives, and quantiles of those with a figure."""

    requests: Range
    attainment: Range
    ttft_p50_ms: Range
    ttft_p99_ms: Range
    tpot_p50_ms: Range
    tpot_p99_ms: Range


class CapacityPoint(Group):
    """One count of replicas."""

    replicas: int
    utilisation: Range = Field(description="Share of the replicas' time in steps.")
    failed: Range = Field(description="Requests that ended without all their output.")
    preemptions: Range = Field(description="Times that a request lost its KV.")
    classes: dict[str, Group] = Field(description="By service class.")


class PoolPoint(CapacityPoint):
    """Two pools of replicas, of one role each."""

    prefillers: int
    decoders: int


def _figures_of(runs: Sequence[capacity.Measured]) -> dict[str, Any]:
    """The fields of a point that one run per seed measured."""
    by_class = {name: [run.classes[name] for run in runs] for name in runs[0].classes}
    classes = {name: Group(**_ranges(own)) for name, own in by_class.items()}
    return {"classes": classes, **_ranges([run.whole for run in runs])}


def _ranges(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {figure: Range.of([run[figure] for run in runs]) for figure in runs[0]}


P = TypeVar("P", bound=CapacityPoint)


def _best(points: Sequence[P], answers: Callable[[P], bool]) -> P | None:
    """The point that ``answers``, else the one with the highest attainment, if there is any."""
    found = next(filter(answers, points), None)
    return found or max(points, key=lambda point: point.attainment.mean or 0.0, default=None)


class PoolAnswer(Part):
    """Number of replicas of each role that reach the target, and the search behind it."""

    status: Status
    prefillers: int | None = Field(description="The answer; null if there is none.")
    decoders: int | None
    prefill_per_decode: float = Field(
        description="The ratio of an ideal run, by the formula of SLOs-Serve appendix A."
    )
    points: tuple[PoolPoint, ...] = Field(
        description="All sizes that were tried, by total and then by prefill replicas."
    )

    @property
    def best(self) -> PoolPoint | None:
        """The point of the answer, or else the best one."""
        sizes = self.prefillers, self.decoders
        return _best(self.points, lambda point: (point.prefillers, point.decoders) == sizes)

    def answer(self, colocated: int | None) -> str:
        """The answer in a sentence or two, beside the count of replicas that do both."""
        best = self.best
        if best is None:
            return "The time limit was reached before any sizes of two pools were measured."
        sizes = f"{best.prefillers} prefill and {best.decoders} decode"
        reached = f"{best.attainment.shown(100, 2)} % with {sizes} replicas"
        ideal = f"The ideal ratio of this traffic is {self.prefill_per_decode:.2f} to 1."
        if self.status == "out_of_time":
            return f"The time limit was reached before the sizes of two pools. Best: {reached}."
        if self.status == "not_reachable":
            return f"Disaggregated, it is not reached: at best {reached}. {ideal}"
        more = ""
        if colocated is not None:
            by = best.replicas - colocated
            words = "as many as" if not by else f"{abs(by)} {'more' if by > 0 else 'fewer'} than"
            more = f", {words} co-located"
        return f"Disaggregated, it needs {sizes}, {best.replicas} in all{more}: {reached}. {ideal}"


def _traffic_facts(workload: Workload) -> Json:
    """What arrived; ``rate`` is ``None`` if all came at once."""
    return {
        **{name: getattr(workload, name) for name in ("name", "description", "scaling")},
        "requests": len(workload),
        "rate": workload.rate if isfinite(workload.rate) else None,
        "duration_s": workload.duration_s,
        "mean_prompt_tokens": workload.mean_prompt_tokens,
        "mean_output_tokens": workload.mean_output_tokens,
    }


def _class_facts(classes: Sequence[capacity.SharedClass]) -> tuple[Json, ...]:
    total = sum(each.share for each in classes)
    return tuple(
        {
            "name": slo.service_class,
            "share": share / total,
            **{
                f"{name}_ms": None if time_s is None else 1e3 * time_s
                for name, time_s in zip(("ttft", "tpot", "e2e"), slo.times_s, strict=True)
            },
            "tpot_anchor": slo.tpot_anchor,
            "priority": slo.priority,
        }
        for slo, share in classes
    )


def _fleet_facts(fleet: capacity.PlannedFleet) -> Json:
    return {
        "policy": fleet.policy,
        "policy_options": dict(fleet.policy_options),
        "routing": fleet.routing,
        "routing_options": dict(fleet.routing_options),
        "latency_family": fleet.model.family,
        "latency_coefficients": list(fleet.model.coefficients),
        "engine": fleet.engine.model_dump(mode="json"),
    }


class CapacityReport(Part):
    """The answer, and all that it rests on."""

    status: Status
    replicas: int | None = Field(description="The answer; null if there is none.")
    searched: bool = Field(description="False where one count was asked for.")
    target: float
    max_replicas: int
    tpot_metric: str
    traffic: Json = Field(description="What arrived, by the first seed.")
    classes: tuple[Json, ...] = Field(description="Service classes, with their shares.")
    fleet: Json = Field(description="What a replica is, and the router.")
    seeds: tuple[int, ...]
    points: tuple[CapacityPoint, ...] = Field(description="Every count that was tried, ascending.")
    disaggregated: PoolAnswer | None = Field(
        default=None, description="The same with prefill and decode apart, where that was asked."
    )
    method: str = METHOD

    @property
    def best(self) -> CapacityPoint | None:
        """The point of the answer, or else the best one."""
        return _best(self.points, lambda point: point.replicas == self.replicas)

    @property
    def answers(self) -> bool:
        """Whether the search reached its target."""
        searched = self if self.disaggregated is None else self.disaggregated
        return searched.status == "reached"

    def answer(self) -> str:
        """The answer in a few sentences."""
        words = self._answer()
        if self.disaggregated is None:
            return words
        return f"{words} {self.disaggregated.answer(self.replicas)}"

    def _answer(self) -> str:
        best = self.best
        if best is None:
            return "The time limit was reached before any count of replicas was measured."
        reached = f"{best.attainment.shown(100, 2)} % with {_counted(best.replicas)}"
        if not self.searched:
            kept = "is" if self.status == "reached" else "is not"
            return f"{reached}: the target of {self.target:.2%} {kept} reached."
        if self.status == "reached":
            text = f"The target of {self.target:.2%} needs {_counted(best.replicas)}: {reached}."
            mean, half = best.attainment.mean or 0.0, best.attainment.half_width
            if half is not None and mean - half < self.target:
                text += " The range reaches below the target: take more seeds, or one replica more."
            return text
        if self.status == "out_of_time":
            return f"The time limit was reached before the answer. Best so far: {reached}."
        text = (
            f"The target of {self.target:.2%} is not reached with up to "
            f"{_counted(self.max_replicas)}: at best {reached}."
        )
        if best.failed.mean:
            kv_tokens = EngineConfig.model_validate(self.fleet["engine"]).kv_tokens
            text += (
                f" {best.failed.mean:g} requests failed there, those longer than a replica's KV of "
                f"{kv_tokens} tokens among them."
            )
        return text

    def show(self) -> None:
        """Print the setting, the curve and the classes at the answer."""
        console = wide_console()
        for line in self._setting():
            console.print(line, highlight=False, markup=False)
        if self.points:
            print_table(self._curve(), console)
        if self.disaggregated is not None and self.disaggregated.points:
            print_table(_pools_table(self.disaggregated), console)
        best = self.best
        if best is not None and len(best.classes) > 1:
            print_table(_classes(best), console)
        console.print("docs/simulate.md says what is not modelled.", highlight=False)
        console.print(self.answer(), highlight=False, markup=False, style="bold")

    def _setting(self) -> list[str]:
        traffic, fleet, engine = self.traffic, self.fleet, self.fleet["engine"]
        rate = "all at once" if traffic["rate"] is None else f"{traffic['rate']:.3g} a second"
        classes = "; ".join(_words(each) for each in self.classes)
        model = ", ".join(f"{value:g}" for value in fleet["latency_coefficients"])
        options = "".join(f", {name} {value}" for name, value in fleet["policy_options"].items())
        return [
            f"Traffic: {traffic['description']} Rate: {rate}, {traffic['scaling']}; mean prompt "
            f"{traffic['mean_prompt_tokens']:.0f}, output {traffic['mean_output_tokens']:.0f} "
            "tokens.",
            f"Classes: {classes}. TPOT: {self.tpot_metric}.",
            f"Replica: {fleet['policy']}{options}; latency {fleet['latency_family']} ({model}); KV "
            f"of {engine['kv_blocks']} blocks of {engine['block_tokens']}; at most "
            f"{engine['max_batch_tokens']} tokens and {engine['max_sequences']} sequences. Router: "
            f"{fleet['routing']}.",
            f"Seeds: {', '.join(map(str, self.seeds))}; {self.method}.",
        ]

    def _curve(self) -> Table:
        table = Table("replicas", *_FIGURES, title="Attainment over replicas")
        for point in self.points:
            style = "bold" if point.replicas == self.replicas else None
            table.add_row(str(point.replicas), *_figures(point), style=style)
        return table


def _heading(figure: str) -> str:
    kind, percentile, _ = figure.split("_")
    return f"{kind.upper()} {percentile}, ms"


_FIGURES = (
    "attained, %",
    *map(_heading, capacity.LATENCIES),
    "utilisation, %",
    "failed",
    "preemptions",
)


def _figures(point: CapacityPoint) -> list[str]:
    return [
        point.attainment.shown(100, 2),
        *(getattr(point, figure).shown(1, 0) for figure in capacity.LATENCIES),
        point.utilisation.shown(100, 0),
        point.failed.shown(1, 0),
        point.preemptions.shown(1, 0),
    ]


def _pools_table(answer: PoolAnswer) -> Table:
    table = Table("prefill", "decode", *_FIGURES, title="Prefill and decode apart")
    for point in answer.points:
        sizes = (str(point.prefillers), str(point.decoders))
        style = "bold" if point is answer.best and answer.status == "reached" else None
        table.add_row(*sizes, *_figures(point), style=style)
    return table


def _counted(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def _classes(point: CapacityPoint) -> Table:
    title = f"Classes with {point.replicas} replicas"
    table = Table(
        "class", "requests", "attained, %", *map(_heading, capacity.LATENCIES), title=title
    )
    for name, group in point.classes.items():
        figures = (getattr(group, figure).shown(1, 0) for figure in capacity.LATENCIES)
        table.add_row(name, group.requests.shown(1, 0), group.attainment.shown(100, 2), *figures)
    return table


def _words(each: Json) -> str:
    objectives = [
        f"{name.upper()} {each[f'{name}_ms']:g} ms"
        for name in ("ttft", "tpot", "e2e")
        if each[f"{name}_ms"] is not None
    ]
    if each["tpot_ms"] is not None and each["tpot_anchor"] != TPOTAnchor.MEAN:
        objectives.append(f"TPOT by {each['tpot_anchor']}")
    stated = ", ".join(objectives) or "no objective"
    return f"{each['name']} {each['share']:.0%} ({stated}, priority {each['priority']})"


class Question(NamedTuple):
    """The count of replicas up to ``most`` at which ``target`` attain, or what ``only`` this count
    attains."""

    traffic: capacity.Traffic
    fleet: capacity.PlannedFleet
    target: float
    most: int
    only: int | None
    disaggregated: bool
    seeds: tuple[int, ...]
    time_limit_s: float
    jobs: int


def answered(question: Question, progress: Progress) -> CapacityReport:
    """Search for the answer, showing each size. Raises :class:`TraceError`, :class:`ValueError`,
    :class:`StuckError` and :class:`BrokenProcessPool`."""
    workload = question.traffic.workload(question.seeds[0])
    stop_at_s = time.monotonic() + question.time_limit_s
    runs = len(question.seeds) * question.traffic.parts
    with in_processes(capacity.play, min(question.jobs, runs)) as play_all:
        trial = partial(_trial, question, progress, play_all, stop_at_s)
        status, found, points = _colocated(question, workload, trial)
        pools = _pools(question, workload, trial) if question.disaggregated else None
    return CapacityReport(
        status=status,
        replicas=found,
        searched=question.only is None,
        target=question.target,
        max_replicas=question.most,
        tpot_metric=metric_name(None, [each.slo for each in question.traffic.classes]),
        traffic=_traffic_facts(workload),
        classes=_class_facts(question.traffic.classes),
        fleet=_fleet_facts(question.fleet),
        seeds=question.seeds,
        points=points,
        disaggregated=pools,
    )


Trial = Callable[[Mapping[str, int], str], list[capacity.Measured]]


def _trial(
    question: Question,
    progress: Progress,
    play_all: Callable[[Sequence[capacity.Run]], Iterator[capacity.Judged]],
    stop_at_s: float,
    sizes: Mapping[str, int],
    words: str,
) -> list[capacity.Measured]:
    traffic, parts = question.traffic, range(question.traffic.parts)
    runs = [
        capacity.Run(traffic, question.fleet, sizes, seed, part, stop_at_s)
        for seed in question.seeds
        for part in parts
    ]
    task = progress.add_task(words, total=len(runs))
    played = play_all(runs)
    done: list[capacity.Measured] = []
    for _ in question.seeds:
        own = []
        for _ in parts:
            own.append(next(played))
            progress.advance(task)
        done.append(capacity.Measured.of(own, traffic.classes))
    shown = Range.of([each.whole["attainment"] for each in done]).shown(100, 2)
    progress.update(task, description=f"{words}: {shown} %")
    return done


def _colocated(
    question: Question, workload: Workload, trial: Trial
) -> tuple[Status, int | None, tuple[CapacityPoint, ...]]:
    points: dict[int, CapacityPoint] = {}
    found: int | None = None
    status: Status = "out_of_time"

    def attainment(replicas: int) -> float:
        done = trial({"replicas": replicas}, f"{replicas} replicas")
        points[replicas] = CapacityPoint(replicas=replicas, **_figures_of(done))
        return _mean(points[replicas])

    try:
        if question.only is not None:
            found = question.only if attainment(question.only) >= question.target else None
        else:
            start = least_busy(workload, question.fleet.model)
            found = search(attainment, question.target, start, question.most).replicas
        status = _reached(found)
        more = 0 if question.only is not None or found is None else found + 1
        if 0 < more <= question.most and more not in points:
            attainment(more)  # What one replica more would give.
    except capacity.OutOfTimeError:
        pass
    return status, found, tuple(points[count] for count in sorted(points))


def _pools(question: Question, workload: Workload, trial: Trial) -> PoolAnswer:
    points: dict[Pools, PoolPoint] = {}
    found: Pools | None = None
    status: Status = "out_of_time"
    demand = pool_demand(workload, question.fleet.model, question.fleet.engine)

    def attainment(pools: Pools) -> float:
        prefillers, decoders = pools
        sizes = {"replicas": 0, "prefillers": prefillers, "decoders": decoders}
        done = trial(sizes, f"{prefillers} prefill, {decoders} decode")
        points[pools] = PoolPoint(
            replicas=sum(pools), prefillers=prefillers, decoders=decoders, **_figures_of(done)
        )
        return _mean(points[pools])

    try:
        start = sum(demand.least(min(workload.rate, MAX_REPLICAS / min(demand))))
        found = search_pools(attainment, question.target, demand, start, question.most).pools
        status = _reached(found)
    except capacity.OutOfTimeError:
        pass
    prefillers, decoders = found or (None, None)
    return PoolAnswer(
        status=status,
        prefillers=prefillers,
        decoders=decoders,
        prefill_per_decode=demand.ratio,
        points=tuple(points[pools] for pools in sorted(points, key=lambda p: (sum(p), p[0]))),
    )


def _reached(found: int | Pools | None) -> Status:
    return "reached" if found is not None else "not_reachable"


def _mean(point: CapacityPoint) -> float:
    assert point.attainment.mean is not None  # A workload has requests.
    return point.attainment.mean
