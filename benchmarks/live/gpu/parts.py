"""Parts of ``sluice bench gpu`` without a command of their own:
``python -m sluice.benchmarks.live.gpu.parts PART FILE`` prints the rows of one as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.drive import campaign
from sluice.benchmarks.live.gateway.engine import MODEL
from sluice.benchmarks.live.peers.systems import SYSTEMS, Setting
from sluice.benchmarks.live.report import quantiles
from sluice.replica.config import EngineConfig
from sluice.replica.engine import EngineRequest, ResponseHead
from sluice.replica.vllm.setup import survive_module_scan
from sluice.scheduling.request.objective import SLO

LONG, SHORT = 4096, 64
"""Tokens of the prompts of :func:`preemption`."""

_ROUNDS = 5

# An engine's process imports this program first, compiled policies and all, and then vLLM.
survive_module_scan()


class Given(NamedTuple):
    """What is measured: the model's path or hub id, vLLM's arguments by their names on the command
    line, the number of GPUs, 1 or 0, of short prompts in :func:`preemption`, and of sequences in
    the largest batch, seconds of arrivals, and a folder, which has it as JSON in FILE."""

    model: str
    args: Json
    gpus: int
    moments: int
    decodes: int
    seconds: float
    folder: str


def start(given: Given) -> list[Json]:
    """Seconds from the start of a server with one engine to its first answer. At the second start
    vLLM finds the code that it compiled at the first one."""
    setting, rows = Setting(given.model, given.args, 1, given.gpus, {}), list[Json]()
    with campaign() as bench:
        for name in ("stock", "sluice") * 2:
            began_s = time.monotonic()
            with SYSTEMS[name].start(setting)(bench):
                rows.append({"system": name, "seconds": round(time.monotonic() - began_s, 1)})
    return rows


async def preemption(given: Given) -> Json:
    """How long a running prefill of :data:`LONG` tokens takes to stop before its next operator,
    for one of :data:`SHORT` that arrives at a random moment (``blocking``), and the TTFT of both;
    median and 99th percentile, milliseconds."""
    from sluice.replica.deployment import make_engine

    fields = {
        **{"model": given.model, "served_model_name": MODEL, "cache_dir": given.folder},
        **{"grammar_check_s": 0, "preemption": {"granularity": "operator"}},
        "vllm_args": {**given.args, "max-num-batched-tokens": LONG},
    }
    config = EngineConfig.model_validate(fields)
    engine, chance = make_engine(config, "preemption", 64, 0), random.Random(0)

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
        times_s: dict[str, list[float]] = {
            **{"blocking": [], "short": [], "short alone": short_s},
            **{"long": [], "long alone": long_s},
        }
        before = engine.state().summary
        for moment in range(given.moments):
            long = asyncio.create_task(ttft_s(LONG, f"long-{moment}", 1000.0))
            await asyncio.sleep(chance.uniform(0.05, 0.8) * median(long_s))
            times_s["short"].append(await ttft_s(SHORT, f"short-{moment}", 100.0))
            times_s["long"].append(await long)
            now = engine.state().summary
            if now["suspensions"] - before["suspensions"] == 1:
                times_s["blocking"].append(float(now["stop_s"] - before["stop_s"]))
            before = now
    finally:
        await engine.stop()
    times_ms = {name: [1e3 * each for each in own] for name, own in times_s.items()}
    shown = {f"{name} ms": quantiles(own, digits=2) for name, own in times_ms.items()}
    return {"moments": given.moments, "stops": len(times_s["blocking"]), **shown}


def steps(name: str, given: Given) -> list[Json]:
    """The parts of :mod:`sluice.replica.profiling.schedulers`."""
    if name == "speculation":
        # The second model runner takes drafts from its own drafter, not from the scheduler.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from sluice.replica.profiling import schedulers as of

    more = of.SPECULATIVE if name == "speculation" else {"async-scheduling": name == "async"}
    args = {**given.args, **more}
    core = of.Core(given.model, Path(given.folder), of.Counting, "deadline_triage", args)
    if name == "speculation":
        return of.verify_cost(core, [count for count in (1, 8, 64) if count <= given.decodes])
    if name == "async" and not core.pipelined:
        raise RuntimeError("vLLM has turned asynchronous scheduling off")
    return [of.compare(core, _ROUNDS, given.decodes)]


if __name__ == "__main__":
    part, file = sys.argv[1:]
    told = Given(**json.loads(Path(file).read_text()))
    if part == "preemption":
        found = [asyncio.run(preemption(told))]
    else:
        found = start(told) if part == "start" else steps(part, told)
    print(json.dumps(found), flush=True)
    os._exit(0)  # the threads of an engine core in this process would keep it
