"""Decisions, retries, and what the controller is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.requests import (
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
    request_key,
)
from sluice.router.dispatch.attempt import Answer
from sluice.router.dispatch.retries import REQUESTS_PER_RETRY, RetryBudget
from sluice.router.errors import ApiError, Reason
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.router.serve.contract import ReplicaFailedError
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from tests.router.far_side import (
    CHAT_BODY,
    DIED,
    UNREACHABLE,
    Clock,
    Edge,
    FarController,
    FarSide,
    Items,
    answer,
    fail,
    serve,
)

# How many further attempts there may be.


def test_a_share_of_the_requests_and_a_floor() -> None:
    some = RetryBudget(2, Clock())
    assert [some.take() for _ in range(3)] == [True, True, False]
    for _ in range(2 * REQUESTS_PER_RETRY):
        some.count_request()
    assert [some.take() for _ in range(3)] == [True, True, False]


def test_what_is_past_does_not_count() -> None:
    clock = Clock()
    some = RetryBudget(1, clock)
    assert some.take() and not some.take()
    clock.now_s += 57
    assert not some.take()
    clock.now_s += 3
    assert some.take()


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=200), st.integers(0, 5))
def test_no_window_has_more_than_its_share(events: list[tuple[float, bool]], floor: int) -> None:
    """Of any window that ends with a further attempt, to the slot that it is counted in."""
    clock = Clock()
    some = RetryBudget(floor, clock)
    requests: list[float] = []
    taken: list[float] = []
    for pause_s, is_request in events:
        clock.now_s += pause_s
        if is_request:
            some.count_request()
            requests.append(clock.now_s)
        elif some.take():
            taken.append(clock.now_s)
            recent = sum(clock.now_s - 57 < at for at in taken)
            asked = sum(clock.now_s - 60 <= at for at in requests)
            assert recent <= floor + asked / REQUESTS_PER_RETRY


def call(edge_clock: Clock, **body: Any) -> Call:
    return Call(
        "r", "chat", {**CHAT_BODY, **body}, SLO(ttft_s=1), PromptSize(40, 4), edge_clock.now_s
    )


def edge(side: FarSide, *decisions: str | None, clock: Clock | None = None) -> tuple[Edge, Clock]:
    clock = clock or Clock()
    return Edge(side, FarController(*decisions), clock=clock), clock


async def read(router: Edge, answer: Answer) -> bytes:
    return b"".join([piece.data async for piece in router.dispatcher.pieces(answer)])


async def test_a_request_goes_where_the_controller_says() -> None:
    far = FarSide(a=serve, b=serve)
    router, clock = edge(far, "b")
    asked = call(clock)
    clock.now_s += 0.25
    opened = await router.dispatcher.open(asked)
    assert opened.head.replica_id == "b"
    assert b"one two three" in await read(router, opened)
    (name, request), *rest = far.calls
    assert (name, rest) == ("b", [])
    assert request == EngineRequest(
        "r", "chat", CHAT_BODY, SLO(ttft_s=1), waited_s=0.25, client="unnamed"
    )
    assert router.controller.queries[0] == RouteQuery(
        request_key("r"), SLO(ttft_s=1), 14, 0.25, request_id="r"
    )
    router.dispatcher.close(opened)
    assert router.controller.released == []
    assert far.cancelled == []


@pytest.mark.parametrize("failure", [UNREACHABLE, DIED], ids=str)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_fails_before_the_first_byte_is_left_for_another(
    stream: bool, failure: ReplicaFailedError
) -> None:
    far = FarSide(a=fail(failure), b=serve)
    router, clock = edge(far, "a", "b")
    opened = await router.dispatcher.open(call(clock, stream=stream))
    assert opened.head.replica_id == "b"
    assert [name for name, _ in far.calls] == ["a", "b"]
    assert [request.request_id for _, request in far.calls] == ["r", "r-2"]
    assert router.controller.released == [request_key("r")]
    assert router.controller.gone == (["a"] if failure.dead else [])
    assert router.sample("sluice_retries_total") == 1
    # The second attempt says how long the request has waited by then.
    assert far.calls[1][1].waited_s == pytest.approx(clock.now_s - 100.0)
    assert far.calls[1][1].waited_s > 0


@pytest.mark.parametrize("error", [UNREACHABLE, None], ids=["fails", "ends without a tail"])
async def test_a_plain_response_that_breaks_in_the_middle_is_made_again(
    error: ReplicaFailedError | None,
) -> None:
    async def half(side: FarSide, name: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "application/json", name)
        yield ResponseChunk(b'{"half": ')
        await side.let_go()
        if error is not None:
            raise error

    router, clock = edge(FarSide(a=half, b=serve), "a", "b")
    opened = await router.dispatcher.open(call(clock))
    assert b"half" not in await read(router, opened)


async def test_a_response_without_a_head_is_our_fault() -> None:
    async def bare(side: FarSide, name: str, request: EngineRequest) -> Items:
        yield ResponseChunk(b"{}")
        yield ResponseTail(1, 1)

    router, clock = edge(FarSide(a=bare), "a")
    with pytest.raises(ApiError) as caught:
        await router.dispatcher.open(call(clock))
    assert caught.value.reason.status == 500


async def test_attempts_are_bounded_and_the_last_failure_is_told() -> None:
    far = FarSide(a=fail(UNREACHABLE), b=fail(UNREACHABLE), c=fail(DIED), d=serve)
    router, clock = edge(far, "a", "b", "c", "d")
    with pytest.raises(ApiError, match="The replica died") as caught:
        await router.dispatcher.open(call(clock))
    assert caught.value.reason is Reason.REPLICA_FAILED
    assert [name for name, _ in far.calls] == ["a", "b", "c"]
    assert len(router.controller.released) == 3


async def test_a_failure_that_no_other_replica_can_mend_is_not_repeated() -> None:
    hopeless = ReplicaFailedError(Reason.NO_REPLICA, "No replica is running.", retry=False)
    far = FarSide(a=fail(hopeless), b=serve)
    router, clock = edge(far, "a", "b")
    with pytest.raises(ApiError) as caught:
        await router.dispatcher.open(call(clock))
    assert caught.value.reason is Reason.NO_REPLICA
    assert len(far.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_replica_is_left_for_another(stream: bool) -> None:
    full = answer(503, b'{"error": {}}')
    far = FarSide(a=full, b=serve)
    router, clock = edge(far, "a", "b")
    opened = await router.dispatcher.open(call(clock, stream=stream))
    assert opened.head.replica_id == "b"
    assert [request.resume for _, request, *_ in far.calls] == [None, None]
    far.behaviours["b"] = full
    with pytest.raises(ApiError) as caught:
        await router.dispatcher.open(call(clock))
    assert caught.value.reason is Reason.REPLICAS_FULL


async def test_a_reservation_that_nobody_confirms_is_released() -> None:
    far = FarSide(a=serve, b=answer(400, b'{"error": {}}'))
    router, clock = edge(far, "vanished")
    await router.dispatcher.open(call(clock))
    assert router.controller.released == [request_key("r")]
    assert router.sample("sluice_fallback_total", reason="moved") == 1
    router, clock = edge(far, "b")
    opened = await router.dispatcher.open(call(clock))
    assert opened.head.status == 400
    assert router.controller.released == [request_key("r")]


async def test_the_length_of_prompts_is_learned_from_answers() -> None:
    far = FarSide(a=serve)
    router, _ = edge(far, "a")
    async with router.client() as client:
        for _ in range(60):
            await client.post("/v1/completions", json={"model": "m", "prompt": "x" * 50})
    assert router.controller.queries[0].prompt_tokens == 12
    assert router.controller.queries[-1].prompt_tokens == 5
