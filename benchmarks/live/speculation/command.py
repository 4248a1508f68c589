"""The benefit of planned speculation lengths in a real engine, against fixed ones.

Run with ``sluice bench speculation``. One real vLLM engine on this machine's CPU, one thread, a
small model whose greedy text repeats (:mod:`sluice.benchmarks.live.speculation.repeating_model`)
and that computes in 32 bits, and n-grams of the text as drafts. Requests of three kinds arrive at
random; objectives and rates are multiples of this machine's times, measured first. The same
arrivals run under each way of choosing lengths, one way after the other in turn, so that all see
the same machine. Each round gives, for each way, the rate at which :data:`ENOUGH` of the requests
meet their objective; the report has the ratios of each round, and their spread.
"""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import click
from rich.table import Table

from sluice.benchmarks.live.speculation.engine import Asked, Run, SpeculatingEngine
from sluice.benchmarks.live.speculation.repeating_model import repeating_model
from sluice.benchmarks.options import as_json, number_option, show
from sluice.scheduling.batching import POLICIES
from sluice.scheduling.request.objective import SLO

ADAPTIVE = "adaptive"
WAYS: dict[str, int | None] = {ADAPTIVE: None, "fixed 0": 0, "fixed 3": 3, "fixed 5": 5}
"""Max drafted tokens that each decode checks; ``None``: as many as planned."""

MOST_DRAFTED = 5
ENOUGH = 0.9
"""Share of requests that must meet their objective."""

_PHRASE = (3, 8)
_TOKENS = (300, 1000)


class Kind(NamedTuple):
    """A kind of request.

    Attributes:
        prompt, output: ranges of tokens.
        ttft, tpot: its objective, in steps of one decode alone.
        repetitive: its prompt repeats a phrase, and its text is greedy; else both are random, and
            drafts are wrong.
        share: of the requests.
    """

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


class Arrival(NamedTuple):
    """A request, and its arrival, seconds after the first."""

    at_s: float
    asked: Asked


def arrivals(step_s: float, rate: float, requests: int, seed: str) -> list[Arrival]:
    """``requests`` requests at random times, on average ``rate`` a second, with objectives for an
    engine whose decode takes ``step_s`` alone."""
    chance = random.Random(seed)
    names = list(KINDS)
    shares = [KINDS[name].share for name in names]
    found: list[Arrival] = []
    at_s = 0.0
    while len(found) < requests:
        name = chance.choices(names, shares)[0]
        kind = KINDS[name]
        length = chance.randint(*kind.prompt)
        if kind.repetitive:
            phrase = [chance.randrange(*_TOKENS) for _ in range(chance.randint(*_PHRASE))]
            prompt = (phrase * length)[:length]
        else:
            prompt = [chance.randrange(*_TOKENS) for _ in range(length)]
        slo = SLO(ttft_s=kind.ttft * step_s, tpot_s=kind.tpot * step_s, service_class=name)
        asked = Asked(
            str(len(found)),
            prompt,
            chance.randint(*kind.output),
            slo,
            0.0 if kind.repetitive else 1.0,
        )
        found.append(Arrival(at_s, asked))
        at_s += chance.expovariate(rate)
    return found


def rate_at(shares: list[tuple[float, float]], enough: float = ENOUGH) -> float:
    """The highest rate up to which at least ``enough`` attain, linearly interpolated between the
    measured rates.

    Args:
        shares: (rate, share that attained), by rate; below the first one all would attain.
    """
    reached, before = 0.0, 1.0
    for rate, share in shares:
        if share < enough:
            return reached + (rate - reached) * (before - enough) / (before - share)
        reached, before = rate, share
    return reached


class Row(NamedTuple):
    """One way of choosing lengths, over all rounds.

    Attributes:
        attained: share of requests by rate, mean over the rounds.
        rate: requests a second at which enough attain, median of the rounds.
        ratio, ratio_low, ratio_high: of the adaptive way's rate to this one's in the same round:
            median, min and max; ``None`` where this way never reached enough.
        length: drafted tokens checked per decode that has drafts, mean.
        accepted: share of the checked ones that were right.
        step_tokens: output tokens of a decode's step, mean over all decodes.
    """

    way: str
    attained: list[float]
    rate: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    length: float
    accepted: float
    step_tokens: float


class Bench:
    """Rounds of runs on one engine.

    Args:
        engine: under test.
        requests: of each run.
        loads: rates, as multiples of the engine's throughput without speculation when all requests
            arrive at once.
        seed: of the arrivals.
        calibrated: number of requests in that measurement.
    """

    def __init__(
        self,
        engine: SpeculatingEngine,
        requests: int,
        loads: list[float],
        seed: int,
        calibrated: int = 32,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._loads = sorted(loads)
        self._seed = seed
        lone = arrivals(1.0, 1.0, 1, f"{seed}/alone")
        many = arrivals(1.0, 1.0, calibrated, f"{seed}/full")
        many = [each._replace(at_s=0.0) for each in many]
        for most in (MOST_DRAFTED, 0):  # the first ones warm up
            engine.use(most)
            engine.serve(many)
        engine.learn()
        self.step_s = engine.serve(lone).ended[0].tpot_s
        self.full_rate = len(many) / engine.serve(many).seconds

    def run(self, rounds: int) -> list[Row]:
        """All ways, in each of ``rounds`` rounds."""
        runs: dict[str, list[list[Run]]] = {way: [] for way in WAYS}
        ways = list(WAYS)
        for number in range(rounds):
            found: dict[str, list[Run]] = {way: [] for way in WAYS}
            for place, load in enumerate(self._loads):
                drawn = arrivals(
                    self.step_s,
                    load * self.full_rate,
                    self._requests,
                    f"{self._seed}/{number}/{load}",
                )
                # Each way is the first one as often as the others.
                turn = (number + place) % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    self._engine.use(WAYS[way])
                    found[way].append(self._engine.serve(drawn))
            for way in ways:
                runs[way].append(found[way])
        rates = {
            way: [
                rate_at([(load, run.attained) for load, run in zip(self._loads, each, strict=True)])
                for each in runs[way]
            ]
            for way in ways
        }
        return [self._row(way, runs[way], rates) for way in ways]

    def _row(self, way: str, runs: list[list[Run]], rates: dict[str, list[float]]) -> Row:
        ratios = [
            adaptive / own for adaptive, own in zip(rates[ADAPTIVE], rates[way], strict=True) if own
        ]
        every = [run for each in runs for run in each]
        checked = sum(run.checked for run in every)
        return Row(
            way,
            [
                round(mean(each[place].attained for each in runs), 3)
                for place in range(len(self._loads))
            ],
            round(median(rates[way]) * self.full_rate, 2),
            round(median(ratios), 2) if ratios else None,
            round(min(ratios), 2) if ratios else None,
            round(max(ratios), 2) if ratios else None,
            round(checked / max(1, sum(run.offered for run in every)), 2),
            round(sum(run.accepted for run in every) / max(1, checked), 2),
            round(sum(run.decoded for run in every) / max(1, sum(run.decodes for run in every)), 2),
        )


@click.command(context_settings={"show_default": True})
@number_option("--rounds", default=3, least=1, most=1000)
@number_option("--requests", default=120, least=1, most=100_000, words="Of each run.")
@click.option(
    "--load",
    "loads",
    multiple=True,
    default=(0.6, 0.9, 1.2, 1.5),
    type=click.FloatRange(0.01, 100),
    help="A rate, as a multiple of the engine's throughput without speculation; repeatable.",
)
@click.option("--policy", default="deadline_triage", type=click.Choice(sorted(POLICIES)))
@number_option("--layers", default=2, least=1, most=64)
@number_option("--hidden", default=128, least=64, most=8192)
@click.option("--seed", default=0)
@as_json
def speculation(
    rounds: int,
    requests: int,
    loads: tuple[float, ...],
    policy: str,
    layers: int,
    hidden: int,
    seed: int,
    as_json: bool,
) -> None:
    """Compare planned speculation lengths with fixed ones, in real vLLM.

    \b
    Example:
      sluice bench speculation --rounds 3 --json
    """
    # Read when torch is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    # vLLM's lines must not stand between those of the JSON.
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        directory = Path(name)
        model = repeating_model(directory, layers, hidden)
        engine = SpeculatingEngine(model, directory, policy, MOST_DRAFTED)
        try:
            bench = Bench(engine, requests, list(loads), seed)
            rows = bench.run(rounds)
        finally:
            engine.close()
    found = {
        "step_ms": round(1e3 * bench.step_s, 2),
        "full_rate": round(bench.full_rate, 2),
        "loads": sorted(loads),
        "rows": [row._asdict() for row in rows],
    }
    line = (
        f"a decode alone {found['step_ms']} ms a token; all at once without speculation "
        f"{found['full_rate']} requests/s"
    )
    show(found, [_table(found)], as_json, line)


def _table(found: dict[str, Any]) -> Table:
    table = Table(
        "lengths",
        *(f"attained at {load}" for load in found["loads"]),
        f"rate at {ENOUGH:.0%}",
        "adaptive / this",
        "checked",
        "right",
        "tokens a step",
    )
    for row in found["rows"]:
        ratio = "-"
        if row["ratio"] is not None:
            ratio = f"{row['ratio']} ({row['ratio_low']} to {row['ratio_high']})"
        table.add_row(
            row["way"],
            *(f"{share:.0%}" for share in row["attained"]),
            str(row["rate"]),
            ratio,
            str(row["length"]),
            f"{row['accepted']:.0%}",
            str(row["step_tokens"]),
        )
    return table
