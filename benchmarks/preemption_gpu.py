"""Preemption of prefills on a GPU: all figures that a CPU cannot show, in one run and one table.

Run with ``python -m sluice.benchmarks.preemption_gpu``. One real vLLM engine at a time, in a
process of its own, with a model of random weights that is written here, so nothing is downloaded:

- blocking: how long a long prefill takes to stop, and what its checks cost, by how far launches may
  run ahead of the device, and by where the checks are;
- memory: held by suspended prefills, and reserved for them;
- serving: requests of FlowPrefill's mix that get their first token in time, with preemption, at
  chunk ends, and by stock vLLM with priorities and a threshold of long prefills.

With ``--model tiny`` it runs on a CPU within a minute. Its figures have no meaning then.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from sluice.benchmarks import preemption_device as device
from sluice.benchmarks.engine_process import EngineProcess
from sluice.benchmarks.one_engine import Work
from sluice.benchmarks.preemption_device import UNPACED, Blocking, Held, Way
from sluice.benchmarks.preemption_trials import random_prompt
from sluice.benchmarks.stock_engine import StockEngine
from sluice.scheduling.latency import LatencyModel
from sluice.simulation.workloads.settings import flowprefill


class Size(NamedTuple):
    """A model, and the load for it.

    Attributes:
        hidden, intermediate, layers, heads, kv_heads, vocabulary: of a Llama.
        most: max tokens of a step, and tokens of the long prompt.
        short: tokens of the short prompt.
        chunks: tokens of the chunks of prefills without checks.
        longest: tokens of a prompt and its output.
        divisor: of the lengths of FlowPrefill's prompts.
        together: prefills run together while their tokens are below this sum.
        args: further arguments of vLLM.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    most: int
    short: int
    chunks: tuple[int, int]
    longest: int
    divisor: int
    together: int
    args: dict[str, Any]


SIZES = {
    "8b": Size(
        *(4096, 14336, 32, 32, 8, 128_256),
        most=8192,
        short=256,
        chunks=(512, 2048),
        longest=32_768,
        divisor=1,
        together=1024,
        args={"max_num_seqs": 64, "block_size": 16, "kv_cache_memory_bytes": None},
    ),
    "tiny": Size(
        *(128, 320, 2, 2, 1, 2048),
        most=512,
        short=32,
        chunks=(64, 128),
        longest=1024,
        divisor=64,
        together=64,
        args={
            "max_num_seqs": 16,
            "block_size": 32,
            "kv_cache_memory_bytes": 8 << 20,
            "enforce_eager": True,
        },
    ),
}
"""The first is Llama 3 8B."""


def ways(size: Size) -> list[Way]:
    """The ways to compare, the last one without checks."""
    chunks = (Way(f"{chunk}-token chunks", None, chunk) for chunk in size.chunks)
    return [
        Way("operator, 2 ahead"),
        Way("operator, 1 ahead", ahead=1),
        Way("operator, 4 ahead", ahead=4),
        Way("operator, sync at each check", ahead=0),
        Way("operator, not paced", ahead=UNPACED),
        Way("layer, 2 ahead", "layer"),
        *chunks,
        Way("none", None),
    ]


class Served(NamedTuple):
    """One run.

    Attributes:
        way: that served it.
        load: offered rate over the rate that saturates the engine.
        rate: requests per second.
        attained: share of requests with their first token in time.
        goodput: requests per second with their first token in time.
        by_task: the share by task.
    """

    way: str
    load: float
    rate: float
    attained: float
    goodput: float
    by_task: dict[str, float]


class _Offer(NamedTuple):
    """Requests at a rate, with the task of each."""

    load: float
    rate: float
    requests: list[tuple[float, Work]]
    tasks: list[str]

    def result(self, way: str, ttft_s: Sequence[float]) -> Served:
        """How ``way`` served it."""
        good = [
            seconds <= work.ttft_s for seconds, (_, work) in zip(ttft_s, self.requests, strict=True)
        ]
        by_task: dict[str, list[bool]] = {}
        for task, each in zip(self.tasks, good, strict=True):
            by_task.setdefault(task, []).append(each)
        attained = sum(good) / len(good)
        return Served(
            way,
            self.load,
            round(self.rate, 3),
            round(attained, 4),
            round(attained * self.rate, 3),
            {task: round(sum(each) / len(each), 4) for task, each in sorted(by_task.items())},
        )


@click.command(context_settings={"show_default": True})
@click.option("--model", "name", default="8b", type=click.Choice(list(SIZES)))
@click.option("--rounds", default=20, type=click.IntRange(1, 10_000), help="Arrivals per way.")
@click.option("--requests", default=200, type=click.IntRange(1, 100_000), help="Requests per load.")
@click.option(
    "--load",
    "loads",
    multiple=True,
    default=(0.6, 0.8, 0.95),
    type=click.FloatRange(0.01, 10),
    help="Offered rate over the rate that saturates the engine.",
)
@click.option("--objectives", default=1.0, type=click.FloatRange(1e-3, 1e3), help="SLO scale.")
@click.option("--seed", default=0)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def preemption_gpu(
    name: str,
    rounds: int,
    requests: int,
    loads: tuple[float, ...],
    objectives: float,
    seed: int,
    as_json: bool,
) -> None:
    """Measure the preemption of prefills on a GPU."""
    size = SIZES[name]
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        found = {"model": name} | measure(
            size, Path(directory), rounds, requests, loads, objectives, seed
        )
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        Console().print(table(found))


def measure(
    size: Size,
    directory: Path,
    rounds: int,
    requests: int,
    loads: Sequence[float],
    objectives: float,
    seed: int,
    host: Callable[[Callable[[], Any]], Any] = EngineProcess,
) -> dict[str, Any]:
    """All measurements, as plain data. ``host`` runs the engines."""
    model = write_model(directory / "model", size)
    args = size.args | {
        "max_model_len": size.longest,
        "max_num_batched_tokens": size.most,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    }
    options = {"granularity": "operator", "depth": device.DEPTH, "least_tokens": 1}
    options |= {"chunk_tokens": size.most, "batch_tokens": size.together}
    served: list[Served] = []
    engine = host(partial(device.make, model, directory, options, args))
    try:
        found = {
            "device": engine.call(device.device_name),
            "blocking": engine.call(
                device.blocking, ways(size), (size.most, size.short), rounds, seed
            ),
            "memory": engine.call(device.memory, size.most, seed),
        }
        latency = engine.call(device.learn, size.most, seed)
        offers = [_offer(size, latency, load, requests, objectives, seed) for load in loads]
        suspending = (Way("operator"), Way(f"{size.chunks[1]}-token chunks", None, size.chunks[1]))
        for offer in offers:
            for way in suspending:
                ttft_s = engine.call(
                    device.serve_preempting, way, size.most, size.together, offer.requests
                )
                served.append(offer.result(way.name, ttft_s))
    finally:
        engine.close()
    stock = host(partial(StockEngine, model, **args))
    try:
        unchecked = found["blocking"][-1]
        found["blocking"].append(stock.call(device.stock_alone, size.most, rounds, seed, unchecked))
        for offer in offers:
            for threshold in size.chunks:
                ttft_s = stock.call(device.serve_stock, size.most, threshold, offer.requests)
                served.append(offer.result(f"stock, threshold {threshold}", ttft_s))
    finally:
        stock.close()
    for part in ("blocking", "memory"):
        found[part] = [asdict(each) for each in found[part]]
    return found | {"serving": [each._asdict() for each in served]}


def write_model(directory: Path, size: Size) -> Path:
    """The configuration of a Llama; vLLM makes up the weights."""
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.longest,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(directory)
    return directory


def _offer(
    size: Size, latency: LatencyModel, load: float, requests: int, objectives: float, seed: int
) -> _Offer:
    """FlowPrefill's mix at a share of the rate at which prompts, one after the other, take all the
    engine's time."""
    longest = size.longest - 2

    def tokens_of(prompt: int) -> int:
        return min(longest, max(2, prompt // size.divisor))

    drawn = flowprefill("llama3-8b", 1.0, requests, seed, objectives).arrivals
    work_s = [device.prefill_s(latency, tokens_of(each.prompt_tokens), size.most) for each in drawn]
    rate = load * len(drawn) / sum(work_s)
    chance = random.Random(seed)
    made = []
    for index, each in enumerate(drawn):
        assert each.slo.ttft_s is not None
        prompt = random_prompt(chance, tokens_of(each.prompt_tokens))
        made.append((each.arrival_s / rate, Work(f"r{index}", prompt, 1, each.slo.ttft_s)))
    return _Offer(load, rate, made, [each.task for each in drawn])


def table(found: dict[str, Any]) -> Table:
    """All measurements as a table."""
    made = Table("measured", "way", "figures", title=f"{found['model']} on {found['device']}")
    for each in (Blocking(**fields) for fields in found["blocking"]):
        figures = f"alone {each.tokens_s:.0f} tokens/s, {100 * each.cost:+.2f} % time"
        if each.short is not None:
            figures += f"; TTFT short {each.short:.1f} ms, long {each.long:.1f} ms"
        if each.stop is not None:
            figures += f"; {each.stops} stops in {each.stop:.1f} ms, most {each.stop_most:.1f} ms"
        made.add_row("blocking", each.way, figures)
    made.add_section()
    for held in (Held(**fields) for fields in found["memory"]):
        made.add_row(
            "memory",
            f"{held.prefills} suspended",
            f"{held.held:.1f} MiB held, {held.reserved:.1f} MiB reserved",
        )
    made.add_section()
    for run in (Served(**fields) for fields in found["serving"]):
        tasks = ", ".join(f"{task} {100 * share:.0f} %" for task, share in run.by_task.items())
        made.add_row(
            f"serving, load {run.load:g}",
            run.way,
            f"{100 * run.attained:.1f} % in time, {run.goodput:.2f} of {run.rate:.2f}/s ({tasks})",
        )
    return made


if __name__ == "__main__":
    preemption_gpu()
