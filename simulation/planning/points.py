"""What was measured of each size of a simulated fleet, as it stands in reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from sluice.simulation.capacity import Pools
from sluice.simulation.estimate import Estimate
from sluice.simulation.planning.capacity import Measured

Status = Literal["reached", "not_reachable", "out_of_time"]


class Part(BaseModel):
    """Of a report: strict, and not to be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Range(Part):
    """A mean over seeds and half of its 95 % range; null where nothing has the figure, or where one
    seed alone gives no range."""

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
    """Figures of a group of requests: how many, the share that met every objective, and quantiles
    of those with a first token, and with two."""

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

    @classmethod
    def of(cls, replicas: int, runs: Sequence[Measured]) -> Self:
        """The point of one run per seed."""
        classes = {
            name: Group(**_ranges([run.classes[name] for run in runs])) for name in runs[0].classes
        }
        whole = _ranges([run.whole for run in runs])
        return cls(replicas=replicas, classes=classes, **whole)


def _ranges(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {figure: Range.of([run[figure] for run in runs]) for figure in runs[0]}


class PoolPoint(CapacityPoint):
    """Two pools of replicas, of one role each."""

    prefillers: int
    decoders: int

    @classmethod
    def of_pools(cls, pools: Pools, runs: Sequence[Measured]) -> Self:
        """The point of one run per seed."""
        whole = CapacityPoint.of(sum(pools), runs)
        return cls(prefillers=pools[0], decoders=pools[1], **dict(whole))


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
        """The point of the answer, else the one with the highest attainment, if there is any."""
        for point in self.points:
            if (point.prefillers, point.decoders) == (self.prefillers, self.decoders):
                return point
        return max(self.points, key=lambda point: point.attainment.mean or 0.0, default=None)

    def verdict(self, colocated: int | None) -> str:
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
