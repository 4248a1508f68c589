"""The benefit of planned speculation lengths in a real engine, against fixed ones.

Run with ``python -m tests.replica.speculation_rates``: vLLM on one thread of this machine's CPU, a
small model whose greedy text repeats, and n-grams of the text as drafts. Requests of three kinds
arrive at random; objectives and rates are multiples of this machine's times, measured first. The
same arrivals run under each way of choosing lengths in turn. Each round gives, for each way, the
rate at which ``ENOUGH`` of the requests meet their objective; the report has the ratios."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from math import nan
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import click
import numpy as np

from sluice.benchmarks.live.report import Json, table
from sluice.benchmarks.options import as_json, number_option, show
from sluice.replica.scheduler.speculation import with_all_lengths
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs, SchedulerSettings, to_xargs
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.profile import fit
from sluice.scheduling.latency.speculation import AdaptiveLengths, Speculation
from sluice.scheduling.request.kernels import Ints
from sluice.scheduling.request.objective import SLO, TokenClock
from tests.replica.engines import OneEngine, quiet_vllm

ADAPTIVE = "adaptive"
WAYS: dict[str, int | None] = {ADAPTIVE: None, "fixed 0": 0, "fixed 3": 3, "fixed 5": 5}
"""Max drafted tokens that each decode checks; ``None``: as many as planned."""

LOADS = (0.6, 0.9, 1.2, 1.5)
MAX_DRAFTED = 5
POLICY = "deadline_triage"
CALIBRATED = 32  # Requests that arrive at once, to measure the engine's throughput
ENOUGH = 0.9  # Share of requests that must meet their objective


class Kind(NamedTuple):
    """Ranges of its tokens, and objectives in steps of one decode alone. A repetitive one has a
    prompt that repeats a phrase, and greedy text; else both are random, and drafts are wrong."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    ttft: float
    tpot: float
    repetitive: bool
    share: float


KINDS = {
    "chat": Kind((32, 96), (40, 80), 60.0, 2.5, True, 0.4),
    "code": Kind((96, 320), (40, 80), 150.0, 6.0, True, 0.4),
    "story": Kind((32, 96), (30, 60), 150.0, 6.0, False, 0.2),
}


@click.command(context_settings={"show_default": True})
@number_option("--rounds", default=3, least=1, most=1000)
@number_option("--requests", default=120, least=1, most=100_000, words="Of each run.")
@number_option("--load", "loads", default=LOADS, least=0.01, most=100, multiple=True)
@as_json
def main(rounds: int, requests: int, loads: tuple[float, ...], as_json: bool) -> None:
    """Compare planned speculation lengths with fixed ones, in real vLLM. Each --load is a rate, as
    a multiple of the engine's throughput without speculation; it is repeatable."""
    quiet_vllm()
    loads = tuple(sorted(loads))
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        model = repeating_model(Path(name))
        with closing(SpeculatingEngine(model, Path(name))) as engine:
            step_s, full_rate = calibrated(engine, CALIBRATED)
            rows = measure(engine, step_s, full_rate, requests, loads, rounds)
    found = {"step_ms": round(1e3 * step_s, 2), "full_rate": round(full_rate, 2), "loads": loads}
    line = (
        f"a decode alone {found['step_ms']} ms a token; all at once without speculation "
        f"{found['full_rate']} requests/s; loads {loads}"
    )
    title = f"attained by load, requests/s at {ENOUGH:.0%}, and of the adaptive way to this one"
    show({**found, "rows": rows}, [table(rows, *rows[0], title=title)], as_json, line)


def repeating_model(directory: Path) -> Path:
    """The folder of a model whose greedy text repeats, as text does on code, quotes and forms: the
    local model, whose attention has no effect, so that the next token follows from the last one
    alone, and with some words that stand out. Sampled text does not repeat. Steps take as long."""
    from safetensors.torch import load_file, save_file

    target = directory / "repeating"
    shutil.copytree(local_model(directory, layers=2, hidden=128), target)
    (file,) = target.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        if ".o_proj." in name:
            weight.zero_()
    head = weights["lm_head.weight"]
    words = head.abs().sum(dim=1).nonzero().flatten().tolist()
    for token in set(words) - set(random.Random(0).sample(words, 12)):
        head[token].zero_()
    save_file(weights, file, metadata={"format": "pt"})
    return target


class Asked(NamedTuple):
    """One request; ``at_s``: seconds after the first."""

    name: str
    at_s: float
    prompt: Sequence[int]
    output: int
    slo: SLO
    temperature: float


def arrivals(step_s: float, rate: float, requests: int, seed: str) -> list[Asked]:
    """Requests at random times, with objectives for an engine whose decode takes ``step_s``
    alone."""
    chance = random.Random(seed)
    shares = [kind.share for kind in KINDS.values()]
    found: list[Asked] = []
    at_s = 0.0
    for number in range(requests):
        name = chance.choices(list(KINDS), shares)[0]
        kind = KINDS[name]
        length = chance.randint(*kind.prompt)
        phrase = chance.randint(3, 8) if kind.repetitive else length
        prompt = [chance.randrange(300, 1000) for _ in range(phrase)]
        prompt = (prompt * length)[:length]
        slo = SLO(ttft_s=kind.ttft * step_s, tpot_s=kind.tpot * step_s, service_class=name)
        output, temperature = chance.randint(*kind.output), 0.0 if kind.repetitive else 1.0
        found.append(Asked(str(number), at_s, prompt, output, slo, temperature))
        at_s += chance.expovariate(rate)
    return found


def rate_at(shares: list[tuple[float, float]], enough: float = ENOUGH) -> float:
    """The highest rate up to which at least ``enough`` attain, linearly interpolated between the
    measured rates and their shares; below the first one all would attain."""
    reached, before = 0.0, 1.0
    for rate, share in shares:
        if share < enough:
            return reached + (rate - reached) * (before - enough) / (before - share)
        reached, before = rate, share
    return reached


class Run(NamedTuple):
    """Some requests, from the first arrival to the last token; ``offered``: steps with drafts."""

    attained: float
    tpots_s: list[float]
    seconds: float
    checked: int
    accepted: int
    offered: int


class FixedLengths(Speculation):
    """Every decode checks all its drafted tokens, up to ``most``."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def _lengths(self, decodes: Any, *others: Any) -> Ints:
        lengths: Ints = np.minimum(decodes.most, 1 + self._most)
        return lengths


class SpeculatingEngine(OneEngine):
    """An engine with n-grams of the text as drafts."""

    def __init__(self, model: Path, directory: Path) -> None:
        super().__init__()
        path = directory / "state"
        self.table = StateTable.create(4096, path)
        settings = SchedulerSettings(state_table=path, policy=POLICY)
        ngrams = {
            "method": "ngram",
            "num_speculative_tokens": MAX_DRAFTED,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
        self._start(
            model,
            max_model_len=1024,
            max_num_batched_tokens=512,
            max_num_seqs=64,
            kv_cache_memory_bytes=256 << 20,
            block_size=32,
            dtype="float32",
            enable_prefix_caching=False,
            enforce_eager=True,
            distributed_executor_backend="uni",
            worker_cls="sluice.replica.vllm.cpu_worker.PatchedCpuWorker",
            speculative_config=with_all_lengths(ngrams),
            scheduler_cls="sluice.replica.vllm.scheduler.make_scheduler",
            additional_config=settings.to_additional_config(),
        )
        self._local: Any = self._llm.llm_engine.engine_core.engine_core.scheduler._local

    def use(self, most: int | None) -> None:
        """Use planned lengths from now on, or fixed ones of at most ``most``."""
        policy = make_policy(POLICY)
        policy.speculation = AdaptiveLengths() if most is None else FixedLengths(most)
        self._local._policy = policy

    def learn(self) -> None:
        """Plan with a latency model that is fitted to the latest steps. Raises ValueError: too
        few."""
        model, _ = fit(self.table.samples())
        self.table.set_model(model.with_headroom(1.05))

    def serve(self, arrivals: Sequence[Asked]) -> Run:
        """Serve requests as they arrive, by the clock, until all have ended."""
        engine = self._llm.llm_engine
        before = self.table.read().summary
        clocks: dict[str, TokenClock] = {}
        attained, tpots_s = 0, list[float]()
        waiting = list(reversed(arrivals))
        began_s = time.monotonic()
        while waiting or engine.has_unfinished_requests():
            now_s = time.monotonic()
            while waiting and began_s + waiting[-1].at_s <= now_s:
                asked = waiting.pop()
                self._begin(asked, began_s + asked.at_s)
                clocks[asked.name] = TokenClock(asked.slo, began_s + asked.at_s)
            if not engine.has_unfinished_requests():
                time.sleep(min(0.001, max(0.0, began_s + waiting[-1].at_s - now_s)))
                continue
            outputs = engine.step()
            now_s = time.monotonic()
            for output in outputs:
                clock = clocks[output.request_id]
                clock.emit(len(output.outputs[0].token_ids) - clock.tokens, now_s)
                if output.finished:
                    attained += clock.attained(now_s)
                    tpots_s.append(clock.tpot_s or nan)
        after = self.table.read().summary
        drafts = ("drafts_checked", "drafts_accepted")
        checked, accepted = (int(after[name] - before[name]) for name in drafts)
        offered = int((after["draft_lengths"] - before["draft_lengths"]).sum())
        seconds, share = time.monotonic() - began_s, attained / len(arrivals)
        return Run(share, tpots_s, seconds, checked, accepted, offered)

    def _begin(self, asked: Asked, arrived_s: float) -> None:
        args = to_xargs(RequestArgs(asked.name, arrived_s, asked.slo))
        how = {"temperature": asked.temperature, "logprobs": None, "detokenize": False}
        self._llm.llm_engine.add_request(*self._request(asked, arrived_s, extra_args=args, **how))


def calibrated(engine: SpeculatingEngine, requests: int) -> tuple[float, float]:
    """Seconds of a decode alone, and requests a second without speculation when all arrive at
    once."""
    many = [each._replace(at_s=0.0) for each in arrivals(1.0, 1.0, requests, "full")]
    for most in (MAX_DRAFTED, 0):  # the first ones warm up
        engine.use(most)
        engine.serve(many)
    engine.learn()
    step_s = engine.serve(arrivals(1.0, 1.0, 1, "alone")).tpots_s[0]
    return step_s, requests / engine.serve(many).seconds


def measure(
    engine: SpeculatingEngine,
    step_s: float,
    full_rate: float,
    requests: int,
    loads: Sequence[float],
    rounds: int,
) -> list[Json]:
    """A row for each way. Loads are multiples of ``full_rate``, ascending."""
    ways = list(WAYS)
    runs: dict[str, list[list[Run]]] = {way: [[] for _ in range(rounds)] for way in ways}
    for number in range(rounds):
        for place, load in enumerate(loads):
            drawn = arrivals(step_s, load * full_rate, requests, f"{number}/{load}")
            # Each way is the first one as often as the others.
            turn = (number + place) % len(ways)
            for way in ways[turn:] + ways[:turn]:
                engine.use(WAYS[way])
                runs[way][number].append(engine.serve(drawn))
    rates = {
        way: [
            full_rate * rate_at(list(zip(loads, (run.attained for run in each), strict=True)))
            for each in own
        ]
        for way, own in runs.items()
    }
    return [_row(way, runs[way], rates[way], rates[ADAPTIVE]) for way in ways]


def _row(way: str, runs: list[list[Run]], rates: list[float], adaptive: list[float]) -> Json:
    """The mean share that attained, by load; the median rate at which enough attain; the median,
    min and max of the adaptive way's rate over this one's in the same round; and what became of
    drafts."""
    ratios = [best / own for best, own in zip(adaptive, rates, strict=True) if own]
    spread = (median(ratios), min(ratios), max(ratios)) if ratios else ()
    every = [run for each in runs for run in each]
    checked = sum(run.checked for run in every)
    by_load = zip(*runs, strict=True)
    return {
        "way": way,
        "attained": [round(mean(run.attained for run in each), 3) for each in by_load],
        "rate": round(median(rates), 2),
        "ratio": [round(each, 2) for each in spread],
        "length": round(checked / max(1, sum(run.offered for run in every)), 2),
        "accepted": round(sum(run.accepted for run in every) / max(1, checked), 2),
    }


if __name__ == "__main__":
    main()
