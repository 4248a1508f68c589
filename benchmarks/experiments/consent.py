"""Degrading by consent: what classes that accept less gain under overload; and how well streams
say early that their promise is going to be missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import floor, inf

import numpy as np

from sluice.benchmarks.experiments import systems
from sluice.benchmarks.experiments.grid import Axes, Experiment, Product, Scaled, first, means
from sluice.benchmarks.experiments.kinds import (
    BURSTS,
    IDLE_TIMES,
    KINDS,
    SHARED_TOKENS,
    generated,
)
from sluice.benchmarks.experiments.loads import GENERATED, Make, Span, alone_s, full_load_rate
from sluice.benchmarks.experiments.promises import WRONG, Wrong
from sluice.benchmarks.experiments.systems import (
    ADMISSION,
    DEFAULT,
    ROUTER,
    SETUPS,
    Run,
    Setup,
    System,
    colocated,
)
from sluice.router.dispatch.announcements import FIRST_LEAD_S, FIRST_SHARE, LOOK_S, late
from sluice.router.dispatch.attempt import Announcement, Answer, SuspicionState
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import SLO, TokenClock
from sluice.simulation.config import Accepted, Failure, Slowdown
from sluice.simulation.generators import Gamma
from sluice.simulation.metrics import Flags, TPOTMetric, attained, stages
from sluice.simulation.replica import Incident
from sluice.simulation.workload import Workload

SETUP = SETUPS["8b"]
SMALL = SETUP._replace(
    name="2b",
    truth=LinearLatency(a=0.0045, b=2e-5, c=3.5e-8, d=1e-9),
    believed=LinearLatency(a=0.0045, b=2e-5, c=3.5e-8, d=1e-9),
)
"""The smaller model: half of the time of a step without tokens, a quarter of that of a token."""

TTFT_TIMES, TPOT_TIMES = 5.0, 3.0
"""How many times the TTFT and TPOT asked for are accepted."""

SHORTER = 16
NONE, TOKENS, TIMES, MODEL = "nothing", "fewer tokens", "longer times", "a smaller model"
ALL = "longer times, stated by all"
"""No consent: what the times could gain at most."""


def objectives(setup: Setup) -> dict[str, SLO]:
    """Those of ``sluice bench peers``, by the times of an idle engine."""
    first_s, model, found = alone_s(setup.truth), setup.truth, {}
    for name, kind in KINDS.items():
        (ttft_times, tpot_times), most = IDLE_TIMES[name], kind.prompt_tokens[1]
        step_s = model.fixed_s + model.work_s(1, most)
        found[name] = SLO(ttft_times * first_s(most), tpot_times * step_s, service_class=name)
    return found


def peers_mix(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """The mix of ``sluice bench peers``, in bursts."""
    slos, chance = objectives(setup), np.random.default_rng(seed)
    times_s = Gamma(rate, cv=BURSTS).times(2 * requests + 100, chance)
    pairs = zip(times_s[times_s < requests / rate].tolist(), generated(seed), strict=False)
    arrivals = [each._replace(arrival_s=at_s, slo=slos[each.task]) for at_s, each in pairs]
    return Workload("the mix of peers, in bursts", tuple(arrivals), SHARED_TOKENS)


def accepted(accepts: str, slo: SLO) -> tuple[Accepted, ...]:
    """What a class with this objective accepts of the same model."""
    ttft_s, tpot_s, _, _ = slo.columns
    longer = Accepted(None, TTFT_TIMES * ttft_s, TPOT_TIMES * tpot_s)
    return {TOKENS: (Accepted(SHORTER),), TIMES: (longer,)}.get(accepts, ())


def _served(
    made: Workload, setup: Setup, engines: int, accepts: str, seed: int
) -> tuple[Run, Flags, Flags]:
    """One run; and by request, whether it was in time by the objective that it was served with, and
    promised."""
    slos = objectives(SETUP).items()
    layout = colocated(engines, accepts={name: accepted(accepts, slo) for name, slo in slos})
    system = System(ROUTER, DEFAULT, ADMISSION, "reject" if accepts == MODEL else "best_effort")
    run = systems.run_cluster(made, system, setup, layout, seed)
    requests = run.result.requests
    in_time = attained(requests, stages(requests), TPOTMetric.MEAN)
    return run, in_time, ~np.isnan(requests.promised_s)


def measure(seed: int, load: float, accepts: str, engines: int, span: Span) -> Mapping[str, float]:
    """The shares of one run. What the small model cannot promise either is best effort there."""
    rate = engines * load * full_load_rate(peers_mix, SETUP)
    made = peers_mix(SETUP, rate, span.requests(rate), seed)
    asked = made.arrivals
    if accepts == ALL:
        times_s = {name: accepted(TIMES, slo)[0][1:] for name, slo in objectives(SETUP).items()}
        stated = [each.slo.with_times((*times_s[each.task], None)) for each in asked]
        longer = [each._replace(slo=slo) for each, slo in zip(asked, stated, strict=True)]
        made = replace(made, arrivals=tuple(longer))
    of_large = engines - 1 if accepts == MODEL else engines
    run, in_time, promised = _served(made, SETUP, of_large, accepts, seed)
    requests = run.result.requests
    pairs = list(zip(asked, requests.arrivals, strict=True))
    cut = np.array([now.output_tokens < each.output_tokens for each, now in pairs])
    less = cut | np.array([now.slo != each.slo for each, now in pairs])
    seen = stages(requests)
    seen_s = np.column_stack((seen.ttft_s, seen.tpot_s[TPOTMetric.MEAN]))
    limits = np.array([each.slo.columns[:2] for each in asked])
    whole = in_time & ~cut & (np.nan_to_num(seen_s) <= limits).all(axis=1)
    if accepts == MODEL and run.refused:
        moved = sorted(run.refused)
        other = replace(made, arrivals=tuple(asked[key] for key in moved))
        _, in_time[moved], promised[moved] = _served(other, SMALL, 1, NONE, seed)
        less[moved], whole[moved] = True, False
    kinds = np.array([each.task for each in asked])
    return {
        "in_time": float(in_time.mean()),
        "degraded": float((in_time & less).mean()),
        "whole": float(whole.mean()),
        "kept": float(in_time[promised].mean()) if promised.any() else 1.0,
        **{kind: float(in_time[kinds == kind].mean()) for kind in KINDS},
    }


def _grid(engines: int, accepts: tuple[str, ...]) -> Product:
    span = Scaled(Span(6.0, 20, 60), Span(60.0, 200, 4_000), Span(200.0, 200, 9_000))
    axes: Axes = {"load": (1.5,), "accepts": accepts}
    return Product(measure, axes, {"engines": engines, "span": span}, {"engines": engines})


ACCEPTS = Experiment(
    "accepts",
    "ours",
    "How many more requests are answered in time where classes accept less?",
    setting="The bursty mix of `sluice bench peers` on one replica of 8B; objectives as there, "
    f"multiples of an idle engine's times. Accepted are {SHORTER} output tokens, or {TTFT_TIMES:g} "
    f"times the TTFT with {TPOT_TIMES:g} times the TPOT. With two engines the second one has a "
    "smaller model for what the first cannot promise, or is another 8B. What cannot be promised "
    "even then is best effort. Full: 200 s in place of 60 s.",
    grids=[_grid(1, (NONE, TOKENS, TIMES, ALL)), _grid(2, (NONE, MODEL))],
    tables=[
        means(
            "Shares of all requests, and of each class",
            ("load", "engines", "accepts"),
            {
                "in_time": ("answered in time", 3),
                "degraded": ("degraded", 3),
                "whole": ("in time as first stated", 3),
                "kept": ("promises kept", 3),
                **{kind: (kind, 3) for kind in KINDS},
            },
            "In time: all output, within the objective that was promised in the end, or stated. As "
            "first stated: by that objective and model, with all tokens, degraded or not.",
        )
    ],
)


# How early, and how surely, a stream says that its promise is going to be missed.

SLOW, FAIL = "a replica is slow", "replicas fail"


def _incidents(what: str, lasts_s: float, wrong: Wrong) -> tuple[Incident, ...]:
    if what == FAIL:
        return Failure(lasts_s / 3, 0, 6.0), Failure(2 * lasts_s / 3, 1, 6.0)
    if what == SLOW:
        at_s = lasts_s / 4, lasts_s / 2
        return (
            *(Slowdown(at_s[0], 0, 2.0), Slowdown(at_s[0] + 3.0, 0, 1.0)),
            *(Slowdown(at_s[1], 1, 4.0), Slowdown(at_s[1] + 1.5, 1, 1.0)),
        )
    return Slowdown(lasts_s / 3, 0, wrong.drift), Slowdown(lasts_s * 2 / 3, 0, 1.0)


def announced_s(slo: SLO, arrival_s: float, times_s: Floats) -> float:
    """When a router that looks at whole multiples of its interval says that a stream will be
    late; infinite: never."""
    lead_s = max(FIRST_SHARE * slo.columns[0], FIRST_LEAD_S)
    if times_s[0] > arrival_s + slo.columns[0] - lead_s:
        return arrival_s + slo.columns[0] - lead_s
    call = Call("", "chat", {}, slo, PromptSize(), arrival_s, output_tokens=len(times_s))
    answer, known = Answer(call, SuspicionState(), TokenClock(slo, arrival_s)), Announcement()
    sent, look = 0, floor(float(times_s[0]) / LOOK_S) + 1
    while (now_s := look * LOOK_S) < times_s[-1]:
        upto = int(np.searchsorted(times_s, now_s, side="right"))
        for at_s in times_s[sent:upto].tolist():
            answer.clock.emit(1, at_s)
        sent, look = upto, look + 1
        if late(answer, known, now_s) is not None:
            return now_s
    return inf


def measure_announcements(
    seed: int, workload: Make, load: float, trouble: str, span: Span
) -> Mapping[str, float]:
    """Counts of promised streams: ``missed``, ``before`` their miss announced, and ``false``."""
    wrong = WRONG.get(trouble, Wrong())
    setup = SETUP._replace(noise=wrong.noise, believed=wrong.believed(SETUP.believed))
    rate = 2 * load * full_load_rate(workload, SETUP)
    made = workload(setup, rate, span.requests(rate), seed)
    layout = colocated(2)._replace(
        incidents=_incidents(trouble, made.arrivals[-1].arrival_s, wrong)
    )
    run = systems.run_cluster(made, System(ROUTER, DEFAULT, ADMISSION), setup, layout, seed)
    requests = run.result.requests
    found = {"promised": 0.0, "missed": 0.0, "before": 0.0, "false": 0.0}
    leads_s = []
    for key in np.flatnonzero(~np.isnan(requests.promised_s)).tolist():
        arrival, offset = requests.arrivals[key], requests.offsets[requests.first_stage[key]]
        times_s = requests.emitted_s[offset : offset + arrival.output_tokens]
        if np.isnan(times_s).any():
            continue
        ttft_s, tpot_s, _, _ = arrival.slo.columns
        first_due_s = arrival.arrival_s + ttft_s
        last_due_s = float(times_s[0]) + (len(times_s) - 1) * tpot_s
        missed_s = first_due_s if times_s[0] > first_due_s else inf
        if missed_s == inf and times_s[-1] > last_due_s:
            missed_s = last_due_s
        said_s = announced_s(arrival.slo, arrival.arrival_s, times_s)
        found["promised"] += 1
        found["missed"] += missed_s < inf
        found["false"] += missed_s == inf and said_s < inf
        if said_s < missed_s < inf:
            found["before"] += 1
            leads_s.append(missed_s - said_s)
    announced = found["before"] + found["false"]
    return {
        **found,
        "recall": found["before"] / found["missed"] if found["missed"] else 1.0,
        "false_share": found["false"] / announced if announced else 0.0,
        "lead_s": float(np.median(leads_s)) if leads_s else 0.0,
    }


TROUBLES = (*WRONG, SLOW, FAIL)

ANNOUNCEMENTS = Experiment(
    "announcements",
    "ours",
    "How many missed promises does a stream announce before they are missed, and how many that it "
    "announces are kept?",
    setting="Two replicas of 8B whose step times differ from what is believed, are slow for some "
    "seconds or fail. A promise is missed when the deadline passes that was missed first.",
    grids=[
        Product(
            measure_announcements,
            {
                "workload": first(
                    {n: GENERATED[n] for n in ("proserve sharegpt", "proserve azure")}
                ),
                "load": (1.3,),
                "trouble": TROUBLES,
            },
            {"span": Scaled(Span(6.0, 20, 60), Span(40.0, 200, 2_000))},
        )
    ],
    tables=[
        means(
            "By trouble, a mean over workloads",
            ("trouble",),
            {
                "promised": ("promised", 0),
                "missed": ("missed", 1),
                "before": ("announced before", 1),
                "false": ("announced and kept", 1),
                "lead_s": ("median lead, s", 3),
            },
            "Counts of a run. Lead: from the announcement to the deadline that was missed.",
        )
    ],
)
