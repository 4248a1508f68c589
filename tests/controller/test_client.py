"""The client and the real actor, on a real Ray instance."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import ray
from prometheus_client import CollectorRegistry

from sluice.controller.cell_client import QUARANTINE_KEPT_S
from sluice.controller.client import (
    ControllerClient,
    controller_actor_name,
    ensure_controller,
    observer_actor_name,
    stop_controller,
)
from sluice.controller.config import ControllerConfig, fingerprint_of
from sluice.controller.discovery import NAMESPACE, DetachedController, ensure_observer
from sluice.controller.transport.channel import MAX_TIMEOUTS
from sluice.protocol.messages import MAX_QUERIES, FirstTokenWait, MetricSample, RequestEnding
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.placement.cells import cell_of
from sluice.scheduling.request.job import RouteDecision
from tests.controller.fleet import Clock, delta, hello, newer_push, query, waiting_row
from tests.own_ray import shared_ray

pytestmark = pytest.mark.ray

CONFIG = ControllerConfig(admission="none", stale_after_s=120)


@pytest.fixture(scope="module", autouse=True)
def _ray() -> None:
    shared_ray.start()


@pytest.fixture
def app(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"app-{request.node.name}"[:60]
    try:
        yield name
    finally:
        stop_controller(name)


@pytest.fixture(scope="module")
def common_app() -> Iterator[str]:
    name = "app-common"
    try:
        yield name
    finally:
        stop_controller(name)


@pytest.fixture
def common(common_app: str) -> Iterator[str]:
    """An application of those tests that leave its actors as they were. All find it empty."""
    yield common_app
    actor = actor_of(common_app)
    rows = ray.get(actor_of(common_app, observer_actor_name).snapshot.remote(), timeout=120)
    for row in rows["replicas"]:
        ray.get(actor.goodbye.remote(row["replica_id"]), timeout=120)


@pytest.fixture(scope="module")
def restarted() -> Iterator[str]:
    """An application of those tests that end its actors, each of which the next one finds started
    again: first those whose counts begin with a new controller."""
    name = "app-restarted"
    try:
        yield name
    finally:
        stop_controller(name)


@contextlib.asynccontextmanager
async def connected(
    app: str,
    timeout_s: float = 5.0,
    registry: CollectorRegistry | None = None,
    clock: Callable[[], float] = time.monotonic,
    config: ControllerConfig = CONFIG,
) -> AsyncIterator[ControllerClient]:
    """A client; its deadline is generous where the test is not about deadlines."""
    # Started first and with patience: these tests may share a busy machine.
    for cell in range(config.cells):
        await asyncio.to_thread(ensure_controller, app, config, 120, cell)
    await asyncio.to_thread(ensure_observer, app, config, 120)
    client = await asyncio.to_thread(ControllerClient, app, config, timeout_s, registry, clock)
    try:
        yield client
    finally:
        await client.close()


def actor_of(app: str, name_of: Callable[[str], str] = controller_actor_name) -> Any:
    return ray.get_actor(name_of(app), namespace=NAMESPACE)


def process_of(app: str, name_of: Callable[[str], str] = controller_actor_name) -> int:
    actor = actor_of(app, name_of)
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=120)
    assert isinstance(pid, int)
    return pid


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline_s = time.monotonic() + 120
    while not await condition():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        await asyncio.sleep(0.1)


def test_one_application_has_one_controller(app: str, common_app: str) -> None:
    first = ensure_controller(common_app, CONFIG, 120)
    epoch = ray.get(first.route.remote([]), timeout=120).epoch
    again = ensure_controller(common_app, CONFIG, 120)
    assert ray.get(again.route.remote([]), timeout=120).epoch == epoch
    other = ensure_controller(app, CONFIG, 120)
    assert ray.get(other.route.remote([]), timeout=120).epoch != epoch
    assert stop_controller(app)
    assert not stop_controller(app)
    assert ray.get(first.route.remote([]), timeout=120).epoch == epoch


def test_no_head_without_cpus_gets_a_controller(common_app: str) -> None:
    """As each reserves some; `tests/e2e/test_several_nodes.py` has such a head."""
    ensure_controller(common_app, CONFIG, 120)
    for name_of in (controller_actor_name, observer_actor_name):
        reserved = actor_of(common_app, name_of).__ray_call__.remote(
            lambda _: ray.get_runtime_context().get_assigned_resources()
        )
        assert ray.get(reserved, timeout=120)["CPU"] > 0


@pytest.mark.release
def test_a_controller_that_never_matches_is_not_replaced_for_ever(
    app: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.controller.discovery.fingerprint_of", lambda _: "another version")
    with pytest.raises(RuntimeError, match="not another version, although it was replaced 3 times"):
        ensure_controller(app, CONFIG, 120)


async def test_the_whole_conversation(common: str) -> None:
    async with connected(common) as client:
        assert await client.route(query(1)) == RouteDecision(None, "no_replica")
        reply = await client.hello(hello("a", now_s=5))
        assert reply is not None and not reply.resync
        assert await client.route(query(1)) == RouteDecision("a", "placed")
        reported = await client.report(delta("a", reply.epoch, 1, {0: waiting_row(1, 100)}))
        assert reported == reply
        gap = await client.report(delta("a", reply.epoch, 3))
        assert gap is not None and gap.resync
        await client.hello(hello("b"))
        # A refusal reaches the caller in the controller's words, and is no failure of the link.
        with pytest.raises(ValueError, match="capacity: expected `int` >= 1, got 0"):
            await client.hello(hello("c", capacity=0))
        assert client.up
        for key in (10, 11):
            await client.route(query(key))
        client.release(10)
        client.replica_gone(["b"])

        async def noticed() -> bool:
            view = await client.snapshot()
            assert view is not None
            conditions = {entry["replica_id"]: entry["condition"] for entry in view["replicas"]}
            return conditions == {"a": "fresh", "b": "gone"} and view["reservations"] <= 1

        await until(noticed, "the notices arrive")
        assert await client.goodbye("a")
        assert await client.route(query(12)) == RouteDecision(None, "no_replica")
        page = await client.render_metrics()
        assert page is not None and b"sluice_decisions_total" in page


async def test_troubles_are_told_and_what_becomes_of_them_is_heard(common: str) -> None:
    clock = Clock()
    async with connected(common, clock=clock) as client:
        assert await client.hello(hello("a", now_s=5)) is not None
        await until(lambda: _placed_by_connection(client), "the connection is open")
        assert await client.hello(hello("b", now_s=5)) is not None
        assert client.quarantined == frozenset()
        client.faulted("a", ReplicaFault.HUNG)

        async def heard() -> bool:
            placed = await client.route(query(2))
            return placed is not None and client.quarantined == {"a"}

        await until(heard, "the replica is in quarantine")
        # Nothing is heard for long: what was said then counts no more.
        clock.advance(QUARANTINE_KEPT_S + 1)
        assert client.quarantined == frozenset()


async def test_a_sync_asks_which_requests_are_going_to_be_late(common: str) -> None:
    async with connected(common) as client:
        rows = [waiting_row(1, 100_000, 4.9), waiting_row(2, 10, 4.0)]
        assert await client.hello(hello("a", rows, now_s=5)) is not None
        assert await client.hello(hello("b", now_s=5)) is not None
        told: list[int] = []
        failures = [RuntimeError("not yet")]  # one does not end it

        def waits() -> list[FirstTokenWait]:
            if failures:
                raise failures.pop()
            return [FirstTokenWait(key, "a", 5.0, 0.0) for key in (1, 2)]

        client.on_sync(waits, told.extend)
        syncs = asyncio.create_task(client.sync_repeatedly())

        async def answered() -> bool:
            return bool(told)

        await until(answered, "the controller has answered")
        assert set(told) == {1}
        client.faulted("b", ReplicaFault.HUNG)

        async def heard() -> bool:
            return client.quarantined == {"b"}

        await until(heard, "the quarantine comes with the answer")
        syncs.cancel()


async def test_endings_go_with_a_sync_and_wait_while_nobody_answers(common: str) -> None:
    async with connected(common) as client:
        assert await client.hello(hello("a")) is not None
        await client.route(query(1)._replace(request_id="one"))
        await client.route(query(2)._replace(request_id="two"))

        async def endings() -> dict[str, Any]:
            found = await client.decisions(10)
            assert found is not None
            ends = {each["request_id"]: each["ended"] for each in found}
            return {name: ends[name] for name in ("one", "two")}

        client.on_sync(tuple, lambda _: None)
        client.ended(RequestEnding("one", "ok", (), 3, 0.1, 0.01, 0.12))
        assert set((await endings()).values()) == {None}
        process = process_of(common)
        os.kill(process, signal.SIGSTOP)
        try:
            # The observer takes the metrics all the same.
            assert await client.push_metrics(newer_push("router", ()))
            client.sync()
            assert client._first._sync_task is not None
            await client._first._sync_task
        finally:
            os.kill(process, signal.SIGCONT)
        client.ended(RequestEnding("two", "cancelled", (), 0, None, None, 0.2))

        async def heard() -> bool:
            client.sync()
            return None not in (await endings()).values()

        await until(heard, "the controller has both")
        told = await endings()
        assert (told["one"]["outcome"], told["two"]["outcome"]) == ("ok", "cancelled")


async def test_without_its_observer_decisions_go_on_and_the_metrics_come_back(
    restarted: str,
) -> None:
    gauge = MetricSample("sluice_x", "gauge", "X.", "sluice_x", (), 3.0)
    async with connected(restarted) as client:
        await client.hello(hello("a"))
        assert await client.push_metrics(newer_push("router", (gauge,)))
        page = await client.render_metrics()
        assert page is not None and b"sluice_x 3.0" in page and b"sluice_controller_up 1.0" in page
        epoch = ray.get(actor_of(restarted).route.remote([]), timeout=120).epoch
        os.kill(process_of(restarted, observer_actor_name), signal.SIGKILL)
        for key in range(50):
            assert await client.route(query(key)) == RouteDecision("a", "placed")
        assert client.up

        async def back() -> bool:
            await client.push_metrics(newer_push("router", (gauge,)))
            again = await client.render_metrics()
            return again is not None and b"sluice_x 3.0" in again

        await until(back, "the observer has the metrics again")
        # The decisions are the controller's, which has not been restarted.
        told = await client.decisions(100)
        assert told is not None and len(told) == 50
        assert ray.get(actor_of(restarted).route.remote([]), timeout=120).epoch == epoch
        # It is started anew where Ray does not restart it.
        ray.kill(actor_of(restarted, observer_actor_name), no_restart=True)
        await until(back, "another observer has the metrics")


async def test_without_the_controller_its_observer_shows_the_metrics(common: str) -> None:
    gauge = MetricSample("sluice_x", "gauge", "X.", "sluice_x", (), 3.0)
    async with connected(common) as client:
        assert await client.push_metrics(newer_push("router", (gauge,)))
        process = process_of(common)
        os.kill(process, signal.SIGSTOP)
        try:
            page = await client.render_metrics(timeout_s=60)
            assert page is not None and b"sluice_x 3.0" in page
            assert b"sluice_controller_up 0.0" in page
            assert await client.snapshot(timeout_s=60) is None
        finally:
            os.kill(process, signal.SIGCONT)


async def test_concurrent_questions_share_calls(common: str) -> None:
    registry = CollectorRegistry()
    async with connected(common, registry=registry) as client:
        await client.hello(hello("a"))
        await client.hello(hello("b"))
        decisions = await asyncio.gather(*(client.route(query(key)) for key in range(64)))
        placed = [decision.replica_id for decision in decisions if decision is not None]
        # All were answered, evenly, in one call.
        assert (placed.count("a"), placed.count("b")) == (32, 32)
        assert registry.get_sample_value("sluice_controller_batch_queries_count") == 1
        assert registry.get_sample_value("sluice_controller_batch_queries_sum") == 64
        labels = {"method": "route", "outcome": "answered"}
        assert registry.get_sample_value("sluice_controller_calls_total", labels) == 64


async def test_a_killed_controller_comes_back_and_is_rebuilt(restarted: str) -> None:
    registry = CollectorRegistry()
    async with connected(restarted, timeout_s=0.25, registry=registry) as client:
        reply = await client.hello(hello("a"))
        assert reply is not None
        # The first decision may wait for a cold worker; this one shows that it works.
        await until(lambda: _placed(client), "a decision")
        os.kill(process_of(restarted), signal.SIGKILL)

        async def lost() -> bool:
            await client.route(query(0))
            return not client.up

        await until(lost, "the client notices")
        # From now on requests are told at once to go on without.
        assert [await client.route(query(key)) for key in range(50)] == [None] * 50
        assert _routed(registry, "unavailable") >= 50

        async def recovered() -> bool:
            return await client.route(query(5_000)) is not None

        await until(recovered, "it answers again")
        # It knows nothing and says so, until the replica has said hello again.
        assert await client.route(query(5_001)) == RouteDecision(None, "no_replica")
        resync = await client.report(delta("a", reply.epoch, 1))
        assert resync is not None and resync.resync
        assert resync.epoch != reply.epoch
        again = await client.hello(hello("a", [waiting_row(1, 100)], seq=1))
        assert again is not None and again.epoch == resync.epoch
        assert await client.route(query(5_002)) == RouteDecision("a", "placed")


async def test_while_one_cell_is_away_the_other_one_decides(app: str) -> None:
    a, b = "replica-1", "replica-2"
    assert (cell_of(a, 2), cell_of(b, 2)) == (0, 1)
    config = CONFIG.model_copy(update={"cells": 2})

    async def placed(keys: range) -> set[str | None]:
        answers = await asyncio.gather(*(client.route(query(key)) for key in keys))
        return {answer and answer.replica_id for answer in answers}

    async with connected(app, config=config) as client:
        before = await client.hello(hello(b))
        assert before is not None
        # A cell without replicas is asked, and sends the router on.
        assert await placed(range(20)) == {b}
        assert await client.hello(hello(a)) is not None

        async def shared() -> bool:
            return await placed(range(3_000, 3_040)) == {a, b}

        await until(shared, "both cells decide")
        os.kill(process_of(app, lambda app: controller_actor_name(app, 1)), signal.SIGKILL)
        for first in range(1_000, 2_000, 20):
            assert await placed(range(first, first + 20)) == {a}

        # As after any restart, the replica is asked for its state, and then gets requests again.
        async def known() -> bool:
            told = await client.report(delta(b, before.epoch, 1))
            return told is not None and told.resync

        await until(known, "the cell is back")
        again = await client.hello(hello(b, seq=1))
        assert again is not None and again.epoch != before.epoch

        await until(shared, "both cells decide again")
        view = await client.snapshot(timeout_s=60)
        assert view is not None
        assert {each["replica_id"] for each in view["replicas"]} == {a, b}
        # The last replica of a cell is not the last one of the fleet.
        for name, is_last in ((a, False), (b, True)):
            drained = await client.drain(name, True, spare_last=True)
            assert drained is not None and drained["last"] is is_last

        # The cell of a closed replica is asked again once its last answer is old.
        async def told() -> bool:
            found = await placed(range(4_000, 4_020))
            assert a not in found
            return found == {b} and client.closed == {a}

        await until(told, "the closed replica is known")


async def test_a_stopped_controller_is_started_again_by_who_needs_it(restarted: str) -> None:
    async with connected(restarted) as client:
        before = await client.hello(hello("a"))
        assert before is not None
        assert stop_controller(restarted)

        async def recovered() -> bool:
            reply = await client.report(delta("a", before.epoch, 1))
            return reply is not None and reply.resync and reply.epoch != before.epoch

        await until(recovered, "another controller answers")


def test_a_controller_and_an_observer_of_another_configuration_are_replaced(
    restarted: str,
) -> None:
    first = ensure_controller(restarted, CONFIG, 120)
    epoch = ray.get(first.route.remote([]), timeout=120).epoch
    observer = ensure_observer(restarted, CONFIG, 120)
    changed = ControllerConfig(policy="round_robin")
    second = ensure_controller(restarted, changed, 120)
    assert ray.get(second.route.remote([]), timeout=120).epoch != epoch
    assert ray.get(second.fingerprint.remote(), timeout=120) == fingerprint_of(changed)
    another = ensure_observer(restarted, changed, 120)
    assert another != observer
    assert ray.get(another.snapshot.remote(), timeout=120)["policy"] == "round_robin"


async def test_a_paused_controller_costs_few_deadlines(common: str) -> None:
    registry = CollectorRegistry()
    async with connected(common, timeout_s=0.25, registry=registry) as client:
        await client.hello(hello("a"))
        await until(lambda: _placed_by_connection(client), "a decision")
        pid = process_of(common)
        os.kill(pid, signal.SIGSTOP)
        try:
            # One late answer might be this process's own fault; several in a row are not.
            for _ in range(MAX_TIMEOUTS):
                assert client.up
                first = await asyncio.gather(*(client.route(query(key)) for key in range(100)))
                assert first == [None] * 100
            # A round in which this process itself was held up does not count.
            await until(lambda: _down_or_asked(client), "the link is known to be down")
            before = _routed(registry, "unavailable")
            rest = [await client.route(query(key)) for key in range(100, 1_100)]
            assert rest == [None] * 1_000
            # None of the thousand waited for its deadline.
            assert _routed(registry, "unavailable") == before + 1_000
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: _placed(client), "it answers again")


async def test_a_controller_ends_when_nobody_speaks_to_it(app: str) -> None:
    silent = ray.remote(DetachedController).options(
        name=controller_actor_name(app),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=100,
    )
    actor = silent.remote(CONFIG, end_after_s=1.0)
    # For as long as somebody speaks it lives, well beyond that second.
    until_s = time.monotonic() + 3
    epochs = set()
    while time.monotonic() < until_s:
        epochs.add((await actor.route.remote([])).epoch)
        await asyncio.sleep(0.05)
    assert len(epochs) == 1

    async def ended() -> bool:
        return not any(
            entry["name"] == controller_actor_name(app)
            for entry in ray.util.list_named_actors(all_namespaces=True)
        )

    await until(ended, "it ends by itself, and Ray does not restart it")


async def test_a_refused_batch_is_no_answer_to_its_requests(
    common: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    async with connected(common, registry=registry) as client:
        # A client that does not know the limit.
        monkeypatch.setattr("sluice.controller.cell_client.MAX_BATCH", 2 * MAX_QUERIES)
        count = MAX_QUERIES + 1
        assert await asyncio.gather(*(client.route(query(key)) for key in range(count))) == (
            [None] * count
        )
        assert _routed(registry, "refused") == count
        assert client.up
        assert await client.route(query(1)) == RouteDecision(None, "no_replica")


async def test_a_slow_page_does_not_take_the_decisions_away(common: str) -> None:
    async with connected(common) as client:
        await client.hello(hello("a"))
        assert await client.render_metrics(timeout_s=1e-6) is None
        assert await client.snapshot(timeout_s=1e-6) is None
        assert client.up
        assert await client.route(query(1)) == RouteDecision("a", "placed")


def _routed(registry: CollectorRegistry, outcome: str) -> float:
    labels = {"method": "route", "outcome": outcome}
    return registry.get_sample_value("sluice_controller_calls_total", labels) or 0.0


async def _down_or_asked(client: ControllerClient) -> bool:
    if client.up:
        assert await client.route(query(9_998)) is None
    return not client.up


async def _placed(client: ControllerClient) -> bool:
    decision = await client.route(query(9_999))
    return decision is not None and decision.replica_id == "a"


async def _placed_by_connection(client: ControllerClient) -> bool:
    return await _placed(client) and client._first._channel.open
