"""Requests that may be why replicas are lost: who is tried again, who is blamed, who is refused."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.requests import EngineRequest, ResponseHead
from sluice.router.config import RouterConfig
from sluice.router.dispatch.attempt import Answer, Attempt, OpenAttempts, SuspicionState
from sluice.router.dispatch.suspicion import (
    CLEARED_S,
    FEW,
    QUARANTINED_S,
    REMEMBERED,
    TRIAL_S,
    Suspicion,
)
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.router.request.validation import is_structured
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.serve.replicas import failure_of
from sluice.router.tenancy.limits import Client
from sluice.scheduling.request.objective import SLO, TokenClock
from tests.router.far_side import DIED, Behaviour, Clock, FarSide, Items, NoItems, attempt_at, serve
from tests.router.test_stall_detector import CHAT, edge, says_so
from tests.router.virtual_time import virtual

HUNG = ReplicaFailedError(Reason.REPLICA_FAILED, "The replica is unresponsive.", hung=True)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
STRUCTURED = {"response_format": SCHEMA}
_UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


def call(number: int = 0, owner: str = "me", **body: Any) -> Call:
    text = f"prompt {number:06}"
    given = {"model": "m", "prompt": text, **body}
    client = Client("c", owner=owner)
    return Call("id", "completions", given, SLO(), PromptSize(len(text)), 0.0, client=client)


class Fleet:
    """Attempts at replicas, and what a router makes of their failures."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.attempts: OpenAttempts = {}
        self.suspicion = Suspicion(self.attempts, RouterMetrics(), self.clock)

    def send(
        self, case: SuspicionState, place: str, responded: bool = True, opened: bool = False
    ) -> Attempt:
        attempt = attempt_at(place, NoItems(), self.clock)
        attempt.responded, attempt.opened = responded, opened
        self.attempts[attempt] = Answer(call(), case, TokenClock(SLO(), 0.0))
        return attempt

    def lose(
        self,
        call: Call,
        case: SuspicionState,
        attempt: Attempt,
        failure: ReplicaFailedError = DIED,
    ) -> bool:
        """Whether the call is blamed."""
        blamed = self.suspicion.judge(call, case, attempt, failure) is not None
        del self.attempts[attempt]
        return blamed


def test_the_second_loss_ends_a_request_and_its_repeats_are_refused() -> None:
    fleet, case = Fleet(), SuspicionState()
    assert not fleet.lose(call(), case, fleet.send(case, "r0"))
    assert case.suspected
    assert fleet.lose(call(), case, fleet.send(case, "r1"))
    with pytest.raises(ApiError) as refusal:
        fleet.suspicion.open(call())
    assert refusal.value.reason is Reason.REQUEST_QUARANTINED
    response = refusal.value.response()
    assert (response.status_code, response.headers["x-should-retry"]) == (422, "false")
    for other in (call(1), call(owner="you"), call(temperature=0.5)):
        assert not fleet.suspicion.open(other).suspected
    fleet.clock.now_s += QUARANTINED_S
    assert not fleet.suspicion.open(call()).suspected


def test_a_replica_that_fails_again_is_lost_once() -> None:
    fleet, case = Fleet(), SuspicionState()
    for _ in range(3):
        assert not fleet.lose(call(), case, fleet.send(case, "r0"))
    assert fleet.lose(call(), case, fleet.send(case, "r1"))


@pytest.mark.parametrize("error", [OSError("reset"), grpc.aio.AioRpcError(*_UNAVAILABLE)])
def test_a_connection_that_breaks_is_a_loss(error: Exception) -> None:
    """So it looks to a router that a replica is killed."""
    fleet, case, failure = Fleet(), SuspicionState(), failure_of(error)
    assert not fleet.lose(call(), case, fleet.send(case, "r0"), failure)
    assert fleet.lose(call(), case, fleet.send(case, "r1"), failure)


def test_an_error_of_a_replica_that_lives_is_no_loss() -> None:
    fleet, case = Fleet(), SuspicionState()
    failed = ReplicaFailedError(Reason.REPLICA_FAILED, "The replica cancelled the request.")
    assert not fleet.lose(call(), case, fleet.send(case, "r0"), failed)
    assert not case.suspected


def test_who_was_never_at_the_second_replica_is_not_blamed() -> None:
    """Two replicas that die at once."""
    fleet, case = Fleet(), SuspicionState()
    fleet.lose(call(), case, fleet.send(case, "r0"))
    assert not fleet.lose(call(), case, fleet.send(case, "r1", responded=False))
    assert fleet.lose(call(), case, fleet.send(case, "r2"))


@given(lasted_s=st.floats(0, 1000), again_s=st.floats(0, 1000))
def test_a_suspect_is_cleared_once_it_lasts_longer(lasted_s: float, again_s: float) -> None:
    fleet, case = Fleet(), SuspicionState()
    attempt = fleet.send(case, "r0")
    fleet.clock.now_s += lasted_s
    fleet.lose(call(), case, attempt)
    lasted_s = case.lasted_s
    attempt = fleet.send(case, "r1")
    fleet.clock.now_s += again_s
    again_s = fleet.clock.now_s - attempt.made_s
    assert fleet.lose(call(), case, attempt) == (again_s < max(CLEARED_S, lasted_s))
    assert case.suspected


@given(silent=st.integers(0, 8), opened=st.integers(0, 8), others=st.integers(0, 8))
@settings(deadline=None)
def test_of_several_suspects_a_few_are_blamed_and_those_that_made_progress_last(
    silent: int, opened: int, others: int
) -> None:
    fleet = Fleet()
    calls = [call(number) for number in range(silent + opened)]
    cases = [SuspicionState(suspected=True) for _ in calls]
    attempts = [fleet.send(case, "r1", opened=index >= silent) for index, case in enumerate(cases)]
    ordinary = [SuspicionState() for _ in range(others)]
    lost = [(call(100 + n), case, fleet.send(case, "r1")) for n, case in enumerate(ordinary)]
    blamed = [fleet.lose(*each) for each in [*zip(calls, cases, attempts, strict=True), *lost]]
    ends = silent or opened
    assert not any(blamed[len(calls) :]), "nobody who was not suspected"
    assert all(case.suspected for case in ordinary)
    if ends > FEW:
        assert not any(blamed)
        # A third loss is one too many, of however many.
        again = [fleet.send(case, "r2") for case in cases]
        assert all(map(fleet.lose, calls, cases, again))
    else:
        assert blamed[:silent] == [True] * silent
        assert blamed[silent : len(calls)] == [not silent] * opened


def test_structured_output_is_blamed_for_a_hang_at_once_and_not_for_a_death() -> None:
    fleet, asked = Fleet(), call(**STRUCTURED)
    case = fleet.suspicion.open(asked)
    assert not fleet.lose(asked, case, fleet.send(case, "r0"), DIED)
    case = SuspicionState()
    assert fleet.lose(asked, case, fleet.send(case, "r0"), HUNG)
    # Its sender asks again: alone, and for the last time.
    case = fleet.suspicion.open(asked)
    assert case.suspected
    assert fleet.lose(asked, case, fleet.send(case, "r1"), HUNG)
    with pytest.raises(ApiError):
        fleet.suspicion.open(asked)


def test_what_is_remembered_is_bounded() -> None:
    fleet = Fleet()
    for number in range(REMEMBERED + 5):
        asked = call(number, **STRUCTURED)
        fleet.lose(asked, SuspicionState(), fleet.send(SuspicionState(), "r0"), HUNG)
    assert len(fleet.suspicion.contents) == REMEMBERED
    assert not fleet.suspicion.open(call(0, **STRUCTURED)).suspected
    assert fleet.suspicion.open(call(REMEMBERED + 4, **STRUCTURED)).suspected


@virtual
async def test_suspects_begin_one_after_the_other_and_wait_for_a_while_at_most() -> None:
    suspicion = Suspicion({}, RouterMetrics(), asyncio.get_running_loop().time)
    begun: list[tuple[str, float]] = []
    now_s = asyncio.get_running_loop().time

    async def attempt(name: str, place: str, suspected: bool, lasts_s: float) -> None:
        async with suspicion.trial(place) if suspected else nullcontext():
            begun.append((name, round(now_s() - start_s, 3)))
            await asyncio.sleep(lasts_s)

    start_s = now_s()
    await asyncio.gather(
        attempt("a", "r0", True, 0.25),
        attempt("b", "r0", True, 5.0),
        attempt("c", "r0", True, 0.25),
        attempt("ordinary", "r0", False, 1.0),
        attempt("elsewhere", "r1", True, 1.0),
    )
    assert dict(begun) == {"a": 0, "b": 0.25, "c": TRIAL_S, "ordinary": 0, "elsewhere": 0}


def poisoned(death: bool) -> Behaviour:
    """A replica that is lost when the prompt says so."""

    async def behaviour(side: FarSide, name: str, request: EngineRequest) -> Items:
        if "poison" in str(request.body["messages"]):
            if death:
                raise DIED
            side.freeze(name)
            yield ResponseHead(200, "application/json", name)
        async for item in serve(side, name, request):
            yield item

    return behaviour


MESSAGES = {"messages": [{"role": "user", "content": "poison"}]}


@pytest.mark.parametrize("death", [True, False])
@virtual
async def test_a_poisoned_request_takes_two_replicas_and_no_more(death: bool) -> None:
    router = edge(
        RouterConfig(max_attempts=10, retry_budget=1_000),
        **{f"r{index}": poisoned(death) for index in range(5)},
    )
    says_so(router.side)
    body = {"model": "m", **MESSAGES}
    async with router.client() as client:
        for reason, status in [("request_suspected", 500), *[("request_quarantined", 422)] * 3]:
            response = await client.post(CHAT, json=body)
            assert response.status_code == status
            assert response.headers["x-should-retry"] == "false"
            assert response.json()["error"]["code"] == reason
    assert {name for name, _ in router.side.calls} == {"r0", "r1"}
    assert router.sample("sluice_quarantined_requests_total") == 4


@virtual
async def test_structured_output_takes_one_replica_at_a_time_when_it_hangs() -> None:
    router = edge(**{f"r{index}": poisoned(death=False) for index in range(5)})
    says_so(router.side)
    async with router.client() as client:
        codes = [
            (await client.post(CHAT, json={"model": "m", **MESSAGES, **STRUCTURED})).json()
            for _ in range(4)
        ]
        assert [body["error"]["code"] for body in codes] == [
            *["request_suspected"] * 2,
            *["request_quarantined"] * 2,
        ]
        assert len(router.side.calls) == 2


@pytest.mark.parametrize(
    ("body", "structured"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        (STRUCTURED, True),
        ({"structured_outputs": {"choice": ["a"]}}, True),
        ({"text": {"format": {"type": "json_schema"}}}, True),
        ({"text": {"verbosity": "low"}}, False),
        ({"text": {"format": {"type": "text"}}}, False),
        ({"tools": [{"function": {"name": "f"}}]}, False),
        ({"tools": [{"function": {"name": "f", "strict": True}}]}, True),
        ({"tools": [{"name": "f", "strict": True}], "tool_choice": "auto"}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tool_choice": "none", "tools": ["x"]}, False),
        ({"tool_choice": {"type": "auto"}}, False),
        ({"tool_choice": {"type": "any"}}, True),
        ({"tool_choice": {}}, True),
        ({"output_config": {"format": {"type": "json_schema"}}}, True),
        ({"output_config": {"effort": "low"}}, False),
    ],
)
def test_what_is_structured_output(body: dict[str, Any], structured: bool) -> None:
    assert is_structured(body) == structured


@pytest.mark.parametrize("allowed", [True, False])
@virtual
async def test_structured_output_can_be_switched_off(allowed: bool) -> None:
    router = edge(RouterConfig(structured_output=allowed), r0=serve)
    async with router.client() as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        assert (await client.post(CHAT, json=body)).status_code == 200
        response = await client.post(CHAT, json={**body, **STRUCTURED})
    assert response.status_code == (200 if allowed else 403)
    if not allowed:
        assert response.json()["error"]["code"] == "not_permitted"
