"""The papers' evaluation settings as generated workloads, described by what is the paper's and what
is ours. Lengths follow the printed tables; ``arrivals`` takes another process than Poisson."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from sluice.scheduling.request.objective import SLO
from sluice.simulation.generators import (
    AtOnce,
    LengthDistribution,
    MakeArrivals,
    OnOff,
    Poisson,
    Reasoning,
    Slowdown,
    Task,
    TaskClass,
    ToolLoop,
    always,
    generate,
)
from sluice.simulation.workload import Workload, merged, with_objectives, with_priorities


class Column(NamedTuple):
    """Mean, 99th percentile and standard deviation of a length, tokens, as printed."""

    mean: float
    p99: float
    std: float

    @property
    def lengths(self) -> LengthDistribution:
        """The distribution with these statistics."""
        return LengthDistribution.of_p99(self.mean, self.p99, self.std)


SLOS_SERVE_PROMPTS = {
    "chatbot": Column(763, 1591, 424),
    "coder": Column(847, 2010, 617),
    "reasoning": Column(127, 421, 83),
    "summarizer": Column(1333, 1946, 444),
    "tools": Column(690, 2131, 356),
}
"""Prompt lengths of SLOs-Serve Table 4, by scenario."""

SLOS_SERVE_OUTPUTS = {
    "chatbot": Column(266, 619, 160),
    "coder": Column(26, 232, 47),
    "thinking": Column(4693, 7297, 1442),
    "answer": Column(803, 1650, 280),
    "summarizer": Column(202, 1508, 234),
    "tools": Column(116, 363, 66),
}
"""Output lengths of SLOs-Serve Table 4; the reasoning scenario has two stages."""

SLOS_SERVE_SCENARIOS = ("chatbot", "coder", "summarizer", "mixed", "tools", "reasoning")

TIGHT_TTFT, LOOSE_TTFT = 3.0, 5.0
"""TTFT objectives of SLOs-Serve Table 3, as multiples of the time on an idle engine."""

TIGHT_TPOT_S, LOOSE_TPOT_S = 0.05, 0.1
"""TPOT objectives of SLOs-Serve Table 3."""


class Dataset(NamedTuple):
    """A row of FairBatching Table 2: lengths in tokens, and the objective."""

    prompt_mean: float
    prompt_p90: float
    output_mean: float
    output_p90: float
    slo: SLO

    @property
    def prompt(self) -> LengthDistribution:
        """The distribution of prompt lengths."""
        return LengthDistribution.of_p90(self.prompt_mean, self.prompt_p90)

    @property
    def output(self) -> LengthDistribution:
        """The distribution of output lengths."""
        return LengthDistribution.of_p90(self.output_mean, self.output_p90)


FAIRBATCHING = {
    "burstgpt": Dataset(688, 1599, 237, 470, SLO(ttft_s=0.5, tpot_s=0.05)),
    "qwen": Dataset(892, 1776, 377, 742, SLO(ttft_s=0.5, tpot_s=0.05)),
    "azure": Dataset(1604, 3561, 114, 392, SLO(ttft_s=2.0, tpot_s=0.05)),
}
"""FairBatching Table 2."""

FLOWPREFILL_PROMPTS = {
    "text": Column(590, 3040, 652),
    "image": Column(532, 2764, 510),
    "search": Column(5976, 16635, 3456),
    "file": Column(6833, 22390, 5186),
}
"""Prompt lengths of FlowPrefill Table 1, by task."""

FLOWPREFILL_SHARES = {"text": 68, "image": 8, "search": 20, "file": 4}
"""Percent of the requests, FlowPrefill Table 1."""

FLOWPREFILL_TTFT_S = {
    "llama3-8b": {"text": 0.25, "image": 0.5, "search": 4.0, "file": 6.0},
    "qwen2.5-14b": {"text": 0.4, "image": 0.8, "search": 6.5, "file": 9.0},
    "llama3-70b": {"text": 1.0, "image": 2.0, "search": 15.0, "file": 18.0},
}
"""TTFT objectives of FlowPrefill Table 2, seconds, by model and task."""

PROSERVE_DATASETS = ("sharegpt", *FAIRBATCHING)
PROSERVE_SLO = SLO(ttft_s=0.8, tpot_s=0.08)
"""TTFT is that of ProServe Fig. 6 and 7; the paper prints no TPOT objective, this one is ours."""


def slos_serve(
    scenario: str,
    rate: float,
    requests: int,
    seed: int,
    zero_load_s: Callable[[int], float],
    floor_s: float = 0.2,
    arrivals: MakeArrivals | None = None,
) -> Workload:
    """A scenario of SLOs-Serve §6 (Tables 1 to 4), one of :data:`SLOS_SERVE_SCENARIOS`.

    Poisson stands for the stable "Azure-Chatting", :class:`OnOff` for the bursty "Azure-Coding"
    (coder, tools). "mixed" has equal rates, as the paper states no shares; we read Table 4's tool
    row as one prefill-decode pair. TTFT objectives are multiples of ``zero_load_s``, at least
    ``floor_s`` (ours)."""
    _check_known(scenario, SLOS_SERVE_SCENARIOS, "scenario")
    if scenario == "mixed":
        # The first of three streams that are each long enough, so that none ends before the others.
        streams = [
            slos_serve(part, rate / 3, requests, seed * 3 + index, zero_load_s, floor_s, arrivals)
            for index, part in enumerate(("chatbot", "coder", "summarizer"))
        ]
        mixed = merged("slos-serve mixed", streams)
        return replace(mixed, arrivals=mixed.arrivals[:requests])
    bursty = scenario in ("coder", "tools")
    process = (arrivals or (OnOff if bursty else Poisson))(rate)
    task = _slos_serve_task(scenario, zero_load_s, floor_s)
    words = (
        f"Lengths of SLOs-Serve Table 4, objectives of Tables 1 and 3: TTFT {TIGHT_TTFT:g} "
        f"(tight) or {LOOSE_TTFT:g} (loose) times the idle engine's, at least "
        f"{floor_s:g} s; TPOT {TIGHT_TPOT_S:g} s (tight) or {LOOSE_TPOT_S:g} s (loose)."
    )
    return generate(f"slos-serve {scenario}", [task], process, requests, seed, words)


def _slos_serve_task(
    scenario: str, zero_load_s: Callable[[int], float], floor_s: float
) -> TaskClass:
    def objective(ttft: float, tpot_s: float) -> Slowdown:
        return Slowdown(ttft, zero_load_s, floor_s, tpot_s)

    prompt = SLOS_SERVE_PROMPTS[scenario].lengths
    if scenario == "reasoning":
        return Reasoning(
            scenario,
            prompt,
            SLOS_SERVE_OUTPUTS["thinking"].lengths,
            SLOS_SERVE_OUTPUTS["answer"].lengths,
            objective(TIGHT_TTFT, TIGHT_TPOT_S),
            LOOSE_TPOT_S,
        )
    output = SLOS_SERVE_OUTPUTS[scenario].lengths
    if scenario == "tools":
        calling = objective(TIGHT_TTFT, TIGHT_TPOT_S)
        answering = objective(TIGHT_TTFT, LOOSE_TPOT_S)
        return ToolLoop(scenario, prompt, output, calling, answering, 2.7, 1.1)
    ttft = TIGHT_TTFT if scenario == "summarizer" else LOOSE_TTFT
    tpot_s = TIGHT_TPOT_S if scenario == "coder" else LOOSE_TPOT_S
    return Task(scenario, prompt, output, objective(ttft, tpot_s))


def fairbatching(dataset: str, rate: float, requests: int, seed: int) -> Workload:
    """A data set of FairBatching Table 2, one of :data:`FAIRBATCHING`, with its objectives."""
    _check_known(dataset, FAIRBATCHING, "dataset")
    row = FAIRBATCHING[dataset]
    task = Task(dataset, row.prompt, row.output, always(row.slo))
    words = (
        f"Means and P90 of the lengths of FairBatching Table 2, TTFT {row.slo.ttft_s:g} s and "
        f"TPOT {row.slo.tpot_s:g} s."
    )
    return generate(f"fairbatching {dataset}", [task], Poisson(rate), requests, seed, words)


def flowprefill(
    model: str,
    rate: float,
    requests: int,
    seed: int,
    slo_scale: float = 1.0,
    output: LengthDistribution | None = None,
) -> Workload:
    """FlowPrefill's four tasks (Table 1), TTFT objectives (Table 2) times ``slo_scale`` (Fig. 9).
    One token each by default, as on its prefill instances."""
    _check_known(model, FLOWPREFILL_TTFT_S, "model")
    tasks = [
        Task(
            name,
            FLOWPREFILL_PROMPTS[name].lengths,
            output or LengthDistribution.fixed(1),
            always(SLO(ttft_s=ttft_s * slo_scale)),
            FLOWPREFILL_SHARES[name],
        )
        for name, ttft_s in FLOWPREFILL_TTFT_S[model].items()
    ]
    words = (
        f"Tasks and prompt lengths of FlowPrefill Table 1, TTFT of Table 2 for {model} times "
        f"{slo_scale:g}."
    )
    return generate(f"flowprefill {model}", tasks, Poisson(rate), requests, seed, words)


def flowprefill_single(model: str, rate: float, seed: int, requests: int = 500) -> Workload:
    """FlowPrefill §6.5, Fig. 14: 500 ShareGPT prompts under 2,000 tokens with the text task's TTFT.
    No lengths are printed: SLOs-Serve's chatbot row."""
    _check_known(model, FLOWPREFILL_TTFT_S, "model")
    ttft_s = FLOWPREFILL_TTFT_S[model]["text"]
    prompt, output = SLOS_SERVE_PROMPTS["chatbot"].lengths, LengthDistribution.fixed(1)
    task = Task("text", prompt, output, always(SLO(ttft_s=ttft_s)))
    words = f"Prompts of SLOs-Serve Table 4 (chatbot), TTFT {ttft_s:g} s."
    return generate(f"flowprefill {model} single", [task], Poisson(rate), requests, seed, words)


def proserve(
    dataset: str,
    rate: float,
    requests: int,
    seed: int,
    priorities: tuple[int, int] = (2, 1),
    arrivals: MakeArrivals = Poisson,
) -> Workload:
    """ProServe §5.1: two priorities with equal chance, one objective. The paper prints no lengths:
    ShareGPT is SLOs-Serve's chatbot row, BurstGPT, QwenTrace and Azure are FairBatching's rows."""
    _check_known(dataset, PROSERVE_DATASETS, "dataset")
    if dataset == "sharegpt":
        prompt = SLOS_SERVE_PROMPTS["chatbot"].lengths
        output = SLOS_SERVE_OUTPUTS["chatbot"].lengths
        words = "Lengths of SLOs-Serve Table 4 (chatbot)."
    else:
        prompt, output = FAIRBATCHING[dataset].prompt, FAIRBATCHING[dataset].output
        words = f"Lengths of FairBatching Table 2 ({dataset})."
    task = Task(dataset, prompt, output, always(SLO()))
    workload = generate(f"proserve {dataset}", [task], arrivals(rate), requests, seed, words)
    return proserve_objectives(workload, seed, priorities)


def proserve_objectives(
    workload: Workload, seed: int, priorities: tuple[int, int] = (2, 1)
) -> Workload:
    """``workload``, such as a trace, with the objective and priorities of ProServe §5.1."""
    words = f"TTFT {PROSERVE_SLO.ttft_s:g} s, TPOT {PROSERVE_SLO.tpot_s:g} s."
    judged = with_objectives(workload, lambda _: PROSERVE_SLO, words)
    return with_priorities(judged, dict.fromkeys(priorities, 1.0), seed)


def chat_and_code(requests: int, seed: int, rate: float | None = None) -> Workload:
    """The mix of the simulated-annealing paper, §5.1: half chat (TTFT 10 s, TPOT 50 ms), half code
    (end to end 30 s), all under 2,000 tokens and by default at once. It prints no lengths: chat has
    SLOs-Serve's chatbot row; code has 180 output tokens on average, 3 s by its Table 2."""
    chat = Task(
        "chat",
        SLOS_SERVE_PROMPTS["chatbot"].lengths,
        SLOS_SERVE_OUTPUTS["chatbot"].lengths,
        always(SLO(ttft_s=10.0, tpot_s=0.05)),
    )
    code = Task(
        "code",
        Column(100, 400, 75).lengths,
        Column(180, 600, 110).lengths,
        always(SLO(e2e_s=30.0)),
    )
    process = AtOnce() if rate is None else Poisson(rate)
    words = "Half chat with TTFT 10 s and TPOT 0.05 s, half code with 30 s end to end."
    return generate("chat and code", [chat, code], process, requests, seed, words)


def _check_known(name: str, allowed: Iterable[str], what: str) -> None:
    if name not in allowed:
        raise ValueError(f"no {what} {name!r}; there are {', '.join(allowed)}")
