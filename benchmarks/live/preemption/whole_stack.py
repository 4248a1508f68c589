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
import numpy as np
from rich.console import Console

from sluice.benchmarks.experiments.systems import SETUPS
from sluice.benchmarks.live.application import application, metrics
from sluice.benchmarks.live.client import Body, End, Json, Outcome, stream_body
from sluice.benchmarks.live.client import replay as replay_workload
from sluice.benchmarks.live.preemption.command import random_prompt
from sluice.benchmarks.live.processes import vllm_server
from sluice.benchmarks.live.report import by_class, of_class, table
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

PAPER_CHUNKS: Final = (2_048, 8_192)
"""Tokens of its two baselines with chunks and EDF; here they are divided like the lengths."""

NAME: Final = "small"
SHRINK: Final = 4.0
"""Divisor of the paper's lengths."""

_WARM_UP_S = 5.0
_PROFILE_S = 10.0
_TIMED_SHARES = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 1.0)
_TIMED = 3
_SAMPLE = 4_000


class Way(NamedTuple):
    """How prefills are scheduled: fields of the engine's configuration, ``None`` for stock vLLM's
    own server, and vLLM's arguments in addition to those of all ways."""

    engine: Mapping[str, Any] | None
    vllm_args: Mapping[str, Any]


class Sizes(NamedTuple):
    """The model's directory, the divisor of the paper's lengths, and the longest prompt, tokens."""

    model: Path
    shrink: float
    most: int

    def ways(self) -> dict[str, Way]:
        """All ways by name. Without chunks a step holds the longest prompt."""
        whole = {"max-num-batched-tokens": self.most}
        small, large = (round(tokens / self.shrink) for tokens in PAPER_CHUNKS)
        chunks = {
            f"EDF, chunks of {tokens}": Way(
                {"policy": "edf", "policy_options": {"token_budget": tokens}},
                {"max-num-batched-tokens": tokens},
            )
            for tokens in (large, small)
        }
        stock = {
            "max-num-batched-tokens": small,
            "long-prefill-token-threshold": small // 2,
            "scheduling-policy": "priority",
        }
        return {
            "operator": Way({"preemption": {"granularity": "operator"}}, whole),
            "layer": Way({"preemption": {"granularity": "layer"}}, whole),
            "FCFS": Way({"policy": "fcfs"}, whole),
            **chunks,
            "default policy": Way({}, {"max-num-batched-tokens": large}),
            f"stock, threshold {small // 2}": Way(None, stock),
        }

    def args_of(self, way: Way) -> Json:
        """vLLM's arguments of a way."""
        return {
            "max-model-len": self.most + 16,
            "kv-cache-memory-bytes": 512 << 20,
            "block-size": 32,
            "max-num-seqs": 64,
            "enforce-eager": True,
            "enable-prefix-caching": False,  # the warm-up has the same prompts
            **way.vllm_args,
        }


class Load(NamedTuple):
    """The offered load.

    Attributes:
        share: of the engine's time that predicted prefills fill.
        alone: coefficients of the time of a prefill alone, see :class:`PolynomialTTFT`.
        mean_s: mean predicted time of a prefill, alone.
        slo_scale: factor on the paper's objectives.
        rate: requests per second.
    """

    share: float
    alone: tuple[float, ...]
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
        most = longest_prompt(SHRINK)
        sizes = Sizes(local_model(directory, max_positions=most + 16), SHRINK, most)
        say("timing prompts alone")
        load, workload = make_load(share, timed(sizes, directory), 60 * minutes, SHRINK, seed)
        results = {}
        for name, way in sizes.ways().items():
            say(f"{name}: starting")
            results[name] = measure(way, sizes, load, workload, directory)
            done = results[name]["all"]
            say(f"{name}: {done['answered']} of {done['sent']} answered")
    words = f"{workload.description} {workload.scaling}"
    found = {"workload": words, "load": load._asdict(), "ways": results}
    rows = [{"way": name, **each} for name, each in results.items()]
    attained = [f"classes.{task}.attained" for task in FLOWPREFILL_SHARES]
    others = ("classes.text.ttft_ms", "suspensions", "blocked_ms", "machine_busy")
    title = f"TTFT within the objective, of all that were sent, at {load.rate:.2f} requests/s"
    shown = table(rows, "way", "all.attained", *attained, *others, title=title)
    show(found, [shown], as_json)
    raise SystemExit(
        any(each["all"]["answered"] < each["all"]["sent"] for each in results.values())
    )


# The load.


def longest_prompt(shrink: float) -> int:
    """Length that no prompt exceeds, tokens."""
    columns = (column.lengths for column in FLOWPREFILL_PROMPTS.values())
    return ceil(max(each.cap * each.reach for each in columns) / shrink)


def make_load(
    share: float, alone: PolynomialTTFT, seconds: float, shrink: float, seed: int
) -> tuple[Load, Workload]:
    """Poisson arrivals for about this long, with the mix's lengths and objectives, at the rate at
    which their prefills fill ``share`` of the time if each takes as long as ``alone``."""
    sample = flowprefill(PAPER_MODEL, 1.0, _SAMPLE, seed)
    count = max(2, round(share * seconds / _mean_s(sample, alone, shrink)))
    drawn = flowprefill(PAPER_MODEL, 1.0, count, seed)
    # Of the requests drawn: a few long ones more or less change the load.
    mean_s = _mean_s(drawn, alone, shrink)
    slo_scale = mean_s / _mean_s(drawn, PolynomialTTFT.of_steps(PAPER_SETUP.truth), 1.0)
    ttft_s = FLOWPREFILL_TTFT_S[PAPER_MODEL]
    arrivals = tuple(
        each._replace(
            prompt_tokens=_shrunk(each, shrink),
            slo=SLO(ttft_s=ttft_s[each.task] * slo_scale, service_class=each.task),
        )
        for each in drawn.arrivals
    )
    words = (
        f"Tasks and prompt lengths of FlowPrefill Table 1, divided by {shrink:g}; TTFT of Table 2 "
        f"for {PAPER_MODEL} times {slo_scale:.4g}."
    )
    rate = share / mean_s
    workload = stretched(replace(drawn, arrivals=arrivals, description=words), drawn.rate / rate)
    return Load(share, alone.coefficients, mean_s, slo_scale, rate), workload


def _shrunk(arrival: Arrival, shrink: float) -> int:
    return max(1, round(arrival.prompt_tokens / shrink))


def _mean_s(workload: Workload, alone: PolynomialTTFT, shrink: float) -> float:
    """Mean predicted time of the prefills."""
    return fmean(alone.seconds(_shrunk(each, shrink)) for each in workload.arrivals)


def timed(sizes: Sizes, directory: Path) -> PolynomialTTFT:
    """Times of prompts alone on stock vLLM, by length: as its client sees them, one at a time."""
    args = sizes.args_of(Way(None, {"max-num-batched-tokens": sizes.most}))
    lengths = [max(2, round(sizes.most * part)) for part in _TIMED_SHARES]
    samples = []
    with vllm_server(sizes.model, NAME, args, directory / "timed.log") as url:
        for number, length in enumerate(lengths[:2] + lengths * _TIMED):
            one = Workload("one", (Arrival(0.0, length, 1, SLO(ttft_s=1.0)),))
            (outcome,) = _send(url, one, tokens_body)
            if number >= 2 and outcome.ttft_s is not None:  # the first two warm up
                samples.append(StepSample.of([(length, 0)], seconds=outcome.ttft_s))
    return fit(samples, "polynomial_ttft")[0]


def _send(
    url: str, workload: Workload, body: Body, on_sent: Callable[[], None] = lambda: None
) -> list[Outcome]:
    completions = f"{url}/v1/completions"
    sending = replay_workload(completions, NAME, workload, on_sent=on_sent, body=body, exact=False)
    return asyncio.run(sending)


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


def measure(way: Way, sizes: Sizes, load: Load, workload: Workload, directory: Path) -> Json:
    """Serve by ``way``, replay the workload's first seconds to warm up, and then all of it."""
    body = tokens_body if way.engine is not None else _with_priority
    with _served(way, sizes, load, directory) as url:
        _send(url, window(workload, 0.0, _WARM_UP_S), body)
        before = metrics(url) if way.engine is not None else {}
        meter = Meter()
        outcomes = _send(url, workload, body, meter.stop)
        after = metrics(url) if way.engine is not None else {}
    stops = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {**summary(outcomes, stops), "machine_busy": meter.usage.machine_busy}


@contextmanager
def _served(way: Way, sizes: Sizes, load: Load, directory: Path) -> Iterator[str]:
    """The address of the server."""
    if way.engine is None:
        args = sizes.args_of(way)
        with vllm_server(sizes.model, NAME, args, directory / "stock.log") as url:
            yield url
        return
    with application(config_of(way, sizes, load, directory)) as served:
        yield served.url


def config_of(way: Way, sizes: Sizes, load: Load, directory: Path) -> SluiceConfig:
    """One replica that schedules by ``way``, without admission: no request is guaranteed."""
    assert way.engine is not None
    engine = {
        "model": str(sizes.model),
        "served_model_name": NAME,
        "cache_dir": directory,
        "profile_budget_s": _PROFILE_S,
        "vllm_args": sizes.args_of(way),
        **way.engine,
    }
    classes = {
        name: {"ttft_ms": 1e3 * ttft_s * load.slo_scale}
        for name, ttft_s in FLOWPREFILL_TTFT_S[PAPER_MODEL].items()
    }
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
    """The report of one way, as plain data.

    Args:
        outcomes: of every request that was sent.
        stops: increase of the replica's metrics during the replay.
    """
    count = stops.get("sluice_prefill_stop_seconds_count", 0.0)
    total_s = stops.get("sluice_prefill_stop_seconds_sum", 0.0)
    return {
        "classes": by_class(outcomes, FLOWPREFILL_SHARES),
        "all": of_class(outcomes),
        "unanswered": sorted({each.reason for each in outcomes if each.end is not End.ANSWERED}),
        "late_ms": round(1e3 * float(np.quantile([each.late_s for each in outcomes], 0.99)), 1),
        "suspensions": int(stops.get("sluice_prefill_suspensions_total", 0)),
        "blocked_ms": round(1e3 * total_s / count, 2) if count else None,
    }
