"""Prompts of very different lengths through the whole stack, with and without preemption.

Run with ``sluice bench preemption_replay``. The mix is that of FlowPrefill's Table 1, its lengths
divided so that a small model on one core of this machine computes them. Each way gets a Ray
instance, a router and one real vLLM replica of its own, and the same requests at the same times,
one way after the other. Stock vLLM runs as its own server, to which the client sends directly. All
of it shares this machine with the client: check how busy it was before you trust a figure.

The load is a share of the engine's capacity: prompts of several lengths are timed alone, on stock
vLLM, and requests arrive at the rate at which their predicted times fill that share of the time.
Objectives are those of the paper's Table 2, times the ratio of the mean predicted time to that of
its model on its GPU.

The exit status is 1 if a request was not answered.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import click
from rich.console import Console

from sluice.benchmarks.experiments.systems import SETUPS
from sluice.benchmarks.live.application import application, metrics
from sluice.benchmarks.live.client import Body, End, Json, Outcome, stream_body
from sluice.benchmarks.live.client import replay as replay_workload
from sluice.benchmarks.live.preemption.command import random_prompt
from sluice.benchmarks.live.processes import vllm_server
from sluice.benchmarks.live.report import by_class, milliseconds, of_class, table
from sluice.benchmarks.live.resources import Meter
from sluice.benchmarks.options import as_json, number_option, seed, show
from sluice.controller.config import NO_ADMISSION
from sluice.deploy.config import SluiceConfig
from sluice.deploy.ray_settings import free_port
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.latency.fit import fit
from sluice.scheduling.latency.model import StepSample
from sluice.scheduling.latency.request_model import PolynomialTTFT
from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival, Workload, stretched, window
from sluice.simulation.workloads.settings import (
    FLOWPREFILL_PROMPTS,
    FLOWPREFILL_SHARES,
    FLOWPREFILL_TTFT_S,
    flowprefill,
)

PAPER_MODEL: Final = "llama3-8b"
PAPER_SETUP: Final = SETUPS["8b"]
"""The paper's smallest model. The paper has no times of it: those of the simulator are used."""

SHRINK: Final = 4.0
"""Divisor of the paper's lengths."""

SMALL, LARGE = (round(tokens / SHRINK) for tokens in (2_048, 8_192))
"""Tokens of the paper's two baselines with chunks and EDF, divided like the lengths."""

MOST: Final = ceil(
    max(each.lengths.cap * each.lengths.reach for each in FLOWPREFILL_PROMPTS.values()) / SHRINK
)
"""The longest prompt, tokens."""

NAME: Final = "small"
_WARM_UP_S = 5.0
_PROFILE_S = 10.0
_TIMED_SHARES = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 1.0)
_TIMED = 3
_SAMPLE = 4_000


class Way(NamedTuple):
    """How prefills are scheduled: fields of the engine's configuration, ``None`` for stock vLLM's
    own server, max tokens of a step, and further arguments of vLLM."""

    engine: Mapping[str, Any] | None
    step_tokens: int
    more: Mapping[str, Any] = {}

    def vllm_args(self) -> Json:
        """vLLM's arguments, by command-line name without dashes."""
        return {
            "max-num-batched-tokens": self.step_tokens,
            "max-model-len": MOST + 16,
            "kv-cache-memory-bytes": 512 << 20,
            "block-size": 32,
            "max-num-seqs": 64,
            "enforce-eager": True,
            "enable-prefix-caching": False,  # the warm-up has the same prompts
            **self.more,
        }


_PRIORITY = {"long-prefill-token-threshold": SMALL // 2, "scheduling-policy": "priority"}

WAYS: Final = {
    "operator": Way({"preemption": {"granularity": "operator"}}, MOST),
    "layer": Way({"preemption": {"granularity": "layer"}}, MOST),
    "FCFS": Way({"policy": "fcfs"}, MOST),
    **{
        f"EDF, chunks of {tokens}": Way(
            {"policy": "edf", "policy_options": {"token_budget": tokens}}, tokens
        )
        for tokens in (LARGE, SMALL)
    },
    "default policy": Way({}, LARGE),
    f"stock, threshold {SMALL // 2}": Way(None, SMALL, _PRIORITY),
}
"""Where no chunks are named, a step holds the longest prompt."""


class Load(NamedTuple):
    """The offered load: the mean predicted time of a prefill alone, seconds, the factor on the
    paper's objectives, and requests per second."""

    mean_s: float
    slo_scale: float
    rate: float


@click.command(name="preemption_replay", context_settings={"show_default": True})
@number_option("--minutes", default=1.0, least=0.02, most=600)
@number_option(
    *("--load", "share"),
    default=0.9,
    least=0.01,
    most=10,
    words="Share of the engine's time that the prefills fill, as predicted.",
)
@seed
@as_json
def preemption_replay(minutes: float, share: float, seed: int, as_json: bool) -> None:
    """Replay FlowPrefill's mix of prompts on real Ray and vLLM, with and without preemption.

    \b
    Example:
      sluice bench preemption_replay --minutes 1 --json
    """
    say = Console(stderr=True).print
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        directory = Path(folder)
        model = local_model(directory, max_positions=MOST + 16)
        say("timing prompts alone")
        load, workload = make_load(share, timed(model, directory), 60 * minutes, seed)
        results = {}
        for name, way in WAYS.items():
            say(f"{name}: starting")
            results[name] = measure(way, model, load, workload, directory)
            done = results[name]["all"]
            say(f"{name}: {done['answered']} of {done['sent']} answered")
    words = f"{workload.description} {workload.scaling}"
    rows = [{"way": name, **each} for name, each in results.items()]
    attained = [f"classes.{task}.attained" for task in FLOWPREFILL_SHARES]
    others = ("classes.text.ttft_ms", "suspensions", "blocked_ms", "machine_busy")
    title = f"TTFT within the objective, of all that were sent, at {load.rate:.2f} requests/s"
    shown = table(rows, "way", "all.attained", *attained, *others, title=title)
    show({"workload": words, "load": load._asdict(), "ways": results}, [shown], as_json)
    raise SystemExit(any(row["unanswered"] for row in rows))


# The load.


def make_load(
    share: float, alone: PolynomialTTFT, seconds: float, seed: int
) -> tuple[Load, Workload]:
    """Poisson arrivals for about this long, with the mix's lengths and objectives, at the rate at
    which their prefills fill ``share`` of the time if each takes as long as ``alone``."""
    sample = flowprefill(PAPER_MODEL, 1.0, _SAMPLE, seed)
    count = max(2, round(share * seconds / _mean_s(sample, alone, SHRINK)))
    drawn = flowprefill(PAPER_MODEL, 1.0, count, seed)
    # Of the requests drawn: a few long ones more or less change the load.
    mean_s = _mean_s(drawn, alone, SHRINK)
    slo_scale = mean_s / _mean_s(drawn, PolynomialTTFT.of_steps(PAPER_SETUP.truth), 1.0)
    ttft_s = FLOWPREFILL_TTFT_S[PAPER_MODEL]
    arrivals = tuple(
        each._replace(
            prompt_tokens=_shrunk(each, SHRINK),
            slo=SLO(ttft_s=ttft_s[each.task] * slo_scale, service_class=each.task),
        )
        for each in drawn.arrivals
    )
    words = (
        f"Tasks and prompt lengths of FlowPrefill Table 1, divided by {SHRINK:g}; TTFT of Table 2 "
        f"for {PAPER_MODEL} times {slo_scale:.4g}."
    )
    rate = share / mean_s
    workload = stretched(replace(drawn, arrivals=arrivals, description=words), drawn.rate / rate)
    return Load(mean_s, slo_scale, rate), workload


def _shrunk(arrival: Arrival, shrink: float) -> int:
    return max(1, round(arrival.prompt_tokens / shrink))


def _mean_s(workload: Workload, alone: PolynomialTTFT, shrink: float) -> float:
    """Mean predicted time of the prefills."""
    return fmean(alone.seconds(_shrunk(each, shrink)) for each in workload.arrivals)


def timed(model: Path, directory: Path) -> PolynomialTTFT:
    """Times of prompts alone on stock vLLM, by length: as its client sees them, one at a time."""
    lengths = [max(2, round(MOST * part)) for part in _TIMED_SHARES]
    samples = []
    with vllm_server(model, NAME, Way(None, MOST).vllm_args(), directory / "timed.log") as url:
        for number, length in enumerate(lengths[:2] + lengths * _TIMED):
            one = Workload("one", (Arrival(0.0, length, 1, SLO(ttft_s=1.0)),))
            (outcome,) = _send(url, one, tokens_body)
            if number >= 2 and outcome.ttft_s is not None:  # the first two warm up
                samples.append(StepSample.of([(length, 0)], seconds=outcome.ttft_s))
    return fit(samples, "polynomial_ttft")[0]


def _send(
    url: str, workload: Workload, body: Body, on_sent: Callable[[], None] = lambda: None
) -> list[Outcome]:
    url = f"{url}/v1/completions"
    return asyncio.run(
        replay_workload(url, NAME, workload, on_sent=on_sent, body=body, exact=False)
    )


def tokens_body(model: str, number: int, arrival: Arrival) -> Json:
    """A completion whose prompt has exactly the tokens of ``arrival``, at random."""
    chance = random.Random(f"{number}/{arrival.prompt_tokens}")
    prompt = random_prompt(chance, arrival.prompt_tokens)
    return stream_body(model, prompt, arrival.output_tokens, temperature=0, ignore_eos=True)


def _with_priority(model: str, number: int, arrival: Arrival) -> Json:
    """The same for stock vLLM, which ranks it by its objective."""
    due_s = arrival.slo.ttft_s or 0.0
    return {**tokens_body(model, number, arrival), "priority": round(1e3 * due_s)}


# The ways.


def measure(way: Way, model: Path, load: Load, workload: Workload, directory: Path) -> Json:
    """Serve by ``way``, replay the workload's first seconds to warm up, and then all of it."""
    body = tokens_body if way.engine is not None else _with_priority
    with _served(way, model, load, directory) as url:
        _send(url, window(workload, 0.0, _WARM_UP_S), body)
        before = metrics(url) if way.engine is not None else {}
        meter = Meter()
        outcomes = _send(url, workload, body, meter.stop)
        after = metrics(url) if way.engine is not None else {}
    stops = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {**summary(outcomes, stops), "machine_busy": meter.usage.machine_busy}


@contextmanager
def _served(way: Way, model: Path, load: Load, directory: Path) -> Iterator[str]:
    """The address of the server."""
    if way.engine is None:
        with vllm_server(model, NAME, way.vllm_args(), directory / "stock.log") as url:
            yield url
    else:
        with application(config_of(way, model, load, directory)) as served:
            yield served.url


def config_of(way: Way, model: Path, load: Load, directory: Path) -> SluiceConfig:
    """One replica that schedules by ``way``, without admission: no request is guaranteed."""
    assert way.engine is not None
    engine = {
        "model": str(model),
        "served_model_name": NAME,
        "cache_dir": directory,
        "profile_budget_s": _PROFILE_S,
        "vllm_args": way.vllm_args(),
        **way.engine,
    }
    ttft_s = FLOWPREFILL_TTFT_S[PAPER_MODEL]
    classes = {name: {"ttft_ms": 1e3 * each * load.slo_scale} for name, each in ttft_s.items()}
    default = next(iter(FLOWPREFILL_SHARES))
    return SluiceConfig.model_validate(
        {
            "engine": engine,
            "replica": {"count": 1},
            "controller": {"admission": NO_ADMISSION},
            "router": {"port": free_port(), "classes": classes, "default_class": default},
        }
    )


def summary(outcomes: Sequence[Outcome], stops: Mapping[str, float]) -> Json:
    """The report of one way, as plain data; ``stops`` is the increase of the replica's metrics."""
    count = stops.get("sluice_prefill_stop_seconds_count", 0.0)
    total_s = stops.get("sluice_prefill_stop_seconds_sum", 0.0)
    return {
        "classes": by_class(outcomes, FLOWPREFILL_SHARES),
        "all": of_class(outcomes),
        "unanswered": sorted({each.reason for each in outcomes if each.end is not End.ANSWERED}),
        "late_ms": milliseconds([each.late_s for each in outcomes], (0.99,)),
        "suspensions": int(stops.get("sluice_prefill_suspensions_total", 0)),
        "blocked_ms": round(1e3 * total_s / count, 2) if count else None,
    }
