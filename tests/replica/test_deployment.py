"""A replica with several ranks (simulated engines, and the real controller in this process), and
its number as Serve has it. tests/e2e has replicas in Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.serve._private.config import DeploymentConfig

from sluice.controller.config import ControllerConfig
from sluice.deploy.autoscaling import serve_autoscaling
from sluice.protocol.requests import (
    EngineRequest,
    Progress,
    ResponseHead,
    ResponseTail,
    ResponseTaken,
    request_key,
)
from sluice.replica.config import (
    AutoscalingConfig,
    EngineConfig,
    ReplicaConfig,
    SimulatedEngineConfig,
)
from sluice.replica.deployment import ConfiguredReplicas, Ranks, make_engines, names_of
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.scheduling.fleet.ranks import rank_name, rank_of, replica_of
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import ObservedController
from tests.e2e.conftest import PATIENT
from tests.replica.waiting import until

RANKS = 2
CONTROLLER = ControllerConfig.model_validate({**PATIENT, "policy": "least_tokens"})


@asynccontextmanager
async def running(step_s: float = 0.0) -> AsyncIterator[tuple[Ranks, ObservedController]]:
    """A replica of simulated ranks that report to a controller."""
    engine = EngineConfig(
        kind="simulated",
        model="model",
        simulated=SimulatedEngineConfig(step_s=step_s, token_s=0, context_token_s=0),
        vllm_args={"data-parallel-size": RANKS},
    )
    config = ReplicaConfig(report_interval_s=0.001, hung_after_s=0.1)
    controller = ObservedController(CONTROLLER)
    made = zip(names_of("abc", RANKS), make_engines(engine, "abc", 8, 0), strict=True)
    ranks = Ranks("abc", [Replica(name, "node", one, config, controller) for name, one in made])
    await ranks.start()
    try:
        await until(lambda: len(controller._mirror.replicas) == RANKS)
        yield ranks, controller
    finally:
        await ranks.stop()


def asked(name: str, rank: int | None, tokens: int = 1, **fields: Any) -> EngineRequest:
    body = {"prompt": "a prompt", "max_tokens": tokens, "stream": True}
    return EngineRequest(name, "completions", body, SLO(), rank=rank, **fields)


async def items_of(ranks: Ranks, request: EngineRequest, target: str | None = "abc") -> list[Any]:
    return [item async for batch in ranks.generate(request, target) for item in batch]


def test_names_of_ranks() -> None:
    assert names_of("abc", 1) == ["abc"]
    assert names_of("abc", 2) == ["abc:0", "abc:1"]
    assert (replica_of("abc:1"), rank_of("abc:1")) == ("abc", 1)
    assert (replica_of("abc"), rank_of("abc")) == ("abc", None)
    assert rank_of("abc:1~x,y?z") == 1, "the hint of a call begins with it"
    assert rank_of("~x?y") is None
    assert rank_name("abc", 0) == "abc:0"


async def test_each_rank_is_a_replica_to_the_controller_which_chooses_one() -> None:
    async with running(step_s=0.02) as (ranks, controller):
        # Longer than the controller compiles its loops.
        long = asyncio.create_task(items_of(ranks, asked("long", 0, tokens=4_000), "abc:0"))
        await until(lambda: ranks.replicas[0].live_requests == 1)

        async def live() -> dict[str, int]:
            rows = (await controller.snapshot())["replicas"]
            return {row["replica_id"]: row["waiting"] + row["running"] for row in rows}

        async with asyncio.timeout(20):
            while await live() != {"abc:0": 1, "abc:1": 0}:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        query = RouteQuery(request_key("next"), SLO(ttft_s=30), 4)
        (decision,) = (await controller.route([query])).decisions
        assert decision.replica_id == "abc:1"
        head, *_, tail = await items_of(ranks, asked("next", rank_of("abc:1")), "abc:1")
        assert isinstance(head, ResponseHead)
        assert head.replica_id == decision.replica_id
        assert isinstance(tail, ResponseTail)
        await ranks.abort("long")
        assert (await long)[0].replica_id == "abc:0"
        assert ranks.snapshot()["live_requests"] == 0

        await controller.replica_gone(["abc"])  # Serve knows the replica by this name
        (none,) = (await controller.route([query])).decisions
        assert none.replica_id is None


async def test_without_a_rank_the_one_with_the_fewest_requests_serves_and_says_so() -> None:
    async with running(step_s=0.02) as (ranks, _):
        long = asyncio.create_task(items_of(ranks, asked("long", 0, tokens=4_000)))
        await until(lambda: ranks.replicas[0].live_requests == 1)
        for target, request in (
            ("", asked("confirmed", None, confirm=True)),
            ("other:0", asked("moved", 0)),
        ):
            taken, head, *_ = await items_of(ranks, request, target)
            assert taken == ResponseTaken("abc:1")
            assert head.replica_id == "abc:1"
        await ranks.abort("long")
        await long


async def test_one_rank_that_hangs_leaves_the_other_as_it_is() -> None:
    async with running(step_s=0.001) as (ranks, _):
        stalled = ranks.replicas[0].engine
        assert isinstance(stalled, SimulatedEngine)
        stalled.stall()
        waits = asyncio.create_task(items_of(ranks, asked("stuck", 0)))
        # The watchdog is patient in the first steps of an engine.
        ranks.replicas[0]._watchdog._first_step = -100  # type: ignore[union-attr]
        await until(lambda: ranks.progress(["stuck"], "abc:0~x").hung)
        assert ranks.progress(["stuck"], "abc:1") == Progress("abc:1", False, ("stuck",))
        assert ranks.progress(["stuck", "?"], "abc") == Progress("abc", True, ("?",))
        assert (await items_of(ranks, asked("other", 1)))[0].replica_id == "abc:1"
        stalled.recover()
        await waits


async def test_a_rank_that_is_not_there_is_no_error() -> None:
    """A decision may be older than the number of ranks."""
    async with running() as (ranks, _):
        assert (await items_of(ranks, asked("r", 7), "abc:7"))[0].replica_id in ("abc:0", "abc:1")
        assert ranks.progress((), "abc:7") == Progress("abc", False)


async def test_all_ranks_drain_and_leave() -> None:
    async with running(step_s=0.005) as (ranks, controller):
        requests = [asked(f"r{rank}", rank, tokens=20) for rank in range(RANKS)]
        live = [asyncio.create_task(items_of(ranks, each)) for each in requests]
        await until(lambda: all(each.live_requests for each in ranks.replicas))
        await ranks.drain()
        assert all([isinstance((await each)[-1], ResponseTail) for each in live])
        await ranks.stop()
        assert not controller._mirror.replicas
        with pytest.raises(Exception, match="dead"):
            await ranks.check_health()


def test_the_configured_number_is_the_last_one_and_of_an_autoscaled_pool_the_least() -> None:
    configured = ConfiguredReplicas()
    assert configured.number is None
    for number in (9, 1):
        configured.on_config(DeploymentConfig.from_default(num_replicas=number))
        assert configured.number == number
    bounds = AutoscalingConfig(min_replicas=3, initial_replicas=4, max_replicas=8)
    scaled = serve_autoscaling(bounds)
    configured.on_config(
        DeploymentConfig.from_default(num_replicas=None, autoscaling_config=scaled)
    )
    assert configured.number == 3
