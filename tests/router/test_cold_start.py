"""Requests for a model without a replica, at the edge, in virtual time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.dispatch.models import Catalog
from sluice.router.errors import Reason
from sluice.router.serve.contract import ReplicaFailedError
from sluice.scheduling.request.job import RouteDecision
from tests.router.far_side import CHAT_BODY, Edge, FarController, FarSide, serve
from tests.router.test_admission import guaranteed, post
from tests.router.virtual_time import VirtualTime, settle

CONFIG = RouterConfig(
    classes={
        "standard": ServiceClass(ttft_ms=60_000),
        "strict": ServiceClass(ttft_ms=2_000, when_unattainable="reject"),
    },
)
STARTS = RouteDecision(None, "no_replica", predicted_ttft_s=40.5, starts_in_s=40.0)
TOO_LATE = STARTS._replace(reason="unattainable", retry_after_s=40.0, room_s=40.0)


def asleep(*decisions: RouteDecision) -> tuple[Edge, VirtualTime]:
    side, clock = FarSide(a=serve), VirtualTime()
    side.asleep = True
    return Edge(side, FarController(*decisions), CONFIG, clock=clock), clock


async def test_a_request_starts_a_replica_waits_for_it_and_says_what_was_predicted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    edge, clock = asleep(STARTS)
    with caplog.at_level(logging.INFO, "sluice.router"):
        first, second = (asyncio.create_task(post(edge)) for _ in range(2))
        await clock.advance(30.0)
        assert edge.side.wakes == 1
        assert edge.sample("sluice_starting_requests") == 2
        assert not first.done() and not edge.side.calls
        edge.controller.decisions = [guaranteed(ttft_s=0.5)]
        edge.side.awake()
        await settle()
    for answered in (await first, await second):
        assert answered.status_code == 200
        assert answered.headers["x-sluice-admission"] == "guaranteed"
        assert answered.headers["x-sluice-predicted-ttft-ms"] == "30500.0"
    assert [request.waited_s for _, request in edge.side.calls] == [30.0, 30.0]
    assert edge.sample("sluice_starting_requests") == 0
    assert edge.sample("sluice_start_wait_seconds_sum") == 60.0
    assert [record.getMessage() for record in caplog.records if "replica runs" in record.msg] == [
        "no replica runs: one starts, predicted time 40.0 s",
        "a replica runs, started in 30.0 s",
    ]


async def test_a_replica_that_runs_and_has_not_registered_is_asked_for_again() -> None:
    edge, clock = asleep(STARTS, STARTS, STARTS, guaranteed())
    edge.side.awake()
    answered = asyncio.create_task(post(edge))
    await clock.advance(0.2)
    assert (await answered).status_code == 200
    assert [query.waited_s for query in edge.controller.queries] == pytest.approx(
        [0.0, 0.05, 0.1, 0.15]
    )


async def test_who_cannot_wait_so_long_is_refused_at_once_and_starts_the_replica() -> None:
    edge, _ = asleep(TOO_LATE)
    refused = await post(edge, "strict")
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["code"], error["retry_after_ms"]) == ("slo_unattainable", 40_000)
    assert "predicted to serve in 40 seconds" in error["message"]
    assert refused.headers["retry-after"] == "40"
    assert refused.headers["x-sluice-predicted-ttft-ms"] == "40500.0"
    await settle()
    assert edge.side.wakes == 1 and not edge.side.calls


async def test_a_start_that_has_become_too_slow_ends_the_wait() -> None:
    edge, clock = asleep(STARTS, STARTS, TOO_LATE)
    answered = asyncio.create_task(post(edge, "strict"))
    await clock.advance(2.0)
    assert (await answered).json()["error"]["code"] == "slo_unattainable"


async def test_no_more_wait_than_may_and_none_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.router.dispatch.placement.MAX_WAITING", 3)
    monkeypatch.setattr("sluice.router.dispatch.placement.START_WAIT_S", 100.0)
    edge, clock = asleep(STARTS)
    calls = [asyncio.create_task(post(edge)) for _ in range(4)]
    await settle()
    (full,) = [await call for call in calls if call.done()]
    assert (full.status_code, full.json()["error"]["code"]) == (503, "model_starting")
    assert full.headers["retry-after"] == "40"
    # A client may bound its own wait.
    async with edge.client() as client:
        calls[0].cancel()
        await settle()
        sent = client.post(
            "/v1/chat/completions", json=CHAT_BODY, headers={"x-llm-d-inference-ttl": "5s"}
        )
        brief = asyncio.create_task(sent)
        await clock.advance(5.0)
        assert "within 5 seconds" in (await brief).json()["error"]["message"]
    await clock.advance(90.0)
    waiting = [call for call in calls if not call.done()]
    assert len(waiting) == 2
    await clock.advance(5.1)
    for call in waiting:
        assert (await call).json()["error"]["code"] == "model_starting"
    labels = {"class": "standard", "reason": "model_starting"}
    assert edge.sample("sluice_refusals_total", **labels) == 4
    assert edge.sample("sluice_starting_requests") == 0


async def test_a_replica_that_cannot_start_is_said_and_tried_again_for_the_next() -> None:
    edge, clock = asleep(STARTS)
    answered = asyncio.create_task(post(edge))
    await clock.advance(10.0)
    edge.side.awake(ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.", retry=False))
    await settle()
    failed = await answered
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_starting")
    assert "No replica is running." in failed.json()["error"]["message"]
    gave_up = ReplicaFailedError(Reason.NO_REPLICA, "Deploy it again.", retry=False, given_up=True)
    edge.side.asleep, edge.side.no_start = True, None
    answered = asyncio.create_task(post(edge))
    await settle()
    edge.side.awake(gave_up)
    await settle()
    assert (await answered).json()["error"]["code"] == "no_replica"
    edge.side.asleep, edge.side.no_start = True, None
    answered = asyncio.create_task(post(edge))
    await settle()
    edge.controller.decisions = [guaranteed()]
    edge.side.awake()
    await settle()
    assert (await answered).status_code == 200
    assert edge.side.wakes == 3


async def test_health_and_models_are_answered_without_a_replica_and_start_none() -> None:
    side = FarSide()  # which would not answer
    side.asleep = True
    catalog = Catalog(side, ("m", "adapter"))
    await catalog.check()
    assert [entry["id"] for entry in (await catalog.models())["data"]] == ["m", "adapter"]
    assert side.wakes == 0
    side.behaviours, side.asleep, side.max_model_len = {"a": serve}, False, 512
    listed = await catalog.models()
    side.asleep = True
    assert (await catalog.models()) == listed
    assert await catalog.exceeded(513) == 512
