"""Where the order of simulated annealing is used, in real vLLM: before the engine, or in it.

Run with ``python -m tests.replica.annealed_dispatch [--rounds 5] [--requests 40] [--batch 4]``. The
requests are there at once, half chat and half code. In turns on one engine: ``fcfs``, sent in the
order of arrival and served so; ``dispatch``, sent in the order of one mapping to the same engine,
as in the paper (002 §5.1); ``first_batch`` and ``in_order``, planned by the policy ``annealing``. G
is the met requests per second of latency. The dispatch knows every output length; the policy
predicts them from finished outputs."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from statistics import median

import click
import numpy as np

from sluice.benchmarks.options import number_option
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.batching.annealing import Jobs, Schedule, anneal, phases_of, predict
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import row_of

from .in_process import InProcess, Requests, params_of

SYSTEMS = {
    "fcfs": ("fcfs", {}),
    "dispatch": ("fcfs", {}),
    "first_batch": ("annealing", {"admits": "first_batch"}),
    "in_order": ("annealing", {"admits": "in_order"}),
}


def make_requests(count: int, seed: int, whole_s: float) -> Requests:
    """Half chat, half code, shuffled; objectives are shares of ``whole_s``, the time of all."""
    chance = random.Random(seed)
    chat, code = SLO(ttft_s=whole_s / 3), SLO(e2e_s=whole_s / 2)
    requests: Requests = []
    for number in range(count):
        prompt = [chance.randrange(300, 1000) for _ in range(chance.randrange(16, 400))]
        requests.append((prompt, int(2 ** chance.uniform(2, 7)), (chat, code)[number % 2]))
    chance.shuffle(requests)
    return requests


def serve(engine: InProcess, requests: Requests) -> list[tuple[float, float]]:
    """Time to the first token and to the end of each, seconds; all are sent before a step."""
    core, started_s = engine.llm.llm_engine, time.monotonic()
    for number, (prompt, output, slo) in enumerate(requests):
        params = params_of(str(number), output, slo)
        core.add_request(str(number), {"prompt_token_ids": prompt}, params)
    first_s: dict[int, float] = {}
    ended_s: dict[int, float] = {}
    while core.has_unfinished_requests():
        for result in core.step():
            number, now_s = int(result.request_id), time.monotonic() - started_s
            first_s.setdefault(number, now_s)
            if result.finished:
                ended_s[number] = now_s
    return [(first_s[number], ended_s[number]) for number in range(len(requests))]


def mapped(engine: InProcess, requests: Requests, batch: int) -> list[int]:
    """The order of one mapping, by the engine's corrected latency model."""
    phases = phases_of(engine.scheduler._local.model)
    rows = [row_of(slo or SLO(), 0.0, len(prompt), output) for prompt, output, slo in requests]
    found = anneal(Jobs(predict(np.array(rows), phases, 0.0, batch, 0)), Schedule.paper())
    return [int(number) for number in found.order]


def one(engine: InProcess, system: str, requests: Requests, batch: int) -> tuple[float, float]:
    """G and attainment of one system."""
    policy, options = SYSTEMS[system]
    engine.use(policy, {**options, "batch_size": batch} if options else None)
    if system == "dispatch":
        requests = [requests[number] for number in mapped(engine, requests, batch)]
    times = serve(engine, requests)
    met = 0
    for (first_s, end_s), (_, _, slo) in zip(times, requests, strict=True):
        assert slo is not None
        met += first_s <= (slo.ttft_s or end_s) and end_s <= (slo.e2e_s or end_s)
    return met / sum(end_s for _, end_s in times), met / len(requests)


@click.command()
@number_option("--rounds", default=5, least=1, most=100, words="Of each system, in turns.")
@number_option("--requests", default=40, least=2, most=64, words="All at once.")
@number_option("--batch", default=4, least=1, most=64, words="Most requests that run at once.")
def main(rounds: int, requests: int, batch: int) -> None:
    """Print G over that of FCFS, and attainment."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder:
        model = local_model(Path(folder), layers=2, hidden=128)
        engine = InProcess(model, Path(folder), "fcfs", max_num_seqs=batch)
        for seed in range(rounds):
            # The time of all of them, first come, first served, is the unit of the objectives.
            plain = serve(engine, make_requests(requests, seed, 1e3))
            whole_s = max(end_s for _, end_s in plain)
            for name, own in found.items():
                own.append(one(engine, name, make_requests(requests, seed, whole_s), batch))
        engine.close()
    for name, own in found.items():
        over = [g / base for (g, _), (base, _) in zip(own, found["fcfs"], strict=True)]
        attained = sum(share for _, share in own) / len(own)
        ranges = f"{min(over):.2f} to {max(over):.2f}"
        click.echo(f"{name}: G x {median(over):.2f} ({ranges}), attained {attained:.2f}")


if __name__ == "__main__":
    main()
