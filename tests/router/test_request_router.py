"""The hint router, the handle and real Serve: three replicas, tuned settings."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from ray import serve
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.config import RequestRouterConfig

from sluice.controller.client import ControllerClient, stop_controller
from sluice.controller.config import ControllerConfig
from sluice.protocol.requests import EngineRequest, Progress, ResponseChunk, ResponseHead
from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.serve.hint import Hint, NoReplicaError
from sluice.router.serve.replicas import ServeReplicas, ServeStream
from sluice.router.serve.request_router import HintRouter
from sluice.router.serve.running import CHOSEN, RUNNING
from sluice.scheduling.fleet.ranks import rank_name
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import hello
from tests.injuries import Process
from tests.own_ray import own_ray
from tests.router.far_side import FarController
from tests.router.tiny_replicas import Front, TinyReplica

pytestmark = [
    pytest.mark.ray,
    pytest.mark.own_ray,
    pytest.mark.asyncio(loop_scope="module"),
]

APP = "hints"
_LARGE_BYTES = 9 << 20
"""Above the 4 MiB that gRPC allows where nothing is set."""
CONTROLLER = ControllerConfig(stale_after_s=100)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas() -> AsyncIterator[ServeReplicas]:
    """Three replicas, over a handle of this process. Serve must end before the event loop does."""
    with own_ray(num_cpus=4):
        try:
            await asyncio.to_thread(deploy)
            yield ServeReplicas({"mixed": [serve.get_deployment_handle("TinyReplica", APP)]})
        finally:
            await serve.shutdown_async()
            stop_controller(APP)


def deploy() -> None:
    serve.start(proxy_location="Disabled")
    tiny = serve.deployment(TinyReplica).options(
        num_replicas=3,
        ray_actor_options={"num_cpus": 0.01},
        max_ongoing_requests=100,
        health_check_period_s=0.5,
        graceful_shutdown_timeout_s=1,
        graceful_shutdown_wait_loop_s=0.1,
        request_router_config=RequestRouterConfig(
            request_router_class="sluice.router.serve.request_router:HintRouter",
            request_router_kwargs={
                "controller": CONTROLLER.model_dump(mode="json"),
            },
        ),
    )
    front = serve.deployment(Front).options(ray_actor_options={"num_cpus": 0.01})
    serve.run(front.bind(tiny.bind()), name=APP, route_prefix=None)


def start(
    replicas: ServeReplicas,
    do: str,
    target: str | None = None,
    avoid: tuple[str, ...] = (),
    **fields: Any,
) -> ServeStream:
    body = {"do": do, **fields}
    request = EngineRequest(uuid.uuid4().hex, "chat", body, SLO())
    return replicas.generate(request, target, avoid, "mixed")


async def ask(replicas: ServeReplicas, *where: Any) -> dict[str, Any]:
    items = [item async for batch in start(replicas, "serve", *where) for item in batch]
    answer: dict[str, Any] = json.loads(items[1].data)  # type: ignore[union-attr]
    assert items[0].replica_id == answer["replica"]  # type: ignore[union-attr]
    return answer


async def failure(stream: ServeStream) -> ReplicaFailedError:
    with pytest.raises(ReplicaFailedError) as caught:
        async for _ in stream:
            pass
    return caught.value


async def names_of(replicas: ServeReplicas) -> list[str]:
    """The three replicas' names."""
    found: set[str] = set()

    async def all_three() -> bool:
        found.add((await ask(replicas, None, tuple(found)))["replica"])
        return len(found) == 3

    await until(all_three)
    return sorted(found)


async def live_at(replicas: ServeReplicas, name: str) -> list[str]:
    """Requests that run at a replica."""
    return list((await ask(replicas, name))["live"])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await condition():  # noqa: ASYNC110  no event tells of another process
            await asyncio.sleep(0.01)


async def test_a_hint_is_followed_exactly(replicas: ServeReplicas) -> None:
    names = await names_of(replicas)
    assert len(names) == 3
    wanted = names * 10
    answers = await asyncio.gather(*(ask(replicas, name) for name in wanted))
    assert [answer["replica"] for answer in answers] == wanted
    assert [answer["target"] for answer in answers] == wanted


async def test_large_requests_and_answers_pass(replicas: ServeReplicas) -> None:
    (head, chunk, _) = [
        item
        async for batch in start(replicas, "serve", padding=_LARGE_BYTES * "x")
        for item in batch
    ]
    assert isinstance(head, ResponseHead)
    assert head.status == 200
    stream = start(replicas, "answer at length", bytes=_LARGE_BYTES)
    (_, chunk, _) = [item async for batch in stream for item in batch]
    assert isinstance(chunk, ResponseChunk)
    assert len(chunk.data) == _LARGE_BYTES


async def test_a_rank_is_at_its_replica(replicas: ServeReplicas) -> None:
    first, second, third = await names_of(replicas)
    chosen: list[str] = []
    request = EngineRequest(uuid.uuid4().hex, "chat", {"do": "serve"}, SLO())
    CHOSEN[request.request_id] = chosen.append
    target = rank_name(second, 1)
    try:
        stream = replicas.generate(request, target, (), "mixed")
        (_, chunk, _) = [item async for batch in stream for item in batch]
    finally:
        del CHOSEN[request.request_id]
    assert chosen == [target], "who waits for it asks this rank"
    assert isinstance(chunk, ResponseChunk)
    answer = json.loads(chunk.data)
    assert (answer["replica"], answer["target"], answer["rank"]) == (second, target, 1)
    others = (rank_name(first, 0), rank_name(first, 1), rank_name(third, 0))
    assert (await ask(replicas, None, others))["replica"] == second


async def test_without_a_usable_hint_serve_balances(replicas: ServeReplicas) -> None:
    names = await names_of(replicas)
    for where in ((None,), ("unknown",), ("",)):
        answers = await asyncio.gather(*(ask(replicas, *where) for _ in range(30)))
        used = {answer["replica"] for answer in answers}
        assert len(used) > 1
        assert used <= set(names)


async def test_replicas_are_avoided(replicas: ServeReplicas) -> None:
    names = await names_of(replicas)
    answers = await asyncio.gather(*(ask(replicas, None, (names[0], names[2])) for _ in range(10)))
    assert {answer["replica"] for answer in answers} == {names[1]}
    everything = await ask(replicas, None, tuple(names))
    assert everything["replica"] in names


async def test_closed_replicas_get_only_what_is_sent_there(replicas: ServeReplicas) -> None:
    names = await names_of(replicas)
    closed: list[str] = []
    handle = serve.get_deployment_handle("TinyReplica", APP)
    some = ServeReplicas({"mixed": [handle]}, lambda: closed)
    closed += names[:2]
    for where in ((None,), ("unknown",), (None, (names[2],)), (None, (names[0],))):
        answers = await asyncio.gather(*(ask(some, *where) for _ in range(10)))
        assert {answer["replica"] for answer in answers} == {names[2]}, where
    # The controller may have decided a moment before.
    assert (await ask(some, names[0]))["replica"] == names[0]
    closed.append(names[2])
    refused = await failure(start(some, "serve"))
    assert (refused.reason, refused.retry) == (Reason.NO_REPLICA, False)
    closed.clear()
    answers = await asyncio.gather(*(ask(some, None) for _ in range(30)))
    assert len({answer["replica"] for answer in answers}) > 1


async def consume(stream: ServeStream) -> None:
    async for _ in stream:
        pass


async def until_idle(replicas: ServeReplicas, name: str) -> None:
    async def idle() -> bool:
        return await live_at(replicas, name) == []

    await until(idle)


async def test_a_cancelled_call_ends_at_the_replica_whenever_it_is_cancelled(
    replicas: ServeReplicas,
) -> None:
    target = (await names_of(replicas))[0]
    for turns in range(40):
        stream = start(replicas, "hang", target)
        reader = asyncio.create_task(consume(stream))
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        stream.cancel()
        await asyncio.wait([reader])
    await until_idle(replicas, target)


async def test_a_call_that_is_cancelled_just_as_it_is_assigned_ends(
    replicas: ServeReplicas,
) -> None:
    """Serve has the call then, but the response object has not seen it."""
    target = (await names_of(replicas))[0]
    stream = start(replicas, "hang", target)
    reader: asyncio.Task[None]

    def leave(_: object) -> None:
        reader.cancel()
        stream.cancel()

    # Before the reader waits for it, so that this is called first.
    stream._response._replica_result_future.add_done_callback(leave)
    reader = asyncio.create_task(consume(stream))
    await asyncio.wait([reader])
    assert reader.cancelled()
    await until_idle(replicas, target)


async def test_what_a_replica_raises_is_told_apart(replicas: ServeReplicas) -> None:
    lost = await failure(start(replicas, "lose engine"))
    assert (lost.reason, lost.dead, lost.retry) == (Reason.REPLICA_FAILED, True, True)
    bug = await failure(start(replicas, "fail"))
    assert (bug.reason, bug.dead, bug.retry) == (Reason.INTERNAL, False, False)


async def test_a_killed_replica_costs_a_retry_and_is_reported(replicas: ServeReplicas) -> None:
    client = await asyncio.to_thread(ControllerClient, APP, CONTROLLER, 5.0)
    try:
        target, *others = await names_of(replicas)
        for name in (target, *others):
            await client.hello(hello(name))
        bystander = start(replicas, "hang", target)
        waiting = asyncio.create_task(failure(bystander))
        dispatcher = Dispatcher(FarController(target), replicas, RouterMetrics(), RouterConfig())
        lost = await failure(start(replicas, "die", target))
        assert (lost.reason, lost.retry) == (Reason.REPLICA_FAILED, True)
        call = Call("r", "chat", {"do": "serve"}, SLO(), PromptSize(1), 0.0)
        answer = await dispatcher.open(call)
        assert answer.head.replica_id in others
        assert (await waiting).reason is Reason.REPLICA_FAILED

        async def reported() -> bool:
            view = await client.snapshot()
            assert view is not None
            conditions = {entry["replica_id"]: entry["condition"] for entry in view["replicas"]}
            return conditions == {target: "gone", **dict.fromkeys(others, "fresh")}

        await until(reported)
        # Serve tells this event loop of the next replica. Once the loop does not run when there is
        # something to tell, as between two tests, Serve never tells it again.
        assert target not in await names_of(replicas)
    finally:
        await client.close()


async def test_without_a_replica_the_wait_is_bounded(
    replicas: ServeReplicas,
) -> None:
    router = HintRouter(
        deployment_id=DeploymentID("none", APP), handle_source=DeploymentHandleSource.REPLICA
    )
    router.initialize_state(controller=CONTROLLER.model_dump(mode="json"), no_replica_wait_s=0.01)
    request = PendingRequest([], {}, RequestMetadata("request", "internal"))
    with pytest.raises(NoReplicaError):
        await router._choose_replica_for_request(request)


async def test_with_no_replica_for_long_nobody_waits(replicas: ServeReplicas) -> None:
    router = lone_router(no_replica_wait_s=1_000)
    for name in ("a", "b"):
        router.on_replica_actor_died(ReplicaID(name, DeploymentID("few", APP)))
    waiting = asyncio.create_task(router._choose_replica_for_request(hinted(Hint())))
    await asyncio.sleep(0)
    assert not waiting.done(), "the last one has just gone"
    waiting.cancel()
    router._none_since_s -= 1_000
    async with asyncio.timeout(120):
        with pytest.raises(NoReplicaError):
            await router._choose_replica_for_request(hinted(Hint()))
    # The next time it counts anew.
    router._by_unique_id = {"c": Running("c")}
    router.on_replica_actor_died(ReplicaID("c", DeploymentID("few", APP)))
    waiting = asyncio.create_task(router._choose_replica_for_request(hinted(Hint())))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_where_there_may_be_none_the_wait_counts_from_the_request(
    replicas: ServeReplicas,
) -> None:
    """However long ago the last one left; and others in this process know that there is none."""
    router = lone_router(scales_to_zero=True, no_replica_wait_s=60.0)
    for name in ("a", "b"):
        router.on_replica_actor_died(ReplicaID(name, DeploymentID("few", APP)))
    assert not RUNNING.of(DeploymentID("few", APP))
    router._none_since_s -= 1_000
    waiting = asyncio.create_task(router._choose_replica_for_request(hinted(Hint("c"))))
    await asyncio.sleep(0)
    assert not waiting.done()
    router._by_unique_id = {"c": Running("c")}
    router._note_change(0)
    assert RUNNING.of(DeploymentID("few", APP)) == {"c"}
    assert (await waiting).replica_id.unique_id == "c"


class Running:
    """A replica as Serve's router lists it."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DeploymentID("few", APP))


def lone_router(**settings: Any) -> HintRouter:
    """One with two replicas that Serve would never choose, as none answers."""
    router = HintRouter(
        deployment_id=DeploymentID("few", APP), handle_source=DeploymentHandleSource.REPLICA
    )
    given = {"controller": CONTROLLER.model_dump(mode="json"), "no_replica_wait_s": 0.01}
    router.initialize_state(**given | settings)
    router._by_unique_id = {name: Running(name) for name in ("a", "b")}
    return router


def hinted(hint: Hint) -> PendingRequest:
    kwargs = {wire.TARGET_KWARG: hint.encode()}
    return PendingRequest([], kwargs, RequestMetadata("request", uuid.uuid4().hex))


async def test_a_request_that_waits_fails_when_the_last_replica_dies(
    replicas: ServeReplicas,
) -> None:
    """Serve itself would let it wait for a next one, however long that takes."""
    router = lone_router()
    waiting = asyncio.create_task(router._choose_replica_for_request(hinted(Hint())))
    await asyncio.sleep(0)
    for name in ("a", "b"):
        assert not waiting.done()
        router.on_replica_actor_died(ReplicaID(name, DeploymentID("few", APP)))
    with pytest.raises(NoReplicaError):
        await waiting
    assert not router._pending_requests_by_id


async def test_a_pool_that_has_failed_a_request_hands_it_to_the_others(
    replicas: ServeReplicas,
) -> None:
    router = lone_router(other_pools=True)
    request = hinted(Hint(avoid=("a",)))
    assert (await router._choose_replica_for_request(request)).replica_id.unique_id == "b"
    for hint in (Hint(avoid=("a", "b")), Hint(avoid=("a",), closed=("b",))):
        with pytest.raises(NoReplicaError):
            await router._choose_replica_for_request(hinted(hint))
    # Without another pool, one that has just failed it is better than none.
    alone = lone_router()
    waiting = asyncio.create_task(alone._choose_replica_for_request(hinted(Hint(avoid=("a", "b")))))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (Hint(quarantined=("a",)), "b"),
        (Hint("a", quarantined=("a",)), "a"),
        # One that has just failed the request is better than one that fails all.
        (Hint(avoid=("b",), quarantined=("a",)), "b"),
        # And that is better than none, but no better than one that an operator has closed.
        (Hint(closed=("a",), quarantined=("b",)), "b"),
        (Hint(avoid=("a",), quarantined=("a", "b")), "b"),
    ],
)
async def test_a_quarantined_replica_is_chosen_by_a_target_or_as_the_last(
    replicas: ServeReplicas, hint: Hint, expected: str
) -> None:
    chosen = await lone_router()._choose_replica_for_request(hinted(hint))
    assert chosen.replica_id.unique_id == expected


async def test_another_pool_is_better_than_a_quarantined_replica(replicas: ServeReplicas) -> None:
    router = lone_router(other_pools=True)
    with pytest.raises(NoReplicaError):
        await router._choose_replica_for_request(hinted(Hint(avoid=("b",), quarantined=("a",))))


@pytest.mark.parametrize(
    "hint",
    [
        Hint(),
        Hint("a"),
        Hint(avoid=("a",)),
        Hint(avoid=("a", "b")),
        Hint("a", closed=("b", "c")),
        Hint(avoid=("a", "b"), closed=("c",)),
        Hint(closed=("c",)),
        Hint(quarantined=("c", "d")),
        Hint(avoid=("a",), closed=("b",), quarantined=("c",)),
        Hint("a", quarantined=("c",)),
    ],
)
async def test_a_hint_survives_the_way(hint: Hint) -> None:
    assert Hint.parse(hint.encode()) == hint


@pytest.mark.parametrize("odd", [None, "", 5, ["a"], b"a"])
async def test_an_odd_hint_is_none(odd: object) -> None:
    assert Hint.parse(odd) == Hint()


async def test_a_question_goes_where_it_is_sent_and_a_frozen_replica_owes_nobody_an_answer(
    replicas: ServeReplicas,
) -> None:
    names = await names_of(replicas)
    for name in names:
        assert (await replicas.progress(["nobody's"], name, (), "mixed")) == Progress(
            name, False, ("nobody's",)
        )
    assert (await replicas.progress((), None, names[:2], "mixed")).replica_id == names[2]
    told = await replicas.progress(["which process"], names[0], (), "mixed")
    process = Process.of(int(told.unknown[0]))
    with process.frozen():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await replicas.progress((), names[0], (), "mixed")
        # The attempt there goes elsewhere; nothing of it is left behind.
        router = Dispatcher(
            FarController(names[0], names[1]), replicas, RouterMetrics(), RouterConfig()
        )
        call = Call("r", "chat", {"do": "serve"}, SLO(), PromptSize(1), time.monotonic())
        answer = await router.open(call)
        assert answer.head.replica_id == names[1]
        router.close(answer)
    assert (await ask(replicas, names[0]))["replica"] == names[0]
    await until(lambda: nobody_at(replicas, names[0]))


async def test_who_waits_hears_where_serve_has_sent_a_request(replicas: ServeReplicas) -> None:
    chosen: list[str] = []
    request = EngineRequest(uuid.uuid4().hex, "chat", {"do": "serve"}, SLO())
    CHOSEN[request.request_id] = chosen.append
    try:
        items = [
            item async for batch in replicas.generate(request, None, (), "mixed") for item in batch
        ]
    finally:
        del CHOSEN[request.request_id]
    assert chosen[-1:] == [items[0].replica_id]  # type: ignore[union-attr]


async def nobody_at(replicas: ServeReplicas, name: str) -> bool:
    return not await live_at(replicas, name)
