"""Parts of ``sluice bench gpu`` without a command of their own:
``python -m sluice.benchmarks.live.gpu_parts PART FOLDER`` prints each row of one as a JSON line."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.engine import MODEL
from sluice.benchmarks.live.peers import SYSTEMS, Setting
from sluice.benchmarks.live.report import quantiles
from sluice.benchmarks.live.systems import campaign
from sluice.protocol.requests import EngineRequest, ResponseHead
from sluice.replica.config import EngineConfig
from sluice.replica.vllm.setup import survive_module_scan
from sluice.scheduling.request.objective import SLO

LONG, SHORT = 4096, 64
"""Tokens of the prompts of :func:`preemption`."""

_ROUNDS, _MOMENTS = 5, (20, 200)

# An engine's process imports this program first, compiled policies and all, and then vLLM.
survive_module_scan()


class Given(NamedTuple):
    """What is measured: the model's path or hub id, vLLM's arguments by their names on the command
    line, GPUs (0 or 1), seconds of arrivals, and a folder, which has it as ``given.json``."""

    model: str
    args: Json
    gpus: int
    seconds: float
    folder: str

    @property
    def decodes(self) -> int:
        """Sequences of the largest batch of decodes."""
        return 64 if self.gpus else 8


def engine_of(given: Given, args: Json) -> Json:
    """The configuration of Sluice's engine with vLLM's ``args``."""
    named = {"model": given.model, "served_model_name": MODEL, "cache_dir": given.folder}
    return {**named, "grammar_check_s": 0, "vllm_args": args}


async def preemption(given: Given) -> Json:
    """How long a running prefill takes to stop (``blocking``) for a short one that arrives at
    random, and the TTFT of both; median and P99, milliseconds."""
    from sluice.replica.deployment import make_engines

    args = {**given.args, "max-num-batched-tokens": LONG}
    config = EngineConfig.model_validate(engine_of(given, args) | {"preemption": True})
    (engine,), chance = make_engines(config, "preemption", 64, 0), random.Random(0)
    moments = _MOMENTS[given.gpus]

    async def ttft_s(tokens: int, name: str, objective_s: float) -> float:
        # Random, so that no prefix is found in a cache.
        prompt = chance.choices(range(300, 1000), k=tokens)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        request = EngineRequest(name, "completions", body, SLO(ttft_s=objective_s))
        began_s = time.monotonic()
        async for item in engine.generate(request):
            if isinstance(item, ResponseHead) and item.status != 200:
                raise RuntimeError(f"the engine refused a prompt of {tokens} tokens: {item}")
        return time.monotonic() - began_s

    await engine.start()
    try:
        long_s, short_s = [
            [await ttft_s(tokens, f"{tokens}-{n}", 1000.0) for n in range(_ROUNDS)]
            for tokens in (LONG, SHORT)
        ]
        stopped_s, before = list[tuple[float, ...]](), engine.state().summary
        for moment in range(moments):
            long = asyncio.create_task(ttft_s(LONG, f"long-{moment}", 1000.0))
            await asyncio.sleep(chance.uniform(0.05, 0.8) * min(long_s))
            both_s = await ttft_s(SHORT, f"short-{moment}", 100.0), await long
            now = engine.state().summary
            if now["suspensions"] - before["suspensions"] == 1:
                stopped_s.append((float(now["stop_s"] - before["stop_s"]), *both_s))
            before = now
    finally:
        await engine.stop()
    if not stopped_s:
        raise RuntimeError(f"no prefill stopped in {moments} moments")
    named = dict(zip(("blocking", "short", "long"), zip(*stopped_s, strict=True), strict=True))
    named |= {"short alone": tuple(short_s), "long alone": tuple(long_s)}
    times = {f"{x} ms": quantiles([1e3 * s for s in named[x]], digits=2) for x in named}
    return {"moments": moments, "stops": len(stopped_s), **times}


def steps(name: str, given: Given) -> list[Json]:
    """The parts of :mod:`sluice.benchmarks.live.step_rates`."""
    if name == "speculation":
        # The second model runner takes drafts from its own drafter, not from the scheduler.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from sluice.benchmarks.live import step_rates as of

    more = of.SPECULATIVE if name == "speculation" else {"async-scheduling": name == "async"}
    names = given.model, Path(given.folder), of.Counting, "deadline_triage"
    core = of.Core(*names, {**given.args, **more})
    if name == "speculation":
        return of.verify_cost(core, [count for count in (1, 8, 64) if count <= given.decodes])
    if name == "async" and not core.pipelined:
        raise RuntimeError("vLLM has turned asynchronous scheduling off")
    return [of.compare(core, _ROUNDS, given.decodes)]


def start(given: Given) -> Iterator[Json]:
    """Seconds from a server's start to its first answer; the second start finds compiled code."""
    setting = Setting(given.model, given.args, 1, given.gpus, {})
    with campaign() as bench:
        for name in ("stock", "sluice") * 2:
            began_s = time.monotonic()
            with SYSTEMS[name].start(setting)(bench):
                took_s = round(time.monotonic() - began_s, 1)
            yield {"system": name, "seconds": took_s}


if __name__ == "__main__":
    part, place = sys.argv[1:]
    given = Given(**json.loads(Path(place, "given.json").read_text()))
    found: Iterable[Json]
    if part == "preemption":
        found = [asyncio.run(preemption(given))]
    else:
        found = start(given) if part == "start" else steps(part, given)
    for row in found:
        print(json.dumps(row), flush=True)
    os._exit(0)  # the threads of an engine core in this process would keep it
