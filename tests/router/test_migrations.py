"""Running streams move to another replica with their KV: a real router, simulated engines, in
virtual time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from sluice.protocol.requests import (
    UNABLE,
    EngineRequest,
    KVHandle,
    ResponseHead,
    ResponseTail,
    request_key,
)
from sluice.replica.config import EngineConfig, SimulatedEngineConfig
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.router.config import RouterConfig
from sluice.router.dispatch.migrations import MIN_KV_WAIT_S
from sluice.scheduling.placement.migration import AT_ONCE, MAX_MOVES, REST_S
from sluice.scheduling.request.job import MAX_TOKENS, STAYS, RouteDecision, RouteQuery, Tier
from tests.router.far_side import (
    DIED,
    Behaviour,
    Edge,
    FarController,
    FarSide,
    FarStream,
    Items,
    answer,
    fail,
)
from tests.router.test_resume import text, without_time_and_name
from tests.router.test_stall_detector import CHAT, COMPLETIONS
from tests.router.virtual_time import LoopClock, virtual

STEP_S = 0.01
PROMPT = 2_000
TOKENS = 400
TRUTH = SimulatedEngineConfig(step_s=STEP_S, context_token_s=0.0, kv_blocks=40_960)
"""Computing the prompt takes 0.4 s, fetching its KV 22 ms."""
BODY: dict[str, Any] = {"prompt": list(range(PROMPT)), "max_tokens": TOKENS}
SLO: dict[str, Any] = {"slo": {"ttft_ms": 4_000, "tpot_ms": 20}}
STAY = RouteDecision(None, STAYS)


def placed(name: str, tier: Tier | None = None, kv_transfer_s: float = 0.02) -> RouteDecision:
    planned = (4.0, 0.02, None) if tier is Tier.GUARANTEED else None
    return RouteDecision(name, "placed", tier, kv_transfer_s=kv_transfer_s, planned=planned)


class Engines:
    """Replicas with an engine each, which lives as long as the test."""

    def __init__(self, *names: str, truth: SimulatedEngineConfig = TRUTH) -> None:
        loop = asyncio.get_running_loop()
        config = EngineConfig(kind="simulated", model="m", policy="fcfs", simulated=truth)
        self.engines = {name: SimulatedEngine(config, name, 256, loop.time) for name in names}

    def __getitem__(self, name: str) -> Behaviour:
        async def behaviour(side: FarSide, _: str, request: EngineRequest) -> Items:
            engine = self.engines[name]
            await engine.start()
            async with aclosing(engine.generate(request)) as items:  # type: ignore[type-var]
                async for item in items:
                    yield item._replace(replica_id=name) if isinstance(item, ResponseHead) else item

        return behaviour

    def count(self, name: str, counter: str) -> int:
        return int(self.engines[name].state().summary[counter])


class NotHandedOver(FarSide):
    """Replicas that cannot be asked for KV."""

    def transfer_kv(self, request: EngineRequest, target: str) -> FarStream | None:
        return None


def edge(side: FarSide, *decisions: RouteDecision, config: RouterConfig | None = None) -> Edge:
    config = config or RouterConfig(stall_after_s=3_600)
    return Edge(side, FarController(*decisions), config, LoopClock())  # type: ignore[arg-type]


async def begun(router: Edge, path: str = COMPLETIONS, **body: Any) -> asyncio.Task[str]:
    """A stream that has run for a second."""
    if path == CHAT:
        body = {"max_tokens": TOKENS, "messages": [{"role": "user", "content": "a " * 900}]} | body
    task = asyncio.create_task(text(router, path, **({} if path == CHAT else BODY) | body))
    await asyncio.sleep(1.0)
    return task


def pauses(router: Edge, kv: str, reason: str = "leaving") -> tuple[float, float]:
    """How many streams moved, and how long they paused together."""
    name, labels = "sluice_migration_pause_seconds", {"reason": reason, "kv": kv}
    return router.sample(f"{name}_count", **labels), router.sample(f"{name}_sum", **labels)


async def whole(path: str = COMPLETIONS) -> str:
    side = FarSide(r0=Engines("r0")["r0"])
    return without_time_and_name(await (await begun(edge(side, placed("r0")), path)))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@virtual
async def test_a_stream_leaves_with_its_kv_and_its_client_sees_a_short_pause(path: str) -> None:
    expected = await whole(path)
    engines = Engines("r0", "r1")
    router = edge(FarSide(r0=engines["r0"], r1=engines["r1"]), placed("r0"), placed("r1"))
    stream = await begun(router, path)
    router.controller.leaving(["another", "r0"])
    await router.side.until(lambda: len(router.side.calls) == 3)
    assert without_time_and_name(await stream) == expected
    (_, first), (source, asked), (target, second) = router.side.calls
    assert (source, asked.prefill_only, asked.kv_of_request) == ("r0", True, first.request_id)
    assert second.kv_handle is not None and (target, second.kv_handle.replica_id) == ("r1", "r0")
    assert second.resume is not None and len(second.resume.token_ids) > 10
    assert second.prefix == first.prefix, "the next turn of its loop finds the KV there"
    assert (engines.count("r1", "transfers"), engines.count("r1", "transfer_failures")) == (1, 0)
    assert not len(engines.engines["r0"].state().rows)
    moved, paused_s = pauses(router, "transferred")
    # The step under way, that of the last block, the transfer, the first step of the other one.
    assert moved == 1 and paused_s < 0.025 + 4 * STEP_S
    query = router.controller.queries[1]
    assert (query.moves_from, query.brings_kv) == ("r0", True)
    assert query.key == request_key(second.request_id)
    assert router.controller.released == [request_key(first.request_id)]
    for name in ("sluice_resumes_total", "sluice_retries_total"):
        assert router.sample(name) == 0
    assert not router.controller.troubles and not router.controller.gone


@pytest.mark.parametrize("why", ["no connection", "full", "dead", "silent"])
@virtual
async def test_without_the_kv_it_is_computed_again(why: str) -> None:
    expected = await whole()
    engines = Engines("r0", "r1")

    async def refusing(side: FarSide, name: str, request: EngineRequest) -> Items:
        if request.prefill_only and why == "silent":
            await asyncio.Event().wait()
        kind = fail(DIED) if why == "dead" else answer(503, b"{}")
        serve = kind if request.prefill_only else engines["r0"]
        async for item in serve(side, name, request):
            yield item

    side = (NotHandedOver if why == "no connection" else FarSide)(r0=refusing, r1=engines["r1"])
    router = edge(side, placed("r0"), placed("r1"))
    stream = await begun(router)
    router.controller.leaving(["r0"])
    assert without_time_and_name(await stream) == expected
    assert pauses(router, "recomputed")[0] == 1
    assert engines.count("r1", "transfers") == 0
    assert not router.controller.gone, "the next request would show it"
    await side.until(lambda: not side.live)


@virtual
async def test_a_move_that_fails_costs_no_attempt() -> None:
    expected = await whole()
    engines = Engines("r0", "r2")
    side = FarSide(r0=engines["r0"], r1=fail(DIED), r2=engines["r2"])
    none_left = RouterConfig(stall_after_s=3_600, max_attempts=2, retry_budget=0)
    router = edge(side, placed("r0"), placed("r1"), placed("r2"), config=none_left)
    stream = await begun(router)
    router.controller.leaving(["r0"])
    assert without_time_and_name(await stream) == expected
    assert [name for name, _ in side.calls] == ["r0", "r0", "r1", "r2"]
    assert router.controller.gone == ["r1"]


@virtual
async def test_it_stays_while_no_other_replica_takes_it() -> None:
    expected = await whole()
    engines = Engines("r0", "r1")
    side = FarSide(r0=engines["r0"], r1=engines["r1"])
    router = edge(side, placed("r0"), STAY, STAY, placed("r1"))
    stream = await begun(router)
    for asked in (2, 3, 4):
        router.controller.leaving(["r0"])
        await asyncio.sleep(0.1)
        assert len(router.controller.queries) == asked, "once with each push"
    assert without_time_and_name(await stream) == expected
    assert [name for name, _ in side.calls] == ["r0", "r0", "r1"]


@virtual
async def test_many_leave_a_few_at_a_time_by_one_push() -> None:
    names = ("r0", "r1")
    engines = Engines(*names)
    side = FarSide(**{name: engines[name] for name in names})
    router = edge(side, *[placed("r0")] * (3 * AT_ONCE), placed("r1"))
    body = BODY | {"prompt": list(range(10))}
    streams = [asyncio.create_task(text(router, COMPLETIONS, **body)) for _ in range(3 * AT_ONCE)]
    await asyncio.sleep(1.0)
    router.controller.leaving(["r0"])
    most = 0.0
    while len(engines.engines["r0"].state().rows):
        most = max(
            most, len(router.controller.queries) - 3 * AT_ONCE - pauses(router, "transferred")[0]
        )
        await asyncio.sleep(STEP_S)
    assert most <= AT_ONCE
    assert len({without_time_and_name(await each) for each in streams}) == 1
    assert pauses(router, "transferred")[0] == 3 * AT_ONCE


@virtual
async def test_it_never_returns_to_a_replica_that_it_has_left_and_rests_in_between() -> None:
    names = [f"r{number}" for number in range(MAX_MOVES + 2)]
    engines = Engines(*names)
    side = FarSide(**{name: engines[name] for name in names})
    router = edge(side, *map(placed, names))
    stream = await begun(router, max_tokens=4_000)
    router.controller.leaving(["r0"])
    await asyncio.sleep(1.0)
    router.controller.leaving(["r1"])
    await asyncio.sleep(0.5)
    assert len(router.controller.queries) == 2, "it has just moved"
    for name in names[1:]:
        await asyncio.sleep(REST_S)
        router.controller.leaving([name])
    await asyncio.sleep(1.0)
    left = [query.avoid for query in router.controller.queries]
    assert left == [tuple(names[:number]) for number in (0, 0, 1, 2)][: MAX_MOVES + 1]
    stream.cancel()


@pytest.mark.parametrize(
    ("body", "decision"),
    [
        ({"seed": 5}, placed("r1")),
        ({"max_tokens": 65}, placed("r1", kv_transfer_s=0.1)),
        ({"stream_options": None, "n": 2}, placed("r1")),
    ],
    ids=["seed", "nearly done", "not resumable"],
)
@virtual
async def test_others_stay(body: dict[str, Any], decision: RouteDecision) -> None:
    engines = Engines("r0", "r1")
    side = FarSide(r0=engines["r0"], r1=engines["r1"])
    router = edge(side, placed("r0"), decision)
    stream = await begun(router, **body)
    router.controller.leaving(["r0"])
    assert (await stream).endswith("data: [DONE]\n\n")
    assert [name for name, _ in side.calls] == ["r0"]
    released = set(router.controller.released)
    assert {query.key for query in router.controller.queries[1:]} <= released


@pytest.mark.parametrize("steps", range(0, 8))
@virtual
async def test_a_client_that_leaves_while_its_stream_moves_leaves_nothing_behind(
    steps: int,
) -> None:
    engines = Engines("r0", "r1")
    side = FarSide(r0=engines["r0"], r1=engines["r1"])
    router = edge(side, placed("r0"), placed("r1"))
    stream = await begun(router)
    router.controller.leaving(["r0"])
    for _ in range(steps):
        await asyncio.sleep(0)
    await asyncio.sleep(0.005 * steps)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    await asyncio.sleep(1.0)
    asked = {query.key for query in router.controller.queries}
    assert asked <= set(router.controller.released)
    assert not side.live
    for engine in engines.engines.values():
        assert not len(engine.state().rows)
    migrations = router.dispatcher._migrations
    assert not migrations.moving and not migrations.streams


@pytest.mark.parametrize("slow", [True, False])
@virtual
async def test_a_guaranteed_stream_that_falls_behind_moves(slow: bool) -> None:
    """Steps of 30 ms where 20 ms are promised."""
    engines = Engines("r0", truth=TRUTH.model_copy(update={"step_s": 0.03 if slow else STEP_S}))
    engines.engines |= Engines("r1").engines
    side = FarSide(r0=engines["r0"], r1=engines["r1"])
    router = edge(side, placed("r0", Tier.GUARANTEED), placed("r1", Tier.GUARANTEED))
    stream = asyncio.create_task(text(router, COMPLETIONS, **BODY, **SLO))
    for _ in range(4):
        await asyncio.sleep(0.4)
        router.controller.leaving([])
    assert (await stream).endswith("data: [DONE]\n\n")
    moved = [query for query in router.controller.queries if query.brings_kv]
    assert len(moved) == slow
    if slow:
        check_strict(moved[0], router)
        assert pauses(router, "transferred", "late")[0] == 1


def check_strict(query: RouteQuery, router: Edge) -> None:
    """It asks for what still keeps its objective, not for the times of a new request."""
    ttft_s, tpot_s = query.slo.ttft_s, query.slo.tpot_s
    assert query.tiers == {Tier.GUARANTEED}
    assert tpot_s is not None and 0.015 < tpot_s < 0.02
    assert ttft_s is not None and 0.5 < ttft_s - query.waited_s < 1.0


async def turn(router: Edge, session: str = "one", **body: Any) -> str:
    """The answer to a turn of a session."""
    async with router.client() as client:
        headers = {"x-session-id": session} if session else {}
        response = await client.post(
            COMPLETIONS, json={"model": "m"} | BODY | SLO | body, headers=headers
        )
    assert response.status_code == 200
    return response.text


@virtual
async def test_a_turn_gets_what_another_replica_has_cached_of_its_prompt() -> None:
    """Asked for at once, and with nothing that the giver would take for the turn itself."""
    handle = KVHandle("r0", {"handle": "x"}, 1_500)

    async def gives(side: FarSide, _: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "application/json")
        yield ResponseTail(1_500, 0, kv_handle=handle)

    moved = placed("r1", Tier.GUARANTEED)._replace(kv_from="r0")
    router = edge(FarSide(r0=gives, r1=answer(200, b"{}")), moved)
    assert await turn(router) == "{}"
    (source, asked), (target, request) = router.side.calls
    assert (source, target, request.kv_handle) == ("r0", "r1", handle)
    assert asked.cached_only and asked.prefill_only and not request.cached_only
    assert (asked.promised, asked.best_effort, asked.turn, asked.prefix.hashes) == (
        False, False, None, (),
    )  # fmt: skip
    assert request.promised and request.turn is not None and request.prefix.hashes
    (query,) = router.controller.queries
    assert query.fetches_kv == MAX_TOKENS and query.session
    assert router.controller.released == []


@virtual
async def test_what_is_counted_on_follows_what_replicas_give() -> None:
    async def gives(side: FarSide, _: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "application/json")
        yield ResponseTail(2_000, 0, kv_handle=KVHandle("r0", {"handle": "x"}, 1_500))

    moved = [placed("r1")._replace(kv_from="r0", kv_tokens=n) for n in (2_000, 1_500)]
    router = edge(FarSide(r0=gives, r1=answer(200, b"{}")), *moved, placed("r1"))
    for _ in range(3):
        await turn(router)
    assert [q.fetches_kv for q in router.controller.queries] == [MAX_TOKENS, 1_500, 1_875]


@pytest.mark.parametrize("why", ["no connection", "full", "dead", "silent", "unable"])
@virtual
async def test_a_turn_whose_prefix_cannot_be_had_is_computed_after_a_short_wait(why: str) -> None:
    async def refusing(side: FarSide, name: str, request: EngineRequest) -> Items:
        if why == "silent":
            await asyncio.Event().wait()
        status = UNABLE if why == "unable" else 503
        serve = fail(DIED) if why == "dead" else answer(status, b"{}")
        async for item in serve(side, name, request):
            yield item

    side = (NotHandedOver if why == "no connection" else FarSide)(
        r0=refusing, r1=answer(200, b"{}")
    )
    moved = placed("r1", Tier.GUARANTEED)._replace(kv_from="r0")
    router = edge(side, moved, placed("r1"))
    assert await turn(router) == "{}"
    name, request = side.calls[-1]
    assert (name, request.kv_handle) == ("r1", None)
    longest_s = MIN_KV_WAIT_S + moved.kv_transfer_s
    assert request.waited_s == pytest.approx(longest_s if why == "silent" else 0.0, abs=0.02)
    assert not router.controller.gone and not router.controller.troubles
    assert router.sample("sluice_retries_total") == 0
    await side.until(lambda: not side.live)
    # Engines that can give nothing are not counted on again.
    await turn(router)
    assert router.controller.queries[-1].fetches_kv == (0 if why == "unable" else MAX_TOKENS)


@virtual
async def test_a_client_that_leaves_while_its_prefix_is_awaited_leaves_nothing() -> None:
    async def silent(side: FarSide, _: str, request: EngineRequest) -> Items:
        await asyncio.Event().wait()
        yield ResponseHead(200, "application/json")

    moved = placed("r1", Tier.GUARANTEED)._replace(kv_from="r0", kv_transfer_s=1.0)
    router = edge(FarSide(r0=silent, r1=answer(200, b"{}")), moved)
    waits = asyncio.create_task(turn(router))
    await router.side.until(lambda: len(router.side.calls) == 1)
    waits.cancel()
    await asyncio.wait([waits])
    await router.side.until(lambda: not router.side.live)
    assert router.controller.released == [router.controller.queries[0].key]


@virtual
async def test_requests_without_a_session_are_asked_about_as_ever() -> None:
    router = edge(FarSide(r0=answer(200, b"{}")), *[placed("r0")] * 2)
    await turn(router, "")
    await turn(router, echo=True)
    assert [query.fetches_kv for query in router.controller.queries] == [0, 0]
