"""The benefit of planned speculation lengths in a real engine, against fixed ones.

Run with ``sluice bench speculation``. One real vLLM engine on this machine's CPU, one thread, a
small model whose greedy text repeats and that computes in 32 bits, and n-grams of the text as
drafts. Requests of three kinds arrive at random; objectives and rates are multiples of this
machine's times, measured first. The same arrivals run under each way of choosing lengths, one way
after the other in turn, so that all see the same machine. Each round gives, for each way, the rate
at which :data:`ENOUGH` of the requests meet their objective; the report has the ratios of each
round, and their spread.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import click

from sluice.benchmarks.live.engines import quiet_vllm
from sluice.benchmarks.live.report import Json, table
from sluice.benchmarks.live.speculation.engine import (
    Asked,
    Run,
    SpeculatingEngine,
    repeating_model,
)
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


def arrivals(step_s: float, rate: float, requests: int, seed: str) -> list[Asked]:
    """``requests`` requests at random times, on average ``rate`` a second, with objectives for an
    engine whose decode takes ``step_s`` alone."""
    chance = random.Random(seed)
    shares = [kind.share for kind in KINDS.values()]
    found: list[Asked] = []
    at_s = 0.0
    for number in range(requests):
        name = chance.choices(list(KINDS), shares)[0]
        kind = KINDS[name]
        length = chance.randint(*kind.prompt)
        phrase = chance.randint(*_PHRASE) if kind.repetitive else length
        prompt = [chance.randrange(*_TOKENS) for _ in range(phrase)]
        prompt = (prompt * length)[:length]
        slo = SLO(ttft_s=kind.ttft * step_s, tpot_s=kind.tpot * step_s, service_class=name)
        output, temperature = chance.randint(*kind.output), 0.0 if kind.repetitive else 1.0
        found.append(Asked(str(number), at_s, prompt, output, slo, temperature))
        at_s += chance.expovariate(rate)
    return found


def rate_at(shares: list[tuple[float, float]], enough: float = ENOUGH) -> float:
    """The highest rate up to which at least ``enough`` attain, linearly interpolated between the
    measured rates.

    Args:
        shares: (rate, share that attained), by rate; below the first one all would attain.
        enough: share that must attain.
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
        ratio: of the adaptive way's rate to this one's in the same round: median, min and max;
            ``None`` where this way never reached enough.
        length: drafted tokens checked per decode that has drafts, mean.
        accepted: share of the checked ones that were right.
        step_tokens: output tokens of a decode's step, mean over all decodes.
    """

    way: str
    attained: list[float]
    rate: float
    ratio: list[float] | None
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
        ways = list(WAYS)
        runs: dict[str, list[list[Run]]] = {way: [[] for _ in range(rounds)] for way in ways}
        for number in range(rounds):
            for place, load in enumerate(self._loads):
                rate, name = load * self.full_rate, f"{self._seed}/{number}/{load}"
                drawn = arrivals(self.step_s, rate, self._requests, name)
                # Each way is the first one as often as the others.
                turn = (number + place) % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    self._engine.use(WAYS[way])
                    runs[way][number].append(self._engine.serve(drawn))
        rates = {
            way: [
                rate_at([(load, run.attained) for load, run in zip(self._loads, each, strict=True)])
                for each in runs[way]
            ]
            for way in ways
        }
        return [self._row(way, runs[way], rates) for way in ways]

    def _row(self, way: str, runs: list[list[Run]], rates: dict[str, list[float]]) -> Row:
        pairs = zip(rates[ADAPTIVE], rates[way], strict=True)
        ratios = [adaptive / own for adaptive, own in pairs if own]
        spread = (median(ratios), min(ratios), max(ratios)) if ratios else None
        every = [run for each in runs for run in each]
        checked = sum(run.checked for run in every)
        places = range(len(self._loads))
        return Row(
            way,
            [round(mean(each[place].attained for each in runs), 3) for place in places],
            round(median(rates[way]) * self.full_rate, 2),
            [round(each, 2) for each in spread] if spread else None,
            round(checked / max(1, sum(run.offered for run in every)), 2),
            round(sum(run.accepted for run in every) / max(1, checked), 2),
            round(sum(run.decoded for run in every) / max(1, sum(run.decodes for run in every)), 2),
        )


@click.command(context_settings={"show_default": True})
@number_option("--rounds", default=3, least=1, most=1000)
@number_option("--requests", default=120, least=1, most=100_000, words="Of each run.")
@number_option(
    *("--load", "loads"),
    default=(0.6, 0.9, 1.2, 1.5),
    least=0.01,
    most=100,
    words="A rate, as a multiple of the engine's throughput without speculation; repeatable.",
    multiple=True,
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
    quiet_vllm()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        directory = Path(name)
        model = repeating_model(directory, layers, hidden)
        engine = SpeculatingEngine(model, directory, policy, MOST_DRAFTED)
        try:
            bench = Bench(engine, requests, list(loads), seed)
            rows = [row._asdict() for row in bench.run(rounds)]
        finally:
            engine.close()
    found: Json = {
        "step_ms": round(1e3 * bench.step_s, 2),
        "full_rate": round(bench.full_rate, 2),
        "loads": sorted(loads),
        "rows": rows,
    }
    line = (
        f"a decode alone {found['step_ms']} ms a token; all at once without speculation "
        f"{found['full_rate']} requests/s; loads {found['loads']}"
    )
    title = f"attained by load, requests/s at {ENOUGH:.0%}, and of the adaptive way to this one"
    show(found, [table(rows, *Row._fields, title=title)], as_json, line)
