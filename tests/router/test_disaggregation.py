"""Calls whose prompt one replica computes and that another one answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.requests import (
    EngineRequest,
    KVHandle,
    ResponseHead,
    ResponseTail,
    request_key,
)
from sluice.router.config import RouterConfig
from sluice.router.dispatch.retries import EMPTY_POOLS_PAUSE_S, RETRY_PAUSE_S, may_split, prefill_of
from sluice.router.errors import ApiError, Reason
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.router.serve.hint import NO_REPLICA_WAIT_S
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.request.objective import SLO
from tests.router.far_side import (
    CHAT_BODY,
    COMPLETION_BODY,
    DIED,
    UNREACHABLE,
    Behaviour,
    Clock,
    Edge,
    FarController,
    FarSide,
    Items,
    answer,
    fail,
    hang,
    serve,
)
from tests.router.test_telemetry import by_name, traced
from tests.router.virtual_time import VirtualTime

# The objective of a prompt's computation on another replica.


def test_it_is_due_earlier_by_the_kv_transfer() -> None:
    for slo, expected in (
        (SLO(ttft_s=1.0, tpot_s=0.1), SLO(ttft_s=0.75, tpot_s=0.1)),
        (SLO(e2e_s=9.0), SLO(e2e_s=9.0)),
    ):
        assert prefill_of(EngineRequest("r", "chat", {}, slo), 0.25, {}).slo == expected


@given(st.floats(1e-3, 1e4), st.floats(0, 1e5))
def test_some_time_is_always_left(ttft_s: float, kv_transfer_s: float) -> None:
    request = EngineRequest("r", "chat", {}, SLO(ttft_s=ttft_s))
    left_s = prefill_of(request, kv_transfer_s, {}).slo.ttft_s
    assert left_s is not None
    assert 0 < left_s <= ttft_s


PAIR = RouteDecision("d", "placed", Tier.GUARANTEED, 0.5, role="decode", prefill_id="p")
OTHER_PAIR = PAIR._replace(replica_id="d2", prefill_id="p2")
HANDLE = KVHandle("p", {"block": 7}, 5)
FIRST, SECOND = request_key("r"), request_key("r.prefill")


async def prefill(side: FarSide, name: str, request: EngineRequest) -> Items:
    assert request.prefill_only and not request.resumable
    yield ResponseHead(200, "application/json", name)
    yield ResponseTail(5, 0, kv_handle=HANDLE._replace(replica_id=name))


def edge(*decisions: RouteDecision | None, **behaviours: Behaviour) -> tuple[Edge, FarSide]:
    side = FarSide(**{"p": prefill, "d": serve} | behaviours)
    side.roles = ("mixed", "decode", "prefill")
    return Edge(side, FarController(*(decisions or (PAIR,))), clock=Clock()), side


def call(**body: Any) -> Call:
    return Call("r", "chat", {**CHAT_BODY, **body}, SLO(ttft_s=1), PromptSize(40, 4), 100.0)


async def headers(router: Edge, **body: Any) -> dict[str, str]:
    async with router.client() as client:
        response = await client.post("/v1/chat/completions", json={**CHAT_BODY, **body})
    assert response.status_code == 200
    assert "one" in response.text and "three" in response.text
    return dict(response.headers)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_prompt_goes_to_one_replica_and_its_kv_to_another(stream: bool) -> None:
    router, side = edge()
    opened = await router.dispatcher.open(call(stream=stream))
    (first, leg), (second, rest) = side.calls
    assert (first, second) == ("p", "d")
    assert side.pools == ["prefill", "decode"]
    assert (leg.request_id, rest.request_id) == ("r.prefill", "r")
    assert (leg.prefill_only, leg.kv_handle) == (True, None)
    assert (rest.prefill_only, rest.kv_handle) == (False, HANDLE)
    assert leg.body == rest.body
    (query,) = router.controller.queries
    assert (query.key, query.prefill_key) == (FIRST, SECOND)
    assert (opened.tier, opened.decision.predicted_ttft_s) == (Tier.GUARANTEED, 0.5)
    assert [piece async for piece in router.dispatcher.pieces(opened)]
    router.dispatcher.close(opened)
    assert router.controller.released == []


async def test_both_replicas_are_told_to_the_client() -> None:
    router, _ = edge()
    told = await headers(router)
    assert told["x-sluice-replica"] == "d"
    assert told["x-sluice-prefill-replica"] == "p"
    whole, _ = edge(RouteDecision("d", "placed", role="decode"))
    assert "x-sluice-prefill-replica" not in await headers(whole)


async def test_the_time_of_both_parts_is_measured() -> None:
    router, _ = edge()
    for stream in (True, False):
        await headers(router, stream=stream)
    for phase in ("prefill", "transfer"):
        assert router.sample("sluice_phase_seconds_count", phase=phase) == 2


async def test_each_part_has_its_span_and_both_replicas_are_in_the_requests() -> None:
    telemetry, exporter = traced()
    side = FarSide(p=prefill, d=serve)
    side.roles = ("decode", "prefill")
    router = Edge(side, FarController(PAIR), telemetry=telemetry)
    await headers(router)
    spans = by_name(exporter)
    assert set(spans) == {"chat", "decision", "attempt", "prefill"}
    leg, attempt = spans["prefill"], spans["attempt"]
    assert leg.parent is not None and leg.parent.span_id == attempt.context.span_id
    assert attempt.start_time <= leg.start_time <= leg.end_time <= attempt.end_time  # type: ignore[operator]
    told = [dict(span.attributes or {}) for span in (leg, attempt, spans["chat"])]
    assert [each["sluice.replica"] for each in told] == ["p", "d", "d"]
    assert told[-1]["sluice.prefill_replica"] == "p"
    # Each replica goes on under its own.
    parents = [request.trace["traceparent"].split("-")[2] for _, request in side.calls]
    assert parents == [f"{span.context.span_id:016x}" for span in (leg, attempt)]


async def test_spans_say_which_part_failed() -> None:
    telemetry, exporter = traced()
    side = FarSide(p=fail(UNREACHABLE), d=serve)
    side.roles = ("decode", "prefill")
    router = Edge(side, FarController(PAIR), telemetry=telemetry)
    await headers(router)
    spans = exporter.get_finished_spans()
    failed = [span.name for span in spans if (span.attributes or {}).get("error.type")]
    assert failed == ["prefill", "attempt"]
    assert [span.name for span in spans].count("attempt") == 2


TEXT = {"type": "text", "text": "hello"}


@pytest.mark.parametrize(
    ("body", "split"),
    [
        ({}, True),
        ({"n": 1, "logprobs": True, "tools": []}, True),
        ({"n": 2}, False),
        ({"echo": True}, False),
        ({"prompt_logprobs": 0}, False),
        ({"prompt": ["one", "two"]}, False),
        ({"prompt": ["one"]}, True),
        ({"prompt": [1, 2, 3]}, True),
        ([TEXT], True),
        ([TEXT, {"type": "image_url", "image_url": "data:"}], False),
        ([{"type": "input_audio", "input_audio": {}}], False),
    ],
)
def test_what_may_be_split(body: dict[str, Any] | list[Any], split: bool) -> None:
    """Completions by their fields, and chats by the parts of their message."""
    asked = (
        call(messages=[{"role": "user", "content": body}])
        if isinstance(body, list)
        else Call("r", "completions", {**COMPLETION_BODY, **body}, SLO(), PromptSize(), 0.0)
    )
    assert may_split(asked) is split


async def test_what_may_not_be_split_is_not_asked_for() -> None:
    router, _ = edge(RouteDecision("d", "placed", role="decode"))
    await router.dispatcher.open(call(n=2))
    assert router.controller.queries[0].prefill_key == 0
    one_pool = Edge(FarSide(a=serve), clock=Clock())
    await one_pool.dispatcher.open(call())
    assert one_pool.controller.queries[0].prefill_key == 0


async def half(side: FarSide, name: str, request: EngineRequest) -> Items:
    """Fails after its head."""
    yield ResponseHead(200, "application/json", name)
    await side.let_go()
    raise UNREACHABLE


@pytest.mark.parametrize(
    ("broken", "gone"),
    [(fail(UNREACHABLE), []), (fail(DIED), ["p"]), (half, []), (answer(503, b"{}"), [])],
    ids=["unreachable", "dead", "after its head", "full"],
)
async def test_a_prompt_that_fails_is_tried_on_another_pair(
    broken: Behaviour, gone: list[str]
) -> None:
    router, side = edge(PAIR, OTHER_PAIR, p=broken, p2=prefill, d2=serve)
    opened = await router.dispatcher.open(call())
    assert opened.head.replica_id == "d2"
    assert [name for name, _ in side.calls] == ["p", "p2", "d2"]
    assert [request.request_id for _, request in side.calls] == ["r.prefill", "r-2.prefill", "r-2"]
    assert sorted(router.controller.released) == sorted([FIRST, SECOND])
    assert router.controller.gone == gone


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_fails_at_once_is_made_again_from_its_prompt(stream: bool) -> None:
    router, side = edge(PAIR, OTHER_PAIR, d=fail(DIED), p2=prefill, d2=serve)
    opened = await router.dispatcher.open(call(stream=stream))
    assert opened.head.replica_id == "d2"
    ids = [(name, request.request_id) for name, request in side.calls]
    assert ids == [("p", "r.prefill"), ("d", "r"), ("p2", "r-2.prefill"), ("d2", "r-2")]
    assert router.controller.released == [FIRST]
    assert router.controller.gone == ["d"]


async def test_a_decision_for_a_pair_of_which_one_has_failed() -> None:
    # Its prompt failed: the other one serves all of it, and nothing is promised.
    router, side = edge(PAIR, p=fail(UNREACHABLE))
    opened = await router.dispatcher.open(call())
    assert [name for name, _ in side.calls] == ["p", "d"]
    assert side.calls[1][1].kv_handle is None
    assert (opened.tier, side.pools[-1]) == (Tier.BEST_EFFORT, "decode")
    assert request_key("r-2.prefill") in router.controller.released
    assert request_key("r-2") not in router.controller.released
    # Its answer failed: anybody.
    side = FarSide(m=serve, p=prefill, d=fail(UNREACHABLE))
    side.roles = ("mixed", "decode", "prefill")
    router = Edge(side, FarController(PAIR), clock=Clock())
    opened = await router.dispatcher.open(call())
    assert (opened.head.replica_id, side.pools[-1]) == ("m", "mixed")
    assert {request_key("r-2.prefill"), request_key("r-2")} <= set(router.controller.released)


async def test_a_mistake_that_shows_with_the_prompt_is_the_clients() -> None:
    router, side = edge(p=answer(400, b'{"error": {"message": "too long"}}'))
    opened = await router.dispatcher.open(call(stream=True))
    assert opened.head.status == 400
    assert b"too long" in b"".join([piece.data async for piece in router.dispatcher.pieces(opened)])
    assert [name for name, _ in side.calls] == ["p"]
    assert sorted(router.controller.released) == sorted([FIRST, SECOND])


async def test_without_a_kv_handle_the_other_replica_computes_the_prompt() -> None:
    async def bare(side: FarSide, name: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "application/json", name)
        yield ResponseTail(5, 0)

    router, side = edge(p=bare)
    await headers(router)
    assert side.calls[1][1].kv_handle is None


async def test_reservations_of_replicas_that_another_one_stood_in_for_are_released() -> None:
    router, side = edge(PAIR._replace(prefill_id="gone"))
    opened = await router.dispatcher.open(call())
    assert side.calls[0][0] == "p"
    assert router.controller.released == [SECOND]
    assert side.calls[1][1].kv_handle == HANDLE
    assert opened.tier is Tier.BEST_EFFORT, "it was promised of another replica"


@pytest.mark.parametrize("stage", ["p", "d"])
async def test_a_client_that_leaves_frees_both_replicas_in_every_stage(stage: str) -> None:
    router, side = edge(**{stage: hang})
    task = asyncio.create_task(router.dispatcher.open(call()))
    live = "r.prefill" if stage == "p" else "r"
    await side.until(lambda: side.live == {live})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await side.until(lambda: not side.live)
    assert side.cancelled == [live]
    # What has ended is confirmed by its replica.
    both = {FIRST, SECOND} if stage == "p" else {FIRST}
    assert set(router.controller.released) == both


async def test_a_pool_without_replicas_is_left_out() -> None:
    side = FarSide(d=serve)
    side.roles, side.empty = ("mixed", "decode", "prefill"), {"prefill", "mixed"}
    config = RouterConfig(max_attempts=1)
    router = Edge(side, FarController(PAIR, None), config, Clock())
    opened = await router.dispatcher.open(call())
    assert side.pools == ["prefill", "mixed", "decode"]
    assert opened.head.status == 200
    assert [query.prefill_key != 0 for query in router.controller.queries] == [True, False, False]


async def test_without_any_replica_it_says_so_after_a_while() -> None:
    clock = VirtualTime()
    side = FarSide(d=serve)
    side.roles, side.empty = ("mixed", "decode", "prefill"), {"prefill", "mixed", "decode"}
    router = Edge(side, FarController(None), clock=clock)
    task = asyncio.create_task(router.dispatcher.open(call()))
    await clock.advance(0)
    assert side.pools == ["mixed", "decode", "prefill"]
    await clock.advance(NO_REPLICA_WAIT_S - EMPTY_POOLS_PAUSE_S)
    assert not task.done()
    await clock.advance(EMPTY_POOLS_PAUSE_S)
    with pytest.raises(ApiError) as caught:
        await task
    assert caught.value.reason is Reason.NO_REPLICA
    assert router.sample("sluice_retries_total") == 0
    # Now they have been empty for long, and nobody waits any more.
    side.pools.clear()
    task = asyncio.create_task(router.dispatcher.open(call()))
    await clock.advance(0)
    with pytest.raises(ApiError):
        await task
    assert side.pools == ["mixed", "decode", "prefill"]
    # The next time it counts anew.
    side.empty.clear()
    await router.dispatcher.open(call())
    side.empty = {"prefill", "mixed", "decode"}
    task = asyncio.create_task(router.dispatcher.open(call()))
    await clock.advance(NO_REPLICA_WAIT_S / 2)
    side.empty.clear()
    await clock.advance(EMPTY_POOLS_PAUSE_S)
    assert (await task).head.replica_id == "d"


@pytest.mark.parametrize("stream", [True, False])
async def test_pools_that_are_empty_for_a_moment_are_asked_again(stream: bool) -> None:
    clock = VirtualTime()
    side = FarSide(d=serve)
    side.roles, side.empty = ("decode", "prefill"), {"prefill", "decode"}
    router = Edge(side, FarController(None), RouterConfig(max_attempts=1), clock)
    task = asyncio.create_task(router.dispatcher.open(call(stream=stream)))
    await clock.advance(NO_REPLICA_WAIT_S / 2)
    side.empty.clear()
    await clock.advance(EMPTY_POOLS_PAUSE_S)
    assert (await task).head.replica_id == "d"


async def test_pools_that_were_empty_do_not_lengthen_the_pause_after_a_failure() -> None:
    clock = VirtualTime()
    failures = iter([UNREACHABLE])

    async def fails_once(side: FarSide, name: str, request: EngineRequest) -> Items:
        for failure in failures:
            raise failure
        async for item in serve(side, name, request):
            yield item

    side = FarSide(d=fails_once)
    side.roles, side.empty = ("decode", "prefill"), {"prefill", "decode"}
    router = Edge(side, FarController(None), clock=clock)
    task = asyncio.create_task(router.dispatcher.open(call()))
    await clock.advance(NO_REPLICA_WAIT_S / 2)
    side.empty.clear()
    await clock.advance(EMPTY_POOLS_PAUSE_S + RETRY_PAUSE_S)
    assert task.done()
    assert (await task).head.replica_id == "d"


async def test_without_a_controller_any_replica_serves_it_whole() -> None:
    router, side = edge(None, p=serve)
    await router.dispatcher.open(call())
    assert side.pools == ["mixed"]
    assert not side.calls[0][1].prefill_only
    side.roles = ("decode", "prefill")
    router = Edge(side, FarController(None), clock=Clock())
    await router.dispatcher.open(call())
    assert side.pools[-1] == "decode"
