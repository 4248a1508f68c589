"""The deployment on real Ray Serve, with simulated engines and a real controller."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve._private.config import DeploymentConfig

from sluice.controller.client import ControllerClient, controller_actor_name, stop_controller
from sluice.controller.config import ControllerConfig
from sluice.controller.discovery import NAMESPACE
from sluice.deploy.autoscaling import serve_autoscaling
from sluice.protocol.requests import (
    EngineRequest,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
    request_key,
)
from sluice.replica.config import (
    AutoscalingConfig,
    EngineConfig,
    ReplicaConfig,
    SimulatedEngineConfig,
)
from sluice.replica.deployment import ConfiguredReplicas, ReplicaServer, _core
from sluice.scheduling.batching.batch import begin
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from tests.e2e.conftest import PATIENT
from tests.own_ray import own_ray

APP = "replicas"
CONTROLLER = ControllerConfig.model_validate({**PATIENT, "policy": "round_robin"})
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with own_ray(num_cpus=8):
        try:
            serve.start(proxy_location="Disabled")
            yield
        finally:
            serve.shutdown()
            stop_controller(APP)


@pytest.fixture
async def replicas(cluster: None) -> AsyncIterator[Any]:
    """A handle to two replicas whose steps take a while."""
    application = (
        serve.deployment(ReplicaServer)
        .options(
            num_replicas=2,
            ray_actor_options={"num_cpus": 0.01},
            graceful_shutdown_wait_loop_s=0.1,
            max_ongoing_requests=1000,
        )
        .bind(
            EngineConfig(
                kind="simulated",
                model="model",
                simulated=SimulatedEngineConfig(step_s=0.005, token_s=0, context_token_s=0),
            ),
            ReplicaConfig(drain_timeout_s=10),
            CONTROLLER,
        )
    )
    handle = await asyncio.to_thread(serve.run, application, name=APP, route_prefix=None)
    handle._init(_run_router_in_separate_loop=True)
    yield handle
    await asyncio.to_thread(serve.delete, APP)


def loops_compiled(_replica: object) -> int:
    """Forms of a policy's loop that this process has machine code of."""
    return len(begin.signatures)  # type: ignore[attr-defined]


async def check_loops_compiled() -> None:
    """No request will wait for a compiler."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    actors = [ray.get_actor(name, "serve") for name in names if name.startswith("SERVE_REPLICA")]
    assert len(actors) == 2
    for actor in actors:
        assert await actor.__ray_call__.remote(loops_compiled) > 0


def completion(request_id: str, **body: Any) -> EngineRequest:
    return EngineRequest(request_id, "completions", {"prompt": "a prompt", **body}, SLO(ttft_s=1))


async def items_of(handle: Any, request: EngineRequest) -> list[ResponseItem]:
    response = handle.options(stream=True).generate.remote(request)
    return [item async for batch in response for item in batch]


async def eventually(condition: Any) -> Any:
    """The first true result of an asynchronous condition."""
    async with asyncio.timeout(LIMIT_S):
        while not (result := await condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return result


def fresh(snapshot: dict[str, Any] | None) -> set[str]:
    """Names of the replicas that the controller would send requests to."""
    listed = (snapshot or {}).get("replicas", ())
    return {entry["replica_id"] for entry in listed if entry["condition"] == "fresh"}


@pytest.mark.release
@pytest.mark.ray
@pytest.mark.own_ray
async def test_life_of_a_replica(replicas: Any) -> None:
    client = await asyncio.to_thread(ControllerClient, APP, CONTROLLER, 5.0)

    async def registered() -> set[str]:
        names = fresh(await client.snapshot())
        return names if len(names) == 2 else set()

    names = await eventually(registered)
    await check_loops_compiled()

    # Responses are whole, and come from replicas that the controller knows by the same name.
    async def answered() -> set[str]:
        requests = [completion(f"r{index}", max_tokens=30, stream=True) for index in range(20)]
        results = await asyncio.gather(*(items_of(replicas, request) for request in requests))
        heads = set()
        for items in results:
            head, tail = items[0], items[-1]
            assert isinstance(head, ResponseHead)
            assert isinstance(tail, ResponseTail)
            assert tail.output_tokens == 30
            assert sum(item.tokens for item in items if isinstance(item, ResponseChunk)) == 30
            heads.add(head.replica_id)
        assert heads <= names
        return heads

    async def both_answer() -> bool:
        # Serve tells a handle of new replicas after they have told the controller of themselves.
        return await answered() == names

    await eventually(both_answer)
    models = await replicas.models.remote()
    assert [entry["id"] for entry in models["data"]] == ["model"]

    # The controller's reservations end with the requests: it saw them live or as finished.
    decision = await client.route(RouteQuery(request_key("placed"), SLO(), 2))
    assert decision is not None
    assert decision.replica_id in names
    await items_of(replicas, completion("placed", max_tokens=2))

    async def nothing_reserved() -> bool:
        snapshot = await client.snapshot()
        return snapshot is not None and snapshot["reservations"] == 0

    await eventually(nothing_reserved)
    snapshot = await client.snapshot()
    assert snapshot is not None
    assert snapshot["reservations_expired"] == 0

    # A consumer that goes away frees the engine.
    response = replicas.options(stream=True).generate.remote(
        completion("gone", max_tokens=8000, stream=True)
    )
    await anext(aiter(response))
    assert await live(replicas) == 1
    response.cancel()

    async def idle() -> bool:
        return await live(replicas) == 0

    await eventually(idle)

    # A controller that was killed knows the replicas again, by their own doing.
    before = await client.snapshot()
    assert before is not None
    ray.kill(ray.get_actor(controller_actor_name(APP), NAMESPACE), no_restart=False)

    async def rebuilt() -> bool:
        snapshot = await client.snapshot()
        return (
            snapshot is not None
            and snapshot["epoch"] != before["epoch"]
            and fresh(snapshot) == names
        )

    await eventually(rebuilt)

    # Each replica's metrics reach the controller's page.
    async def steps() -> float:
        page = await client.render_metrics()
        samples = [
            sample
            for family in text_string_to_metric_families((page or b"").decode())
            for sample in family.samples
        ]
        gauges = {s.labels["replica"] for s in samples if s.name == "sluice_latency_correction"}
        counts = [s.value for s in samples if s.name == "sluice_engine_steps_total"]
        return sum(counts) if gauges == names else 0.0

    assert await eventually(steps) > 30

    # Stopped gracefully: a live stream ends whole, and the controller is told.
    last = asyncio.create_task(items_of(replicas, completion("last", max_tokens=200, stream=True)))

    async def started() -> bool:
        return await live(replicas) == 1

    await eventually(started)
    await asyncio.to_thread(serve.delete, APP)
    assert isinstance((await last)[-1], ResponseTail)

    async def forgotten() -> bool:
        snapshot = await client.snapshot()
        return snapshot is not None and not fresh(snapshot)

    await eventually(forgotten)
    await client.close()


async def live(handle: Any) -> int:
    """Live requests of all replicas."""
    snapshots = await handle.broadcast("engine_snapshot").results_async()
    return sum(snapshot["live_requests"] for snapshot in snapshots)


def test_replicas_are_pinned_to_the_cores_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 4, 6})
    assert [_core(rank) for rank in range(5)] == [4, 6, 9, 4, 6]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [_core(rank) for rank in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("count", [1, 5])
def test_a_fixed_number_is_what_was_deployed_last(count: int) -> None:
    it = ConfiguredReplicas()
    assert it.number is None
    it.hear(DeploymentConfig.from_default(num_replicas=9))
    it.hear(DeploymentConfig.from_default(num_replicas=count))
    assert it.number == count


def test_an_autoscaled_one_has_a_least() -> None:
    scaled = serve_autoscaling(
        AutoscalingConfig(min_replicas=3, initial_replicas=4, max_replicas=8)
    )
    it = ConfiguredReplicas()
    it.hear(DeploymentConfig.from_default(num_replicas=None, autoscaling_config=scaled))
    assert it.number == 3
