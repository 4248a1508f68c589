"""Degrading by consent: what classes that accept less gain under overload; and how well streams
say early that their promise is going to be missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import floor, inf

import numpy as np

from sluice.benchmarks.experiments import systems
from sluice.benchmarks.experiments.grid import Experiment, Product, Scaled, first, means
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


def _served(made: Workload, setup: Setup, accepts: str, seed: int) -> tuple[Run, Flags]:
    """One run, and which requests were answered within what was promised in the end."""
    slos = objectives(SETUP).items()
    layout = colocated(1, accepts={name: accepted(accepts, slo) for name, slo in slos})
    system = System(ROUTER, DEFAULT, ADMISSION, "reject" if accepts == MODEL else "best_effort")
    run = systems.run_cluster(made, system, setup, layout, seed)
    requests = run.result.requests
    return run, attained(requests, stages(requests), TPOTMetric.MEAN)


def measure(seed: int, load: float, accepts: str, span: Span) -> Mapping[str, float]:
    """The shares of one run. What the small model cannot promise either counts as not in time."""
    rate = load * full_load_rate(peers_mix, SETUP)
    made = peers_mix(SETUP, rate, span.requests(rate), seed)
    run, in_time = _served(made, SETUP, accepts, seed)
    requests = run.result.requests
    less = np.array(
        [
            now.slo != asked.slo or now.output_tokens < asked.output_tokens
            for asked, now in zip(made.arrivals, requests.arrivals, strict=True)
        ]
    )
    degraded = int((in_time & less).sum())
    if accepts == MODEL:
        arrivals = tuple(each for key, each in enumerate(made.arrivals) if key in run.refused)
        other = replace(made, arrivals=arrivals)
        degraded = int(_served(other, SMALL, accepts, seed)[1].sum()) if arrivals else 0
        in_time[list(run.refused)] = False
        as_asked = int(in_time.sum())
    else:
        as_asked = int(in_time.sum()) - degraded
    promised = ~np.isnan(requests.promised_s)
    return {
        "in_time": (as_asked + degraded) / len(made),
        "as_asked": as_asked / len(made),
        "degraded": degraded / len(made),
        "kept": float(in_time[promised].mean()) if promised.any() else 1.0,
    }


ACCEPTS = Experiment(
    "accepts",
    "ours",
    "How many more requests are answered in time where classes accept less?",
    setting="The bursty mix of `sluice bench peers` on one replica of 8B; objectives as there, "
    f"multiples of an idle engine's times. Accepted are {SHORTER} output tokens, {TTFT_TIMES:g} "
    f"times the TTFT with {TPOT_TIMES:g} times the TPOT, or a smaller model with a replica of its "
    "own that nothing else uses. What cannot be promised even then is best effort.",
    grids=[
        Product(
            measure,
            {"load": first((1.5, 1.0)), "accepts": (NONE, TOKENS, TIMES, MODEL)},
            {"span": Scaled(Span(6.0, 20, 60), Span(60.0, 200, 4_000))},
        )
    ],
    tables=[
        means(
            "Shares of all requests",
            ("load", "accepts"),
            {
                "in_time": ("answered in time", 3),
                "as_asked": ("as asked", 3),
                "degraded": ("degraded", 3),
                "kept": ("promises kept", 3),
            },
            "In time: all output, within the objective that was promised in the end, or stated.",
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
