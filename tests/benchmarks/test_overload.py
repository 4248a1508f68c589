"""The benchmark of overload: what counts, how runs are compared, and clients that come again."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from aiohttp import web

from sluice.benchmarks.live.client import End, Outcome, replay
from sluice.benchmarks.live.overload import RATE, SLOS, WARM_UP_S, compared, goodput, make_load
from sluice.benchmarks.live.report import Run
from sluice.benchmarks.live.resources import Usage, Used
from sluice.simulation.workload import Arrival, Workload

SECONDS = 25.0
SLO_OF = SLOS["strict"]
BUSY = Usage({"routers": Used(0.4, 200.0), "client": Used(0.2, 100.0)}, 0.5)


def answered(ended_s: float, tokens: int = 10, ttft_s: float = 1.0) -> Outcome:
    return Outcome(
        SLO_OF,
        100,
        tokens,
        sent_s=0.0,
        late_s=0.0,
        end=End.ANSWERED,
        ended_s=ended_s,
        ttft_s=ttft_s,
        tpot_s=0.1,
        admission="guaranteed",
    )


def test_goodput_is_what_ends_in_time_between_the_warm_up_and_the_last_arrival() -> None:
    refused = Outcome(SLO_OF, 100, 10, 0.0, 0.0, End.REFUSED, refusals=4, refused_s=2.0)
    counted = [answered(WARM_UP_S), answered(SECONDS, tokens=30)]
    others = [answered(WARM_UP_S - 0.1), answered(SECONDS + 0.1), answered(10.0, ttft_s=2.0)]
    run = Run({"load": 3.0, "retries": "none"}, SECONDS, [*counted, *others, refused], BUSY)
    assert goodput(run) == 2 / (SECONDS - WARM_UP_S)
    (row,) = compared([run])
    assert row["goodput"] == 2 / (SECONDS - WARM_UP_S)
    assert (row["sent"], row["answered"], row["answers_in_time"], row["lost"]) == (6, 5, 0.8, 0)
    assert row["refusals"] == 4 and row["refusal_ms"] == [500.0, 500.0]


def run_of(retries: str, in_time: int) -> Run:
    labels = {"load": 3.0, "retries": retries}
    return Run(labels, SECONDS, [answered(10.0)] * in_time, BUSY)


def test_runs_are_compared_with_those_of_the_same_round_and_the_scatter_is_told() -> None:
    runs = [
        run_of("none", 10),
        run_of("at once", 9),
        run_of("at once", 22),
        run_of("none", 20),
    ]
    none, at_once = compared(runs)
    assert (none["ratio"], none["error"]) == (1.0, 0.0)
    # The rounds' own are 0.9 and 1.1.
    assert (at_once["ratio"], at_once["error"]) == (round(31 / 30, 3), 0.1)
    assert at_once["memory_mib"]["routers"] == 200.0
    assert at_once["cores"] == {"routers": 0.4, "client": 0.2}
    assert json.loads(json.dumps([none, at_once])) == [none, at_once]


def test_one_round_tells_no_scatter_and_nothing_served_is_no_ratio() -> None:
    _, at_once = compared([run_of("none", 8), run_of("at once", 4)])
    assert (at_once["ratio"], at_once["error"]) == (0.5, None)
    _, at_once = compared([run_of("none", 0), run_of("at once", 4)])
    assert (at_once["ratio"], at_once["error"]) == (1.0, None)


def test_the_load_has_its_rate_and_its_lengths() -> None:
    load = make_load(2 * RATE, 1_000.0, 5)
    assert len(load) == pytest.approx(2_000 * RATE, rel=0.05)
    outputs = [each.output_tokens for each in load.arrivals]
    assert sum(outputs) / len(outputs) == pytest.approx(40, rel=0.05)
    assert make_load(2 * RATE, 1_000.0, 5).arrivals == load.arrivals


REFUSED = 3
"""So often the server refuses each prompt; then it has other words for it."""


@pytest.mark.parametrize(
    ("patience_s", "times", "end"), [(0.0, 1, End.REFUSED), (60.0, REFUSED + 1, End.FAILED)]
)
async def test_a_refused_client_comes_again_at_once_while_it_has_patience(
    patience_s: float, times: int, end: End
) -> None:
    came: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        came[prompt] += 1
        refused = came[prompt] <= REFUSED
        text = json.dumps({"error": {"code": "slo_unattainable" if refused else "internal"}})
        return web.Response(status=429 if refused else 500, text=text)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
        workload = Workload("test", tuple(Arrival(0.0, 8 + n, 4, SLO_OF) for n in range(5)))
        outcomes = await replay(url, "model", workload, patience_s=patience_s)
    finally:
        await runner.cleanup()
    assert set(came.values()) == {times}
    assert all(each.end is end for each in outcomes)
    assert all(each.refusals == min(times, REFUSED) for each in outcomes)
    assert all(each.refused_s > 0 for each in outcomes)
