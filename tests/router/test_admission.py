"""From the controller's decision to what the client sees and what is counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.controller.observability.history import History
from sluice.controller.observability.metrics import samples_of
from sluice.controller.observability.metrics_hub import MetricsHub
from sluice.protocol.requests import EngineRequest, request_key
from sluice.router.config import RouterConfig, ServiceClass
from sluice.scheduling.request.job import RouteDecision, Tier
from tests.controller.fleet import newer_push
from tests.router.far_side import (
    CHAT_BODY,
    DIED,
    Client,
    Clock,
    Edge,
    FarController,
    FarSide,
    Items,
    answer,
    fail,
    hang,
    serve,
    stall,
)
from tests.router.test_disconnect import content
from tests.router.test_openai_client import KEY, served
from tests.router.virtual_time import settle

CONFIG = RouterConfig(
    classes={
        "standard": ServiceClass(ttft_ms=400, tpot_ms=200),
        "strict": ServiceClass(ttft_ms=400, when_unattainable="reject"),
        "patient": ServiceClass(ttft_ms=9_000, when_unattainable="queue", queue_limit_s=3),
        "free": ServiceClass(when_unattainable="reject"),
    }
)


def guaranteed(replica: str = "a", ttft_s: float | None = 0.25) -> RouteDecision:
    return RouteDecision(replica, "placed", Tier.GUARANTEED, ttft_s)


def best_effort(replica: str = "a") -> RouteDecision:
    return RouteDecision(replica, "placed", Tier.BEST_EFFORT)


def unattainable(retry_after_s: float | None = 2.25) -> RouteDecision:
    return RouteDecision(None, "unattainable", retry_after_s=retry_after_s, room_s=retry_after_s)


def edge_of(*decisions: RouteDecision | str | None, **more: Any) -> Edge:
    side = more.pop("side", None) or FarSide(a=serve, b=serve)
    return Edge(side, FarController(*decisions), CONFIG, **more)


async def post(edge: Edge, name: str = "standard", **body: Any) -> httpx.Response:
    async with edge.client() as client:
        return await client.post(
            "/v1/chat/completions", json={**CHAT_BODY, "slo": {"class": name}, **body}
        )


def admissions(edge: Edge, admission: str, name: str = "standard") -> float:
    return edge.sample("sluice_admissions_total", **{"class": name, "admission": admission})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_promise_is_said_with_the_ttft_that_is_expected(stream: bool) -> None:
    edge = edge_of(guaranteed(ttft_s=0.25)._replace(level=0.9))
    response = await post(edge, stream=stream)
    assert response.headers["x-sluice-admission"] == "guaranteed"
    assert float(response.headers["x-sluice-predicted-ttft-ms"]) >= 250
    assert response.headers["x-sluice-promised-ttft-ms"] == "400.0"
    assert response.headers["x-sluice-promise-level"] == "0.9"
    assert edge.side.calls[0][1].best_effort is False
    assert admissions(edge, "guaranteed") == 1


ENDS = {
    "promised": (guaranteed("a"), {}),
    "best effort": (best_effort("a"), {}),
    "refused": (unattainable(), {"name": "strict"}),
    "wrong": (best_effort("wrong"), {}),
    "left": (guaranteed("hung"), {}),
}
"""The decision on a request and its body, by how it ends."""


@given(st.lists(st.sampled_from(sorted(ENDS)), max_size=8))
def test_each_request_that_is_answered_or_refused_counts_once_in_one_window(
    kinds: list[str],
) -> None:
    """Promised, best effort and refused are all that asked, and a promise that ended was made."""

    async def run() -> None:
        decisions = [ENDS[kind][0] for kind in kinds]
        side = FarSide(a=serve, wrong=answer(400, b"{}"), hung=hang)
        edge = Edge(side, FarController(*decisions, unattainable()), CONFIG)
        hub, history = MetricsHub(), History()
        history.joined(hub.push(newer_push("router", samples_of(edge.metrics.registry)), 0.0))
        history.note(hub, 0.0)
        for kind in kinds:
            if kind == "left":
                client = Client(edge, content(stream=True))
                await edge.side.until(lambda: bool(edge.side.live))
                client.leave()
                await client.task
            else:
                await post(edge, **ENDS[kind][1])
        hub.push(newer_push("router", samples_of(edge.metrics.registry)), 5.0)
        rows = history.recent(hub, 5.0)["classes"]
        total = Counter(kinds)
        asked = total["promised"] + total["best effort"]
        assert sum(row["asked"] for row in rows) == asked + total["refused"]
        for row in rows:
            outcomes, admission = row["outcomes"], row["admission"]
            assert admission["guaranteed"] + admission["best_effort"] == outcomes["ok"]
            assert row["requests"] - row["asked"] == (
                outcomes["client_error"] + outcomes["cancelled"]
            )
            assert sum(row["promises"].values()) <= admission["guaranteed"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("decision", "runs_as_best_effort"),
    [
        (best_effort(), True),
        (RouteDecision("a", "placed"), False),
        (RouteDecision(None, "no_replica"), False),
        (RouteDecision(None, "invalid_query"), False),
    ],
    ids=["best effort", "admission off", "no replica known", "odd query"],
)
async def test_without_a_promise_the_answer_says_best_effort(
    decision: RouteDecision, runs_as_best_effort: bool
) -> None:
    edge = edge_of(decision)
    response = await post(edge)
    assert response.headers["x-sluice-admission"] == "best-effort"
    assert not [name for name in response.headers if name.startswith(("x-sluice-pr",))]
    assert edge.side.calls[0][1].best_effort is runs_as_best_effort
    assert admissions(edge, "best-effort") == 1
    placed = decision.replica_id is not None
    assert edge.sample("sluice_fallback_total", reason="no_decision") == (not placed)


@pytest.mark.parametrize(
    ("stated", "bounds"),
    [
        ({"ttft_ms": 750}, ("750.0", None, None)),
        ({"ttft_ms": 0.5, "e2e_ms": 9_000}, ("0.5", None, "9000.0")),
        ({"e2e_ms": 5_000, "tpot_ms": 12.5}, (None, "12.5", "5000.0")),
        (
            {
                "e2e_ms": 7_000,
                "stages": [
                    {"until": {"tokens": 2}, "ttft_ms": 300, "e2e_ms": 400},
                    {"until": "end", "ttft_ms": 100, "tpot_ms": 20},
                ],
            },
            ("300.0", None, "7000.0"),
        ),
        (
            {"stages": [{"until": "end", "ttft_ms": 300, "tpot_ms": 20, "e2e_ms": 900}]},
            ("300.0", "20.0", "900.0"),
        ),
    ],
)
async def test_the_bounds_that_are_promised_are_those_that_apply(
    stated: dict[str, Any], bounds: tuple[str | None, ...]
) -> None:
    edge = edge_of(guaranteed())
    response = await post(edge, slo={"class": "free", **stated})
    headers = response.headers
    assert headers["x-sluice-admission"] == "guaranteed"
    names = [f"x-sluice-promised-{name}-ms" for name in ("ttft", "tpot", "e2e")]
    assert tuple(headers.get(name) for name in names) == bounds


@pytest.mark.parametrize(
    ("ttft_ms", "stream", "kept"),
    [(60_000, True, True), (60_000, False, True), (0.001, True, False)],
)
async def test_the_controller_hears_who_answered_and_whether_the_promise_was_kept(
    ttft_ms: float, stream: bool, kept: bool
) -> None:
    edge = edge_of(guaranteed(), best_effort())
    for _ in range(2):
        await post(edge, slo={"class": "free", "ttft_ms": ttft_ms}, stream=stream)
    promised, not_promised = edge.controller.endings
    assert (promised.replica_id, promised.kept) == ("a", kept)
    assert (not_promised.replica_id, not_promised.kept) == ("a", None)


async def test_without_the_controller_nothing_is_promised_and_nothing_is_put_last() -> None:
    edge = Edge(FarSide(a=serve), FarController(), CONFIG)
    response = await post(edge, "strict")
    assert response.headers["x-sluice-admission"] == "best-effort"
    assert edge.side.calls[0][1].best_effort is False
    assert edge.sample("sluice_fallback_total", reason="no_answer") == 1


async def test_the_expected_ttft_counts_from_the_arrival() -> None:
    clock = Clock()
    edge = edge_of(
        guaranteed("a"), guaranteed("b", 0.1), side=FarSide(a=fail(DIED), b=serve), clock=clock
    )
    response = await post(edge)
    # The second attempt was decided 20 ms after the first, and is the one that answered.
    waited_s = edge.controller.queries[1].waited_s
    assert waited_s == pytest.approx(0.02)
    assert response.headers["x-sluice-predicted-ttft-ms"] == "120.0"
    assert response.headers["x-sluice-replica"] == "b"


@pytest.mark.parametrize(
    ("decisions", "reason"),
    [
        ((guaranteed("a"), guaranteed("a")), "repeated"),
        ((guaranteed("a"), guaranteed("gone")), "moved"),
    ],
)
async def test_a_promise_for_one_replica_does_not_hold_for_another(
    decisions: tuple[RouteDecision, ...], reason: str
) -> None:
    edge = edge_of(*decisions, side=FarSide(a=fail(DIED), b=serve))
    response = await post(edge)
    assert response.headers["x-sluice-replica"] == "b"
    assert response.headers["x-sluice-admission"] == "best-effort"
    assert edge.side.calls[1][1].best_effort is False
    assert edge.sample("sluice_fallback_total", reason=reason) == 1
    ids = [request.request_id for _, request in edge.side.calls]
    assert edge.controller.released == list(map(request_key, ids))
    # Counted once, as what it was in the end.
    assert (admissions(edge, "guaranteed"), admissions(edge, "best-effort")) == (0, 1)


async def test_what_ran_last_runs_last_at_the_next_attempt_too() -> None:
    edge = edge_of(best_effort("a"), best_effort("a"), side=FarSide(a=fail(DIED), b=serve))
    response = await post(edge)
    assert response.headers["x-sluice-admission"] == "best-effort"
    assert [request.best_effort for _, request in edge.side.calls] == [True, True]


@pytest.mark.parametrize(
    ("name", "slo", "tiers"),
    [
        ("standard", {}, set(Tier)),
        ("strict", {}, {Tier.GUARANTEED}),
        ("patient", {}, {Tier.GUARANTEED}),
        ("free", {}, set(Tier)),
        ("free", {"tpot_ms": 5}, {Tier.GUARANTEED}),
    ],
)
async def test_the_class_says_in_which_tiers_it_may_run(
    name: str, slo: dict[str, Any], tiers: set[Tier]
) -> None:
    edge = edge_of(guaranteed())
    await post(edge, slo={"class": name, **slo})
    assert edge.controller.queries[0].tiers == tiers


@pytest.mark.parametrize(
    ("retry_after_s", "header", "body_ms"),
    [(2.25, "3", 2250), (0.0, "1", 0), (1e300, "3600", 3_600_000)],
)
async def test_a_class_that_rejects_says_when_to_come_again(
    retry_after_s: float, header: str, body_ms: float
) -> None:
    edge = edge_of(unattainable(retry_after_s))
    response = await post(edge, "strict")
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("slo_unattainable", "rate_limit_error")
    assert response.headers["retry-after"] == header
    assert error["retry_after_ms"] == body_ms
    assert response.headers["x-sluice-class"] == "strict"
    assert "x-sluice-admission" not in response.headers
    assert edge.side.calls == []
    labels = {"class": "strict", "reason": "slo_unattainable"}
    assert edge.sample("sluice_refusals_total", **labels) == 1
    labels = {"class": "strict", "outcome": "refused", "endpoint": "chat"}
    assert edge.sample("sluice_requests_total", **labels) == 1


@pytest.mark.parametrize("name", ["strict", "patient"])
async def test_what_no_replica_can_ever_hold_is_refused_without_a_time(name: str) -> None:
    edge = edge_of(unattainable(None))
    response = await post(edge, name)
    assert response.status_code == 429
    assert "retry-after" not in response.headers
    assert "even when it is idle" in response.json()["error"]["message"]
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("name", "wait_s", "asked"), [("strict", None, 1), ("strict", 0.01, 3)])
async def test_the_official_client_repeats_only_what_may_be_promised_later(
    name: str, wait_s: float | None, asked: int
) -> None:
    config = CONFIG.model_copy(update={"default_class": name})
    edge = Edge(FarSide(a=serve), FarController(unattainable(wait_s)), config)
    async with served(edge, KEY) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.with_options(max_retries=2).chat.completions.create(
                model="m",
                messages=CHAT_BODY["messages"],  # type: ignore[arg-type]
            )
    assert len(edge.controller.queries) == asked
    assert caught.value.code == "slo_unattainable"
    headers = caught.value.response.headers
    assert ("retry-after" in headers) is (asked > 1)
    assert headers.get("x-should-retry") == (None if asked > 1 else "false")


def promises(edge: Edge, outcome: str) -> float:
    return edge.sample("sluice_promises_total", **{"class": "standard", "outcome": outcome})


async def test_kept_and_missed_promises_are_counted() -> None:
    # The far side's plain answers have their first token after 0.1 s.
    edge = edge_of(guaranteed(ttft_s=0.05), clock=Clock())
    await post(edge)
    assert (promises(edge, "kept"), promises(edge, "missed")) == (1, 0)
    assert edge.sample("sluice_ttft_ratio_sum", **{"class": "standard"}) == pytest.approx(2.0)
    await post(edge, slo={"ttft_ms": 50})
    await post(edge, slo={"e2e_ms": 50})
    assert (promises(edge, "kept"), promises(edge, "missed")) == (1, 2)
    # An answer that breaks off broke its promise; the client's mistake broke none.
    edge.side.behaviours["a"] = fail(DIED, after=2)
    await post(edge, stream=True)
    assert (promises(edge, "kept"), promises(edge, "missed")) == (1, 3)
    edge.side.behaviours["a"] = answer(400, b'{"error": {}}')
    await post(edge)
    edge.controller.decisions = [best_effort()]
    edge.side.behaviours["a"] = serve
    await post(edge)
    assert (promises(edge, "kept"), promises(edge, "missed")) == (1, 3)
    assert edge.sample("sluice_ttft_ratio_count", **{"class": "standard"}) == 4


@pytest.mark.parametrize(
    ("tpot_ms", "broken"), [(60, False), (40, True)], ids=["on pace", "too slow"]
)
async def test_a_promise_covers_every_objective(tpot_ms: int, broken: bool) -> None:
    clock = Clock()

    async def steadily(side: FarSide, replica: str, request: EngineRequest) -> Items:
        async for item in serve(side, replica, request):
            yield item
            await settle()  # the router has it
            clock.now_s += 0.05

    edge = edge_of(guaranteed(), clock=clock, side=FarSide(a=steadily))
    # A pace alone is a promise, too.
    await post(edge, stream=True, slo={"ttft_ms": None, "tpot_ms": tpot_ms})
    await post(edge, stream=True, slo={"ttft_ms": 1, "tpot_ms": tpot_ms, "e2e_ms": 1})
    kept = 0 if broken else 1
    assert (promises(edge, "kept"), promises(edge, "missed")) == (kept, 2 - kept)

    # By what the replica says, it was in time.
    once, twice = {"way_back": 1}, {"way_back": 2} if broken else {}
    assert (edge.causes("ttft"), edge.causes("tpot"), edge.causes("e2e")) == (once, twice, once)
    assert edge.causes("failed") == {}


async def test_a_replica_works_by_the_plan_and_the_client_is_owed_the_objective() -> None:
    planned = guaranteed("a", 0.05)._replace(planned=(0.09, 0.04, None))
    edge = edge_of(planned, clock=Clock())
    # The far side's plain answers have their first token after 0.1 s.
    await post(edge, slo={"ttft_ms": 100, "tpot_ms": 150, "e2e_ms": None})
    slo = edge.side.calls[0][1].slo
    assert (slo.ttft_s, slo.tpot_s, slo.e2e_s) == (0.09, 0.04, None)
    assert edge.controller.queries[0].slo.ttft_s == 0.1
    assert (promises(edge, "kept"), promises(edge, "missed")) == (1, 0)


async def test_a_promise_is_missed_where_no_replica_answers_in_the_end() -> None:
    edge = edge_of(guaranteed(), clock=Clock(), side=FarSide(a=fail(DIED)))
    assert (await post(edge)).status_code >= 500
    assert (promises(edge, "kept"), promises(edge, "missed")) == (0, 1)
    assert edge.causes("failed") == {"failure": 1}


@pytest.mark.parametrize(("pause_s", "outcome"), [(0.1, "kept"), (0.5, "missed")])
async def test_a_promise_counts_where_another_replica_serves_as_best_effort(
    pause_s: float, outcome: str
) -> None:
    clock = Clock()

    async def dies(side: FarSide, replica: str, request: EngineRequest) -> Items:
        clock.now_s += pause_s
        raise DIED
        yield

    edge = edge_of(guaranteed("a"), best_effort("b"), clock=clock, side=FarSide(a=dies, b=serve))
    response = await post(edge, stream=True)
    assert response.headers["x-sluice-admission"] == "best-effort"
    other = {"kept": "missed", "missed": "kept"}[outcome]
    assert (promises(edge, outcome), promises(edge, other)) == (1, 0)
    assert edge.causes("ttft") == ({"failure": 1} if outcome == "missed" else {})


@pytest.mark.parametrize(
    ("stream", "slo", "waited_s", "missed"),
    [
        (True, {}, 0.3, 0),
        (True, {}, 0.5, 1),
        (False, {}, 0.5, 0),
        (False, {"e2e_ms": 700}, 0.5, 0),
        (False, {"e2e_ms": 700}, 0.8, 1),
    ],
)
@pytest.mark.parametrize("killed", [False, True], ids=["left", "handler cancelled"])
async def test_a_promise_is_missed_where_the_client_leaves_after_the_deadline(
    stream: bool, slo: dict[str, float], waited_s: float, missed: int, killed: bool
) -> None:
    clock = Clock()
    edge = edge_of(guaranteed(), clock=clock, side=FarSide(a=hang))
    client = Client(edge, content(stream=stream, slo=slo))
    await edge.side.until(lambda: bool(edge.side.live))
    clock.now_s += waited_s
    if killed:
        client.task.cancel()
    else:
        client.leave()
    await asyncio.wait([client.task])
    assert (promises(edge, "kept"), promises(edge, "missed")) == (0, missed)
    objective = "e2e" if slo else "ttft"
    assert edge.causes(objective) == ({"unknown": 1} if missed else {})


async def test_a_promise_is_kept_where_the_client_leaves_after_its_first_token() -> None:
    clock = Clock()
    edge = edge_of(guaranteed(), clock=clock, side=FarSide(a=stall))
    client = Client(edge, content(stream=True))
    await client.until(lambda: len(client.got) == 2)
    clock.now_s += 10.0
    client.leave()
    await client.task
    assert (promises(edge, "kept"), promises(edge, "missed")) == (1, 0)
