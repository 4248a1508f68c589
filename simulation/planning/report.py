"""What ``sluice simulate`` answers, as JSON, as a table and as a plot."""

from __future__ import annotations

from math import isfinite, nan
from pathlib import Path
from typing import Any, Self

from pydantic import Field
from rich.console import Console
from rich.table import Table

from sluice.deploy.tables import print_table
from sluice.scheduling.request.tpot import TPOTAnchor
from sluice.simulation.config import EngineConfig
from sluice.simulation.estimate import METHOD
from sluice.simulation.planning.capacity import LATENCIES, NOISE, PlannedFleet
from sluice.simulation.planning.plots import WIDE, Chart, Point, ReportError, draw
from sluice.simulation.planning.points import CapacityPoint, Group, Part, PoolAnswer, Status
from sluice.simulation.planning.traffic import SharedClass
from sluice.simulation.workload import Workload

NOT_MODELLED = (
    "other traffic than this trace: the ranges are over drawn classes, scaling and step times only",
    "clients that react: requests arrive when they arrived, however slow the answers are",
    "the edge: HTTP, tokenisation and the network beyond the time of a dispatch",
    "failures, starts, stops and updates of replicas, which need spare ones",
    "refusals at the edge and at full replicas: everything is queued",
    "prefixes that prompts share, unless the trace names their blocks",
    "step times beyond what the latency profile holds and "
    f"{NOISE:.0%} of noise: interference, garbage collection, clock changes",
    "speculative decoding, and models of several engines",
)


class TrafficFacts(Part):
    """What arrived, by the first seed."""

    name: str
    description: str
    scaling: str
    requests: int
    rate: float | None = Field(description="Requests per second; null if all come at once.")
    duration_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """The facts of a workload."""
        return cls(
            name=workload.name,
            description=workload.description,
            scaling=workload.scaling,
            requests=len(workload),
            rate=workload.rate if isfinite(workload.rate) else None,
            duration_s=workload.duration_s,
            mean_prompt_tokens=workload.mean_prompt_tokens,
            mean_output_tokens=workload.mean_output_tokens,
        )


class ClassFacts(Part):
    """A service class, and its share of the requests."""

    name: str
    share: float
    ttft_ms: float | None
    tpot_ms: float | None
    tpot_anchor: TPOTAnchor
    e2e_ms: float | None
    priority: int

    @classmethod
    def of(cls, shared: SharedClass, total: float) -> Self:
        """The facts of a class; ``total`` is the sum of all shares."""
        slo = shared.slo
        objectives = {
            name: None if value is None else 1e3 * value
            for name, value in (
                ("ttft_ms", slo.ttft_s),
                ("tpot_ms", slo.tpot_s),
                ("e2e_ms", slo.e2e_s),
            )
        }
        share = shared.share / total
        return cls(
            name=slo.service_class,
            share=share,
            priority=slo.priority,
            tpot_anchor=slo.tpot_anchor,
            **objectives,
        )


class FleetFacts(Part):
    """What a replica is, and the router."""

    policy: str
    policy_options: dict[str, Any]
    routing: str
    routing_options: dict[str, Any]
    latency_family: str
    latency_coefficients: tuple[float, ...]
    engine: EngineConfig

    @classmethod
    def of(cls, fleet: PlannedFleet) -> Self:
        """The facts of a fleet."""
        return cls(
            policy=fleet.policy,
            policy_options=dict(fleet.policy_options),
            routing=fleet.routing,
            routing_options=dict(fleet.routing_options),
            latency_family=fleet.model.family,
            latency_coefficients=fleet.model.coefficients,
            engine=fleet.engine,
        )


class CapacityReport(Part):
    """The answer, and all that it rests on."""

    status: Status
    replicas: int | None = Field(description="The answer; null if there is none.")
    searched: bool = Field(description="False where one count was asked for.")
    target: float
    max_replicas: int
    tpot_metric: str
    traffic: TrafficFacts
    classes: tuple[ClassFacts, ...]
    fleet: FleetFacts
    seeds: tuple[int, ...]
    points: tuple[CapacityPoint, ...] = Field(description="Every count that was tried, ascending.")
    disaggregated: PoolAnswer | None = Field(
        default=None, description="The same with prefill and decode apart, where that was asked."
    )
    method: str = METHOD
    not_modelled: tuple[str, ...] = NOT_MODELLED

    @property
    def best(self) -> CapacityPoint | None:
        """The point of the answer, else the one with the highest attainment, if there is any."""
        for point in self.points:
            if point.replicas == self.replicas:
                return point
        return max(self.points, key=lambda point: point.attainment.mean or 0.0, default=None)

    @property
    def answers(self) -> bool:
        """Whether the search reached its target."""
        asked = self if self.disaggregated is None else self.disaggregated
        return asked.status == "reached"

    def verdict(self) -> str:
        """The answer in a few sentences."""
        words = self._verdict()
        if self.disaggregated is None:
            return words
        return f"{words} {self.disaggregated.verdict(self.replicas)}"

    def _verdict(self) -> str:
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
            text += (
                f" {best.failed.mean:g} requests failed there, those longer than a replica's KV of "
                f"{self.fleet.engine.kv_tokens} tokens among them."
            )
        return text

    def write(self, folder: Path) -> list[Path]:
        """Write ``simulate.json`` and ``simulate.png``; return their paths.

        Raises:
            ReportError: the folder cannot be written to, or matplotlib is not there.
        """
        path = folder / "simulate.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ReportError(f"cannot write to {folder}: {error.strerror}") from error
        if not self.points:
            return [path]
        plot = folder / "simulate.png"
        draw(self.chart(), plot)
        return [path, plot]

    def chart(self) -> Chart:
        """Attainment over replicas, of all requests and of each class, and the target."""
        groups: dict[str, list[tuple[int, Group]]] = {"all requests": []}
        for point in self.points:
            groups["all requests"].append((point.replicas, point))
            if len(point.classes) > 1:
                for name, group in point.classes.items():
                    groups.setdefault(name, []).append((point.replicas, group))
        lines = {
            name: [
                Point(
                    count,
                    100 * group.attainment.mean,
                    100 * (group.attainment.half_width or 0.0),
                )
                for count, group in members
                if group.attainment.mean is not None
            ]
            for name, members in groups.items()
        }
        ends = (self.points[0].replicas, self.points[-1].replicas)
        lines["target"] = [Point(end, 100 * self.target, nan) for end in ends]
        title = f"{self.fleet.policy} on {self.traffic.name}\n{self.traffic.scaling}"
        label = f"requests that meet their objectives, % (TPOT: {self.tpot_metric})"
        return Chart(title, "replicas", label, lines)

    def show(self) -> None:
        """Print the setting, the curve, the classes at the answer, and what is left out."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDE)
        for line in self._setting():
            console.print(line, highlight=False, markup=False)
        if self.points:
            print_table(self._curve(), console)
        if self.disaggregated is not None and self.disaggregated.points:
            print_table(_pools(self.disaggregated), console)
        best = self.best
        if best is not None and len(best.classes) > 1:
            print_table(_classes(best), console)
        console.print("Not modelled:", highlight=False)
        for words in self.not_modelled:
            console.print(f"- {words}", highlight=False, markup=False)
        console.print(self.verdict(), highlight=False, markup=False, style="bold")

    def _setting(self) -> list[str]:
        traffic, fleet = self.traffic, self.fleet
        rate = "all at once" if traffic.rate is None else f"{traffic.rate:.3g} a second"
        classes = "; ".join(_words(each) for each in self.classes)
        model = ", ".join(f"{value:g}" for value in fleet.latency_coefficients)
        options = "".join(f", {name} {value}" for name, value in fleet.policy_options.items())
        return [
            f"Traffic: {traffic.description} Rate: {rate}, {traffic.scaling}; mean prompt "
            f"{traffic.mean_prompt_tokens:.0f}, output {traffic.mean_output_tokens:.0f} tokens.",
            f"Classes: {classes}. TPOT: {self.tpot_metric}.",
            f"Replica: {fleet.policy}{options}; latency {fleet.latency_family} ({model}); KV of "
            f"{fleet.engine.kv_blocks} blocks of {fleet.engine.block_tokens}; at most "
            f"{fleet.engine.max_batch_tokens} tokens and {fleet.engine.max_sequences} sequences. "
            f"Router: {fleet.routing}.",
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
    *map(_heading, LATENCIES),
    "utilisation, %",
    "failed",
    "preemptions",
)


def _figures(point: CapacityPoint) -> list[str]:
    return [
        point.attainment.shown(100, 2),
        *(getattr(point, figure).shown(1, 0) for figure in LATENCIES),
        point.utilisation.shown(100, 0),
        point.failed.shown(1, 0),
        point.preemptions.shown(1, 0),
    ]


def _pools(answer: PoolAnswer) -> Table:
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
    table = Table("class", "requests", "attained, %", *map(_heading, LATENCIES), title=title)
    for name, group in point.classes.items():
        figures = (getattr(group, figure).shown(1, 0) for figure in LATENCIES)
        table.add_row(name, group.requests.shown(1, 0), group.attainment.shown(100, 2), *figures)
    return table


def _words(each: ClassFacts) -> str:
    objectives = [
        f"{name.upper()} {value:g} ms"
        for name, value in (("ttft", each.ttft_ms), ("tpot", each.tpot_ms), ("e2e", each.e2e_ms))
        if value is not None
    ]
    if each.tpot_ms is not None and each.tpot_anchor is not TPOTAnchor.MEAN:
        objectives.append(f"TPOT by {each.tpot_anchor}")
    promised = ", ".join(objectives) or "no objective"
    return f"{each.name} {each.share:.0%} ({promised}, priority {each.priority})"
