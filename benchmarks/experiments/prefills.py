"""Prefill-only instances for experiments: engines that run whole batches, and engines that suspend
prefills, under the same step times, workloads and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sluice.benchmarks.experiments.base import Cell, Plan, Value
from sluice.benchmarks.experiments.capacity import greatest_loads
from sluice.benchmarks.experiments.engines import NOISE, SETUPS, Contender, Setup, figures, run
from sluice.benchmarks.experiments.loads import Make, Span, full_load_rate, recorded
from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.objective import SLO
from sluice.simulation.config import EngineConfig
from sluice.simulation.forward import LLAMA3_8B, LLAMA3_70B
from sluice.simulation.metrics import TPOTMetric, attained, stages
from sluice.simulation.preemption import WHOLE, PreemptionConfig
from sluice.simulation.prefill_run import PrefillRun, simulate_prefills
from sluice.simulation.truth import Truth
from sluice.simulation.workload import Arrival, Workload, with_objectives
from sluice.simulation.workloads.settings import FLOWPREFILL_TTFT_S, flowprefill, flowprefill_single

FIGURE = "attainment_mean"

MODELS = {"llama3-8b": ("8b", LLAMA3_8B), "llama3-70b": ("70b", LLAMA3_70B)}
"""By model: the setup with its step times, and its operators."""

LONG_TOKENS = 2_500
"""A recorded prompt without a task of Table 1 counts as search from this length, else as text."""

SETTING = {
    "TPOT": "none: only the first token is judged, on an instance that only prefills",
    "Arrivals": "generated, Poisson (the paper replays the Qwen trace, which `--traces` reads); "
    "load 1 is the rate whose mean prefill work fills the engine's time without the fixed time of "
    "its steps",
    "Objectives and priorities": "FlowPrefill Tables 1 and 2: TTFT by task; one priority",
    "Latency": "setups 8b and 70b of benchmarks/experiments/engines.py, noise of 3 % on each task; "
    "nothing ran on an accelerator",
    "Preemption": "a pass stops before its next operator: per layer qkv_proj, attention (the part "
    "of the time that depends on the context), o_proj, gate_up_proj, down_proj (by their weights). "
    "A suspension costs 1.3 ms and a check 0.32 us, both measured on a CPU",
}


class Suspending(NamedTuple):
    """An engine that suspends prefills.

    Attributes:
        label: its name in tables.
        config: where prefills stop.
        admission: registered name of the admission policy; empty: every request is served.
        refuses: whether requests without a guarantee are refused.
    """

    label: str
    config: PreemptionConfig
    admission: str = ""
    refuses: bool = False


Kind = Contender | Suspending

PAPER = PreemptionConfig(depth=None, chunk_tokens=WHOLE, batch_tokens=4_096)
"""As in the paper: prompts are not split, and the number of suspended prefills is unlimited."""


def flow(label: str, **changes: object) -> Suspending:
    """The paper's engine, with changes."""
    return Suspending(label, PAPER.model_copy(update=changes))


def bounded(label: str, **changes: object) -> Suspending:
    """The engine with its default bounds, and changes."""
    return Suspending(label, PreemptionConfig().model_copy(update=changes))


def mix(model: str, scale: float, setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """The paper's tasks with a model's objectives times ``scale``."""
    return flowprefill(model, rate, requests, seed, scale)


def single(setup: Setup, rate: float, requests: int, seed: int) -> Workload:
    """The paper's run with one objective."""
    return flowprefill_single("llama3-8b", rate, seed, requests)


def _of_trace(
    make: Make, model: str, scale: float, setup: Setup, rate: float, requests: int, seed: int
) -> Workload:
    """Recorded arrivals and prompts as single-turn requests with the paper's objectives."""
    by_task = FLOWPREFILL_TTFT_S[model]

    def objective(each: Arrival) -> SLO:
        by_length = "search" if each.prompt_tokens >= LONG_TOKENS else "text"
        return SLO(ttft_s=scale * by_task.get(each.task, by_task[by_length]))

    words = f"TTFT of FlowPrefill Table 2 for {model} times {scale:g}, by task or by length."
    judged = with_objectives(make(setup, rate, requests, seed), objective, words)
    short = tuple(each._replace(output_tokens=1, block_hashes=()) for each in judged.arrivals)
    return Workload(judged.name, short, judged.block_tokens, judged.scaling, judged.description)


def workloads(model: str, scale: float, traces: Path | None) -> dict[str, Make]:
    """The generated workload and every recorded one, by name."""
    found: dict[str, Make] = {"generated": partial(mix, model, scale)}
    for name, make in recorded(traces).items():
        found[name] = partial(_of_trace, make, model, scale)
    return found


def setup_of(model: str) -> Setup:
    """A prefill-only instance: ample KV, and planners know the real step times."""
    setup = SETUPS[MODELS[model][0]]
    return setup._replace(engine=EngineConfig(kv_blocks=32_768), believed=setup.truth)


def span(plan: Plan) -> Span:
    """How long runs last."""
    return plan.pick(Span(3.0, 10, 20), Span(120.0, 150, 500), Span(300.0, 500, 3_000))


def measure(
    make: Make, model: str, rate: float, requests: int, kind: Kind, seed: int
) -> Mapping[str, float]:
    """The figures of one run."""
    setup = setup_of(model)
    workload = make(setup, rate, requests, seed)
    if isinstance(kind, Contender):
        return figures(run(workload, kind, setup, seed))
    served = simulate_prefills(
        workload,
        Truth(setup.truth, NOISE),
        config=kind.config,
        model=MODELS[model][1],
        seed=seed,
        admission=make_admission(kind.admission) if kind.admission else None,
        refuses=kind.refuses,
    )
    return prefill_figures(served)


def prefill_figures(served: PrefillRun) -> dict[str, float]:
    """Attainment of all requests, of the guaranteed ones, and by prompt tokens; throughput; the
    cost of suspensions. A refused request attains nothing."""
    requests, counts = served.requests, served.counts
    met = attained(requests, stages(requests), TPOTMetric.MEAN)
    promised = ~requests.best_effort
    promised[list(requests.failures)] = False
    tokens = np.array([arrival.prompt_tokens for arrival in requests.arrivals])
    blocked_s = np.array(counts.blocked_s or [0.0])
    return {
        FIGURE: float(met.mean()),
        "kept": float(met[promised].mean()) if promised.any() else 1.0,
        "promised": float(promised.mean()),
        "attained_tokens": float(tokens[met].sum() / tokens.sum()),
        "throughput": len(requests) / (counts.end_s - requests.arrivals[0].arrival_s),
        "suspensions": counts.suspensions / len(requests),
        "rounds": counts.rounds / len(requests),
        "deepest": float(counts.deepest),
        "suspended_tokens": float(counts.suspended_tokens),
        "held_tokens": float(counts.held_tokens),
        "blocked_ms": 1e3 * float(blocked_s.mean()),
        "blocked_p99_ms": 1e3 * float(np.percentile(blocked_s, 99)),
        "idle_share": counts.idle_s / counts.end_s,
    }


def grid(
    labels: Mapping[str, Value],
    model: str,
    make: Make,
    loads: Sequence[float],
    kinds: Sequence[Kind],
    lasting: Span,
) -> list[Cell]:
    """A cell per load and contender, with the labels ``load`` and ``policy`` added."""
    full = full_load_rate(make, setup_of(model))
    return [
        Cell(
            {**labels, "load": load, "policy": kind.label},
            partial(measure, make, model, load * full, lasting.requests(load * full), kind),
        )
        for load in loads
        for kind in kinds
    ]


def goodput(make: Make, model: str, kind: Kind, lasting: Span, seed: int) -> Mapping[str, float]:
    """The highest rate at which 90 % attain."""
    full = full_load_rate(make, setup_of(model))

    def attainment(load: float) -> float:
        rate = load * full
        return measure(make, model, rate, lasting.requests(rate), kind, seed)[FIGURE]

    return {"goodput": greatest_loads(attainment, (0.9,))[0.9] * full}


def tightest(
    make: Callable[[float], Make], model: str, load: float, kind: Kind, lasting: Span, seed: int
) -> Mapping[str, float]:
    """The lowest factor on the objectives at which 90 % attain; infinite if none up to 20 suffices.

    Args:
        make: the workload by the factor.
    """
    rate = load * full_load_rate(make(1.0), setup_of(model))

    def attainment(strictness: float) -> float:
        own = make(1.0 / strictness)
        return measure(own, model, rate, lasting.requests(rate), kind, seed)[FIGURE]

    found = greatest_loads(attainment, (0.9,))[0.9]
    return {"tightest": 1.0 / found if found else inf}


def of_scale(model: str) -> Callable[[float], Make]:
    """The paper's tasks, by the factor on their objectives."""
    return partial(_mix_of, model)


def _mix_of(model: str, scale: float) -> Make:
    return partial(mix, model, scale)
