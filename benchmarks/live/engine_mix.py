"""Every batch policy inside real vLLM, under a mixed load for a stated time: does the engine run
the planned batches, is its greedy text that of stock vLLM, and does every request end?

Run with ``python -m sluice.benchmarks.live.engine_mix [--policy NAME] [--seconds 60] [--json]``.
Clients in a closed loop send chats, long prompts, code with an end-to-end objective, and batch work
without any, at several priorities, and abort some of them. The KV cache is too small for all, so
that requests are preempted. Prefix caching is off: with it, vLLM may find more in its cache than
was known when the batch was planned, and then rightly runs fewer tokens. The model computes in 32
bits: in 16, stock vLLM itself gives other texts for other batches.

The exit status is 1 if a batch differs from its plan, a text differs, a request is lost, or KV
blocks are not freed. Latencies are those of this machine, which may be busy with other processes
(the load average is shown): they do not rank policies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.options import as_json, number_option, show
from sluice.replica.config import EngineConfig
from sluice.replica.engine import EngineRequest, ResponseChunk, ResponseTail
from sluice.replica.vllm.engine import VllmEngine
from sluice.replica.vllm.local_model import local_model
from sluice.replica.vllm.setup import prepare_environment
from sluice.scheduling.batching import POLICIES
from sluice.scheduling.request.objective import SLO

VLLM_ARGS: dict[str, Any] = {
    "max-model-len": 2048,
    "max-num-batched-tokens": 512,
    "max-num-seqs": 16,
    "num-gpu-blocks-override": 160,
    "block-size": 32,
    "enable-prefix-caching": False,
    "dtype": "float32",
}
_POOL = 40
_ABORTED_SHARE = 0.1
_LONGEST_PATIENCE_S = 1.5
_THINK_S = 0.3
_VOCABULARY = (300, 1000)


class Kind(NamedTuple):
    """A kind of request: ranges of its lengths, tokens, and its objective."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    slo: SLO


KINDS = (
    Kind((20, 200), (16, 64), SLO(ttft_s=0.5, tpot_s=0.1, priority=4, service_class="chat")),
    Kind((600, 1500), (4, 16), SLO(ttft_s=5.0, tpot_s=0.2, service_class="document")),
    Kind((100, 400), (32, 96), SLO(e2e_s=10.0, priority=2, service_class="code")),
    Kind((50, 800), (16, 64), SLO(service_class="batch")),
)


class Job(NamedTuple):
    """One request of a client."""

    prompt: list[int]
    output_tokens: int
    slo: SLO


@dataclass
class Run:
    """One policy's run. ``mismatches``: batches that differ from their plan; ``differing``: texts
    that differ from stock vLLM's; ``lost``: requests that neither finished nor were aborted by
    their client; ``unreturned``: KV blocks still held at the end."""

    policy: str
    seconds: float
    steps: int
    finished: int
    aborted: int
    lost: int
    differing: int
    mismatches: int
    unreturned: int
    preemptions: int
    attained: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    plan_mean_us: float
    correction: float
    load_average: float

    @property
    def clean(self) -> bool:
        """Whether there was no error."""
        return not (self.lost or self.differing or self.mismatches or self.unreturned)


@click.command()
@click.option("--policy", "names", multiple=True, type=click.Choice(sorted(POLICIES)))
@number_option("--seconds", default=60.0, least=1, most=3600)
@number_option("--clients", default=24, least=1, most=256)
@click.option("--seed", default=0, show_default=True)
@as_json
def main(names: tuple[str, ...], seconds: float, clients: int, seed: int, as_json: bool) -> None:
    """Run each policy (default: all) in a real vLLM engine on this machine's CPU."""
    say = Console(stderr=True).print
    config = EngineConfig(served_model_name="local", vllm_args=VLLM_ARGS)
    jobs = make_jobs(seed)
    say("stock vLLM answers first")
    texts = asyncio.run(stock_texts(config, jobs))
    runs = []
    for name in names or sorted(POLICIES):
        load = _Load(config.model_copy(update={"policy": name}), jobs, texts, seed)
        runs.append(asyncio.run(load.run(seconds, clients)))
        say(f"{name}: {'clean' if runs[-1].clean else 'NOT clean'}")
    show([asdict(run) for run in runs], [_table(runs)], as_json)
    raise SystemExit(not all(run.clean for run in runs))


def make_jobs(seed: int) -> list[Job]:
    """The requests that clients draw from."""
    chance = random.Random(seed)
    jobs = []
    for number in range(_POOL):
        kind = KINDS[number % len(KINDS)]
        tokens = chance.randint(*kind.prompt)
        prompt = [chance.randrange(*_VOCABULARY) for _ in range(tokens)]
        jobs.append(Job(prompt, chance.randint(*kind.output), kind.slo))
    return jobs


async def stock_texts(config: EngineConfig, jobs: list[Job]) -> list[str]:
    """Stock vLLM's answer to each job alone."""
    model = str(local_model(config.cache_dir))
    prepare_environment(model, one_thread=True)
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args: dict[str, Any] = {name.replace("-", "_"): value for name, value in VLLM_ARGS.items()}
    stock = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            enforce_eager=True,
            distributed_executor_backend="uni",
            kv_cache_memory_bytes=256 << 20,
            **args,
        )
    )
    texts = []
    try:
        for number, job in enumerate(jobs):
            params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True)
            prompt = {"prompt_token_ids": job.prompt}
            async for output in stock.generate(prompt, params, f"stock-{number}"):
                text = output.outputs[0].text
            texts.append(text)
    finally:
        stock.shutdown()
    return texts


class _Load:
    """Clients of one engine, and their results."""

    def __init__(self, config: EngineConfig, jobs: list[Job], texts: list[str], seed: int) -> None:
        self._config = config
        self._jobs = jobs
        self._texts = texts
        self._seed = seed
        self._sent = self._finished = self._aborted = self._differing = self._attained = 0
        self._ttfts_s: list[float] = []
        self._tpots_s: list[float] = []

    async def run(self, seconds: float, clients: int) -> Run:
        """Start the engine, load it for ``seconds``, let it finish, and stop it."""
        engine = VllmEngine(self._config, self._config.policy, 4 * clients)
        await engine.start()
        try:
            before = engine.state().summary
            started_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(self._client(engine, number, started_s + seconds))
            await engine.drain()
            ended_s = time.monotonic()
            after = await _settled(engine)
        finally:
            await engine.stop()
        steps = int(after["steps"] - before["steps"])
        return Run(
            policy=self._config.policy,
            seconds=round(ended_s - started_s, 1),
            steps=steps,
            finished=self._finished,
            aborted=self._aborted,
            lost=self._sent - self._finished - self._aborted,
            differing=self._differing,
            mismatches=int(after["plan_mismatches"] - before["plan_mismatches"]),
            # vLLM keeps one block for itself.
            unreturned=int(after["total_kv_blocks"] - 1 - after["free_kv_blocks"]),
            preemptions=int(after["preemptions"] - before["preemptions"]),
            attained=round(self._attained / max(1, self._finished), 3),
            ttft_p50_ms=_median_ms(self._ttfts_s),
            tpot_p50_ms=_median_ms(self._tpots_s),
            plan_mean_us=round(
                1e6 * float(after["plan_seconds_sum"] - before["plan_seconds_sum"]) / max(1, steps)
            ),
            correction=round(float(after["correction"]), 3),
            load_average=round(os.getloadavg()[0], 2),
        )

    async def _client(self, engine: VllmEngine, number: int, until_s: float) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        while time.monotonic() < until_s:
            index = chance.randrange(len(self._jobs))
            patience_s = None
            if chance.random() < _ABORTED_SHARE:
                patience_s = chance.uniform(0, _LONGEST_PATIENCE_S)
            self._sent += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._ask(engine, index)
                    patience_s = None
            self._aborted += patience_s is not None
            await asyncio.sleep(chance.expovariate(1 / _THINK_S))

    async def _ask(self, engine: VllmEngine, index: int) -> None:
        job = self._jobs[index]
        body = {
            "model": "local",
            "prompt": job.prompt,
            "max_tokens": job.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        data = b""
        async for item in engine.generate(
            EngineRequest(f"mix-{self._sent}", "completions", body, job.slo)
        ):
            if isinstance(item, ResponseChunk):
                data += item.data
            elif isinstance(item, ResponseTail):
                self._ended(job, item.token_offsets_s)
        self._differing += json.loads(data)["choices"][0]["text"] != self._texts[index]

    def _ended(self, job: Job, offsets_s: tuple[float, ...]) -> None:
        self._finished += 1
        slo = job.slo
        ttft_s, e2e_s = offsets_s[0], offsets_s[-1]
        tpot_s = (e2e_s - ttft_s) / max(1, len(offsets_s) - 1)
        self._ttfts_s.append(ttft_s)
        self._tpots_s.append(tpot_s)
        limits = ((ttft_s, slo.ttft_s), (tpot_s, slo.tpot_s), (e2e_s, slo.e2e_s))
        self._attained += all(limit is None or value <= limit for value, limit in limits)


async def _settled(engine: VllmEngine) -> Any:
    """The summary once the engine has processed the last abort, or after some seconds at the
    latest."""
    deadline_s = time.monotonic() + 10
    while True:
        state = engine.state()
        busy = len(state.rows) or state.summary["running"] or state.summary["waiting"]
        if not busy or time.monotonic() > deadline_s:
            return state.summary
        await asyncio.sleep(0.02)


def _median_ms(values_s: list[float]) -> float:
    return round(1e3 * statistics.median(values_s), 1) if values_s else 0.0


def _table(runs: list[Run]) -> Table:
    names = list(asdict(runs[0]))
    table = Table(*(name.replace("_", " ") for name in names))
    for run in runs:
        table.add_row(*(str(value) for value in asdict(run).values()))
    return table


if __name__ == "__main__":
    main()
