"""A run in a few numbers, as they stand in result files and tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import nan

import numpy as np

from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import Anchor, GainWeights
from sluice.simulation.metrics import (
    TPOTMetric,
    attained,
    deadline_gain,
    judged_tpot_s,
    metric_name,
    stages,
    worst_by_request,
)
from sluice.simulation.run import Result


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run. Seconds unless named; nan where nothing has the figure.

    Every request counts, from the first, which finds an empty engine, to the last, behind which
    nothing comes. So a short run looks better than a long one at the same rate, and above capacity
    attainment falls for as long as the run lasts: compare runs of one length, and state it.

    Attributes:
        workload, scaling: what arrived, and how its rate was changed.
        tpot_metric: which TPOT is meant, see :class:`~sluice.simulation.metrics.TPOTMetric`;
            ``stated`` where objectives state several.
        requests, finished, failed: all that arrived; they ended with all their output, or not.
        offered_rate: requests per second between the first and the last arrival.
        attainment: share of all requests that met every objective.
        tdg_ratio: token-level deadline gain over the ideal one.
        effective_rate: ``offered_rate * attainment``, FairBatching's effective RPS.
        goodput: requests that met every objective per second of the whole run, until the last one
            ended; below the effective rate where work is left over at the end.
        throughput: output tokens per second of the run.
        ttft_p50_s, ttft_p99_s: of all requests with a first token, of their first stages.
        tpot_p50_s, tpot_p99_s: by the metric, of all requests with two tokens, of their worst
            stages.
        longest_wait_s: the longest time to a first token.
        steps, mean_step_s: engine steps, and their mean time.
        utilisation: share of the run's time in steps, mean over the engines.
        preemptions: times that a request lost its KV.
        recomputed_share: of the computed tokens, those that had been computed before.
        correction: mean learnt factor on the belief.
    """

    workload: str
    scaling: str
    tpot_metric: str
    requests: int
    finished: int
    failed: int
    offered_rate: float
    attainment: float
    tdg_ratio: float
    effective_rate: float
    goodput: float
    throughput: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    longest_wait_s: float
    steps: int
    mean_step_s: float
    utilisation: float
    preemptions: int
    recomputed_share: float
    correction: float

    def as_dict(self) -> dict[str, str | int | float]:
        """By name."""
        return asdict(self)


def summarise(
    result: Result,
    metric: TPOTMetric | None = None,
    weights: GainWeights | None = None,
    anchor: Anchor = Anchor.ENVELOPE,
) -> Summary:
    """The summary of a run.

    Args:
        result: the run.
        metric: which TPOT objectives are measured by; default: what each states.
        weights: of TDG; default: the workload's mean prompt and output length.
        anchor: of TDG.
    """
    requests = result.requests
    workload = requests.workload
    measured = stages(requests)
    met = attained(requests, measured, metric)
    first = measured.ttft_s[requests.first_stage[:-1]]
    pace_s = worst_by_request(requests, measured, judged_tpot_s(requests, measured, metric))
    count = len(requests)
    attainment = float(met.mean()) if count else nan
    lasted_s = result.end_s - workload.arrivals[0].arrival_s if count else 0.0
    failed = len(requests.failures)
    return Summary(
        workload=workload.name,
        scaling=workload.scaling,
        tpot_metric=metric_name(metric, requests.stage_slos),
        requests=count,
        finished=count - failed,
        failed=failed,
        offered_rate=workload.rate,
        attainment=attainment,
        tdg_ratio=deadline_gain(requests, measured, weights, anchor).ratio,
        effective_rate=workload.rate * attainment,
        goodput=_share(int(met.sum()), lasted_s),
        throughput=_share(int(measured.emitted.sum()), lasted_s),
        ttft_p50_s=_quantile(first, 0.5),
        ttft_p99_s=_quantile(first, 0.99),
        tpot_p50_s=_quantile(pace_s, 0.5),
        tpot_p99_s=_quantile(pace_s, 0.99),
        longest_wait_s=_quantile(first, 1.0),
        steps=sum(result.steps),
        mean_step_s=_share(result.busy_s, sum(result.steps)),
        utilisation=_share(result.busy_s, result.up_s),
        preemptions=result.preemptions,
        recomputed_share=_share(result.recomputed_tokens, result.computed_tokens),
        correction=result.correction,
    )


def _quantile(values: Floats, share: float) -> float:
    values = values[~np.isnan(values)]
    return float(np.quantile(values, share)) if len(values) else nan


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else nan
