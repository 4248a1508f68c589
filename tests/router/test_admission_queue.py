"""Admission queues, alone and at the edge, in virtual time."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.router.config import ServiceClass
from sluice.router.dispatch.placement import (
    ASKERS,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    AdmissionQueue,
    may_wait,
)
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.tenancy.limits import ANYONE, Client
from sluice.scheduling.request.job import RouteDecision, Tier
from tests.examples import examples
from tests.router.far_side import CHAT_BODY
from tests.router.test_admission import edge_of, guaranteed, post, unattainable
from tests.router.virtual_time import VirtualTime, settle

PLACED = RouteDecision("a", "placed", Tier.GUARANTEED, 0.1)


class Fleet:
    """Room for so many more requests; each that asks takes some of it."""

    def __init__(self, room: int = 0, retry_after_s: float = 0.4) -> None:
        self.room = room
        self.retry_after_s = retry_after_s
        self.asked: list[int] = []

    async def ask(self, number: int) -> RouteDecision:
        self.asked.append(number)
        await asyncio.sleep(0)
        if self.room <= 0:
            return unattainable(self.retry_after_s)
        self.room -= 1
        return PLACED


class Queue:
    """A line and the requests in it, by number."""

    def __init__(self, fleet: Fleet, limit_s: float = 10.0, length: int = 256) -> None:
        self.fleet = fleet
        self.time = VirtualTime()
        self.metrics = RouterMetrics()
        entry = ServiceClass(when_unattainable="queue", queue_limit_s=limit_s)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sluice.router.dispatch.placement.MAX_WAITING", length)
            self.line = AdmissionQueue(
                "c", entry, self.metrics.admission, self.time, self.time.pause
            )
        self.served: list[int] = []
        self.errors: dict[int, ApiError] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def join(
        self,
        due_s: float = inf,
        refused: RouteDecision | None = None,
        client: Client = ANYONE,
        attained: float = 0.0,
    ) -> int:
        number = len(self.tasks)

        async def wait() -> None:
            try:
                due = self.time.now_s + due_s
                with self.line.slot(due, refused, client, attained=attained) as slot:
                    await slot.wait()
                    while may_wait(decision := await self.fleet.ask(number)):
                        slot.refuse(decision)
                        await slot.wait()
            except ApiError as error:
                self.errors[number] = error
            else:
                assert decision is PLACED
                self.served.append(number)

        self.tasks.append(asyncio.create_task(wait()))
        await settle()
        return number

    def sample(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"class": "c"}) or 0.0


async def test_requests_are_served_in_the_order_in_which_they_came() -> None:
    queue = Queue(Fleet())
    for _ in range(3 * ASKERS):
        await queue.join()
    assert len(queue.line) == queue.sample("sluice_admission_queue_requests") == 3 * ASKERS
    queue.fleet.room = ASKERS + 1
    await queue.time.advance(MAX_PAUSE_S)
    assert queue.served == list(range(ASKERS + 1))
    queue.fleet.room = 100
    await queue.time.advance(MAX_PAUSE_S)
    assert queue.served == list(range(3 * ASKERS))
    assert queue.sample("sluice_admission_queue_requests") == 0
    assert queue.sample("sluice_admission_queue_wait_seconds_count") == 3 * ASKERS


async def test_clients_take_turns_and_leave_places_to_others() -> None:
    queue = Queue(Fleet(), length=20)
    greedy, modest, third = (Client(name, f"name-{name}") for name in "abc")
    for _ in range(20):
        await queue.join(client=greedy)
    assert len(queue.line) == 16
    assert {error.reason for error in queue.errors.values()} == {Reason.QUEUE_FULL}
    for client in (modest, third, modest, third):
        await queue.join(client=client)
    assert len(queue.line) == 20
    queue.fleet.room = 100
    await queue.time.advance(MAX_PAUSE_S)
    assert sorted(queue.served) == [*range(16), 20, 21, 22, 23]
    # Of the first six each has two, in its own order.
    assert {queue.served.index(number) // 6 for number in (0, 1, 20, 21, 22, 23)} == {0}
    assert queue.sample("sluice_admission_queue_requests") == 0


async def test_a_client_s_request_whose_program_has_had_less_goes_first() -> None:
    queue = Queue(Fleet())
    one, other = (Client(name, f"name-{name}") for name in "ab")
    had = [50.0, 9.0, 0.0, 9.0, 70.0, 9.0]
    for attained in had:
        await queue.join(client=one, attained=attained)
    last = await queue.join(client=other, attained=99.0)
    queue.fleet.room = 100
    await queue.time.advance(MAX_PAUSE_S)
    assert [number for number in queue.served if number != last] == [2, 1, 3, 5, 0, 4]
    assert queue.served.index(last) < ASKERS, "clients take turns whatever their programs have had"


async def test_whose_request_leaves_before_it_could_ask_keeps_its_turn() -> None:
    queue = Queue(Fleet())
    clients = [Client(name, f"name-{name}") for name in "abcdef"]
    for client in (*clients, clients[4]):
        await queue.join(client=client)
    await queue.time.advance(MAX_PAUSE_S)
    assert set(queue.fleet.asked) == {0, 1, 2, 3}
    queue.tasks[4].cancel()
    await settle()
    queue.tasks[0].cancel()
    await settle()
    assert queue.fleet.asked[-1] == 6, "before the sixth client"


async def test_only_the_first_few_ask() -> None:
    queue = Queue(Fleet())
    for _ in range(ASKERS + 5):
        await queue.join()
    await queue.time.advance(5.0)
    assert set(queue.fleet.asked) == set(range(ASKERS))
    queue.tasks[1].cancel()
    await settle()
    # Who comes near the front asks at once.
    assert queue.fleet.asked[-1] == ASKERS


@pytest.mark.parametrize(
    ("retry_after_s", "pause_s"),
    [(0.4, 0.2), (0.0, MIN_PAUSE_S), (60.0, MAX_PAUSE_S), (inf, MAX_PAUSE_S)],
)
async def test_the_pause_is_half_of_what_was_predicted_within_bounds(
    retry_after_s: float, pause_s: float
) -> None:
    queue = Queue(Fleet(retry_after_s=retry_after_s))
    await queue.join(refused=unattainable(retry_after_s))
    # It has just asked, so the first time is after a pause.
    assert queue.fleet.asked == []
    await queue.time.advance(0.99 * pause_s)
    assert queue.fleet.asked == []
    await queue.time.advance(0.02 * pause_s)
    assert queue.fleet.asked == [0]
    await queue.time.advance(pause_s)
    assert queue.fleet.asked == [0, 0]


async def test_who_joins_near_the_front_without_having_asked_asks_at_once() -> None:
    queue = Queue(Fleet(retry_after_s=60.0))
    await queue.join(refused=unattainable(60.0))
    await queue.join()
    assert queue.fleet.asked == [0, 1]


@pytest.mark.parametrize(
    ("due_s", "limit_s", "reason"),
    [
        (0.3, 10.0, Reason.DEADLINE_PASSED),
        (inf, 0.3, Reason.QUEUE_TIMEOUT),
        (5.0, 0.3, Reason.QUEUE_TIMEOUT),
        (-1.0, 0.3, Reason.DEADLINE_PASSED),
    ],
)
@pytest.mark.parametrize("before", [0, ASKERS])
async def test_a_wait_ends_with_its_reason_wherever_in_the_line(
    due_s: float, limit_s: float, reason: Reason, before: int
) -> None:
    queue = Queue(Fleet(), limit_s)
    for _ in range(before):
        await queue.join()
    # Who never came near the front is told what the others were.
    number = await queue.join(due_s)
    if due_s > 0:
        await queue.time.advance(0.299)
        assert queue.errors == {}
    await queue.time.advance(0.002)
    assert queue.errors[number].reason is reason
    assert queue.errors[number].reason.status == 429
    if due_s > 0:
        assert queue.errors[number].document()["error"]["retry_after_ms"] == 400
    assert number not in queue.served


async def test_a_full_line_says_so_and_when_to_come_again() -> None:
    queue = Queue(Fleet(retry_after_s=2.2), length=3)
    for _ in range(4):
        await queue.join()
    assert queue.errors.keys() == {3}
    error = queue.errors[3]
    assert error.reason is Reason.QUEUE_FULL
    assert error.document()["error"]["retry_after_ms"] == 2200
    assert error.response().headers["retry-after"] == "3"
    assert len(queue.line) == 3


async def test_who_leaves_is_gone_at_once_also_while_it_asks() -> None:
    queue = Queue(Fleet())
    asking = asyncio.Event()

    async def slow(number: int) -> RouteDecision | None:
        asking.set()
        await asyncio.Event().wait()
        return None

    queue.fleet.ask = slow  # type: ignore[method-assign]
    await queue.join()
    await asking.wait()
    queue.tasks[0].cancel()
    await settle()
    assert len(queue.line) == queue.sample("sluice_admission_queue_requests") == 0
    # The line goes on with the next.
    del queue.fleet.ask
    queue.fleet.room = 1
    await queue.join()
    assert queue.served == [1]


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.floats(0.05, 5.0) | st.just(inf)),
        st.tuples(st.just("room"), st.integers(0, 6)),
        st.tuples(st.just("leave"), st.integers(0, 40)),
        st.tuples(st.just("wait"), st.floats(0.0, 2.0)),
    ),
    max_size=40,
)


@settings(max_examples=examples(60))
@given(steps=_STEPS, length=st.integers(1, 12), limit_s=st.floats(0.1, 4.0))
async def test_whatever_happens_the_line_is_bounded_in_order_and_ends(
    steps: list[tuple[str, float]], length: int, limit_s: float
) -> None:
    queue = Queue(Fleet(), limit_s, length)
    for step, value in steps:
        if step == "join":
            await queue.join(value)
        elif step == "room":
            queue.fleet.room = int(value)
        elif step == "leave" and queue.tasks:
            queue.tasks[int(value) % len(queue.tasks)].cancel()
            await settle()
        else:
            await queue.time.advance(value)
        assert len(queue.line) <= length
        assert queue.sample("sluice_admission_queue_requests") == len(queue.line)
    # All ask for the same here, so none overtakes another.
    assert queue.served == sorted(queue.served)
    await queue.time.advance(limit_s + 0.1)
    assert len(queue.line) == 0
    assert all(task.done() for task in queue.tasks)
    reasons = {error.reason for error in queue.errors.values()}
    assert reasons <= {Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT, Reason.DEADLINE_PASSED}


async def test_who_queues_is_served_when_its_objective_can_be_promised() -> None:
    time = VirtualTime()
    edge = edge_of(unattainable(1.0), unattainable(1.0), guaranteed(ttft_s=0.5), clock=time)
    answered = asyncio.create_task(post(edge, "patient"))
    await settle()
    waiting = {"class": "patient"}
    assert edge.sample("sluice_admission_queue_requests", **waiting) == 1
    await time.advance(1.2)
    response = await answered
    assert response.headers["x-sluice-admission"] == "guaranteed"
    # Asked at 0, 0.5 and 1 s.
    assert [query.waited_s for query in edge.controller.queries] == [0.0, 0.5, 1.0]
    assert response.headers["x-sluice-predicted-ttft-ms"] == "1500.0"
    assert edge.side.calls[0][1].waited_s == 1.0
    assert edge.sample("sluice_admission_queue_requests", **waiting) == 0
    assert edge.sample("sluice_admission_queue_wait_seconds_sum", **waiting) == 1.0


async def test_who_comes_later_stands_behind_who_waits() -> None:
    time = VirtualTime()
    edge = edge_of(unattainable(1.0), unattainable(1.0), guaranteed(), clock=time)
    first = asyncio.create_task(post(edge, "patient"))
    await settle()
    second = asyncio.create_task(post(edge, "patient"))
    await settle()
    # The newcomer makes the front ask at once, itself last.
    keys = [query.key for query in edge.controller.queries]
    assert keys[0] == keys[1] != keys[2]
    await time.advance(1.0)
    assert {(await first).status_code, (await second).status_code} == {200}


async def test_without_an_answer_the_wait_is_over() -> None:
    """Once the last refusal is too old to tell of the capacity."""
    time = VirtualTime()
    edge = edge_of(unattainable(0.5), clock=time)
    answered = asyncio.create_task(post(edge, "patient"))
    await settle()
    edge.controller.silent = True
    await time.advance(0.9)
    assert not answered.done()
    await time.advance(0.5)
    response = await answered
    assert (response.status_code, response.headers["x-sluice-admission"]) == (200, "best-effort")
    assert edge.sample("sluice_fallback_total", reason="no_answer") == 1


@pytest.mark.parametrize(
    ("stated", "ends_s", "reason"),
    [
        ({"ttl": "1500ms"}, 1.5, Reason.QUEUE_TIMEOUT),
        ({"ttl": "1h"}, 3.0, Reason.QUEUE_TIMEOUT),
        ({"ttl": "2.5s", "ttft_ms": 2_000}, 2.0, Reason.DEADLINE_PASSED),
        ({"e2e_ms": 1_000}, 1.0, Reason.DEADLINE_PASSED),
    ],
    ids=str,
)
async def test_a_wait_ends_by_the_objective_the_class_or_an_earlier_queue_ttl(
    stated: dict[str, Any], ends_s: float, reason: Reason
) -> None:
    """A request as a client of the llm-d router sends it; its class allows 3 s."""
    time = VirtualTime()
    edge = edge_of(unattainable(), clock=time)
    headers = {"x-llm-d-inference-objective": "patient"}
    if "ttl" in stated:
        headers["x-llm-d-inference-ttl"] = stated["ttl"]
    async with edge.client() as client:
        body = {**CHAT_BODY, "slo": {key: stated[key] for key in stated.keys() - {"ttl"}}}
        sent = client.post("/v1/chat/completions", json=body, headers=headers)
        answered = asyncio.create_task(sent)
        await time.advance(0.99 * ends_s)
        assert not answered.done()
        await time.advance(0.02 * ends_s)
        response = await answered
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["code"], error["retry_after_ms"]) == (reason, 2250)
    if reason is Reason.QUEUE_TIMEOUT:
        assert f"within {ends_s:g} seconds" in error["message"]
    labels = {"class": "patient", "reason": reason.value}
    assert edge.sample("sluice_refusals_total", **labels) == 1
