"""Replicas in quarantine: what brings them there, how they get out, and who is not believed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.controller.config import ControllerConfig
from sluice.controller.state.quarantine import ACCUSED_S, MAX_ROUTERS
from sluice.protocol.messages import FaultNotice
from sluice.scheduling.fleet.breaker import (
    ENDED_PROBE_S,
    MAX_OPEN_S,
    MIN_OPEN_S,
    PROBE_S,
    ReplicaFault,
)
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.roles import Role
from tests.controller.fleet import (
    Clock,
    ObservedController,
    delta,
    free_row,
    hello,
    newer_push,
    query,
    summary,
    waiting_row,
)
from tests.examples import examples

ROUTER, OTHER = 11, 12
PROMISED = frozenset({Tier.GUARANTEED})


class Fleet:
    """A controller and its replicas, which report when the test says so."""

    def __init__(self, *names: str, role: Role = "mixed") -> None:
        self.clock = Clock()
        self.controller = ObservedController(ControllerConfig(), self.clock)
        self.role = role
        self.names = names
        self.seqs: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        self.hung: set[str] = set()
        self.keys = 0

    async def join(self) -> Fleet:
        for name in self.names:
            self.seqs[name] = 0
            message = hello(name, now_s=self.clock(), role=self.role)
            await self.controller.hello(message._replace(hung=name in self.hung))
        return self

    async def report(
        self,
        name: str,
        steps: int = 0,
        finished: Sequence[int] = (),
        rows: dict[int, np.ndarray] | None = None,
    ) -> None:
        self.seqs[name] += 1
        self.steps[name] = self.steps.get(name, 0) + steps
        record = summary()
        record["steps"] = self.steps[name]
        record["updated_s"] = self.clock() if steps else 0.0
        epoch = (await self.controller.route([])).epoch
        message = delta(
            name, epoch, self.seqs[name], rows, now_s=self.clock(), finished=tuple(finished)
        )
        reply = await self.controller.report(
            message._replace(summary=record, hung=name in self.hung)
        )
        assert not reply.resync

    async def pass_s(self, seconds: float) -> None:
        """Time passes, and every replica has reported."""
        self.clock.advance(seconds)
        for name in self.names:
            await self.report(name)

    async def place(self, **how: Any) -> RouteDecision:
        self.keys += 1
        return (await self.controller.route([query(self.keys)._replace(**how)])).decisions[0]

    async def places(self, count: int) -> set[str | None]:
        return {(await self.place()).replica_id for _ in range(count)}

    async def fault(
        self, *names: str, fault: ReplicaFault = ReplicaFault.HUNG, source: int = ROUTER
    ) -> None:
        await self.controller.faulted(source, [FaultNotice(name, fault) for name in names])

    async def quarantined(self) -> tuple[str, ...]:
        return (await self.controller.route([])).quarantined

    async def told(self, name: str) -> dict[str, Any]:
        view = json.loads(json.dumps(await self.controller.snapshot(), allow_nan=False))
        (found,) = [each for each in view["replicas"] if each["replica_id"] == name]
        return dict(found)

    async def metrics(self) -> list[str]:
        text = (await self.controller.render_metrics()).decode()
        return [line for line in text.splitlines() if not line.startswith("#")]


async def test_one_stream_that_hangs_is_enough_and_everybody_hears_of_it() -> None:
    fleet = await Fleet("a", "b").join()
    await fleet.fault("a")
    assert await fleet.quarantined() == ("a",)
    assert (await fleet.controller.push_metrics(newer_push("router", ()))).quarantined == ("a",)
    assert await fleet.places(5) == {"b"}
    fleet.clock.advance(0.25)
    told = await fleet.told("a")
    assert told["condition"] == "quarantined"
    assert told["quarantine"] == {
        "reason": "hung",
        "state": "open",
        "since_ms": 250,
        "retry_in_ms": 1000 * MIN_OPEN_S - 250,
    }
    assert (await fleet.told("b"))["quarantine"] is None
    lines = await fleet.metrics()
    for line in (
        'sluice_quarantined_replicas{reason="hung"} 1.0',
        'sluice_quarantined_replicas{reason="failed"} 0.0',
        'sluice_breaker_opened_total{reason="hung"} 1.0',
        'sluice_replicas{role="mixed",state="quarantined"} 1.0',
        'sluice_failure_notices_total{outcome="counted",reason="hung"} 1.0',
    ):
        assert line in lines
    assert not any("sluice_replica_pab_tokens" in line and '"a"' in line for line in lines)
    assert (await fleet.controller.load()).ready == 1


async def test_failures_count_only_where_nothing_else_ends() -> None:
    fleet = await Fleet("a", "b").join()
    for _ in range(30):
        await fleet.fault("a", fault=ReplicaFault.FAILED)
        await fleet.report("a", steps=2, finished=(1, 2))
        await fleet.pass_s(0.1)
    assert await fleet.quarantined() == ()
    await fleet.fault(*["a"] * 3, fault=ReplicaFault.FAILED)
    assert await fleet.quarantined() == ("a",)


async def test_a_stream_that_hangs_at_an_engine_that_works_is_one_failure() -> None:
    fleet = await Fleet("a", "b").join()
    await fleet.report("a", steps=1)
    await fleet.fault("a")
    assert await fleet.quarantined() == ()
    await fleet.pass_s(1.5)
    await fleet.fault("a")
    assert await fleet.quarantined() == ("a",)


async def test_one_request_at_a_time_tries_it_and_one_that_gets_work_done_brings_it_back() -> None:
    fleet = await Fleet("a", "b").join()
    await fleet.fault("a")
    await fleet.pass_s(MIN_OPEN_S)
    assert (await fleet.told("a"))["quarantine"]["state"] == "half-open"
    probe = await fleet.place()
    key = fleet.keys
    assert (probe.replica_id, probe.tier) == ("a", Tier.GUARANTEED)
    assert await fleet.places(5) == {"b"}
    assert await fleet.quarantined() == ("a",), "what is not the controller's choice keeps away"
    await fleet.report("a", rows={0: waiting_row(key, 10)})
    await fleet.report("a")
    assert await fleet.quarantined() == ("a",), "it has arrived, and nothing was done"
    await fleet.report("a", steps=1)
    assert await fleet.quarantined() == ()
    assert "a" in await fleet.places(5)
    assert (await fleet.told("a"))["quarantine"] is None


async def test_a_short_probe_shows_in_one_report_also_after_its_router_has_let_go() -> None:
    fleet = await Fleet("a", "b").join()
    await fleet.fault("a")
    await fleet.pass_s(MIN_OPEN_S)
    await fleet.place()
    await fleet.controller.release([fleet.keys])
    await fleet.report("a", steps=1)
    assert await fleet.quarantined() == ("a",), "steps of others' work"
    await fleet.report("a", steps=3, finished=(fleet.keys,))
    assert await fleet.quarantined() == ()


@pytest.mark.parametrize("let_go", [True, False])
async def test_a_probe_of_which_nothing_is_heard_makes_room_for_another(let_go: bool) -> None:
    fleet = await Fleet("a", "b").join()
    await fleet.fault("a")
    await fleet.pass_s(MIN_OPEN_S)
    assert (await fleet.place()).replica_id == "a"
    if let_go:
        await fleet.controller.release([fleet.keys])
    await fleet.pass_s((ENDED_PROBE_S if let_go else PROBE_S) - 0.01)
    assert await fleet.places(3) == {"b"}
    await fleet.pass_s(0.02)
    assert (await fleet.place()).replica_id == "a"
    assert await fleet.places(3) == {"b"}


async def test_a_probe_that_fails_sends_it_back_for_longer() -> None:
    fleet = await Fleet("a", "b").join()
    await fleet.fault("a")
    open_s, begun_s = MIN_OPEN_S, fleet.clock()
    for _ in range(8):
        await fleet.pass_s(open_s)
        assert (await fleet.place()).replica_id == "a"
        await fleet.controller.release([fleet.keys])
        await fleet.fault("a", fault=ReplicaFault.FAILED)
        open_s = min(2 * open_s, MAX_OPEN_S)
        told = (await fleet.told("a"))["quarantine"]
        assert (told["reason"], told["retry_in_ms"]) == ("failed", 1000 * open_s)
        assert told["since_ms"] == pytest.approx(1000 * (fleet.clock() - begun_s), abs=1)
        await fleet.pass_s(open_s - 0.01)
        assert await fleet.places(3) == {"b"}
        await fleet.pass_s(0.01)
    assert open_s == MAX_OPEN_S


async def test_what_a_replica_says_of_itself_holds_and_survives_the_controller() -> None:
    fleet = await Fleet("a", "b").join()
    fleet.hung.add("a")
    await fleet.report("a")
    assert await fleet.quarantined() == ("a",)
    for _ in range(100):
        await fleet.pass_s(1.0)
    told = (await fleet.told("a"))["quarantine"]
    assert told == {"reason": "hung", "state": "open", "since_ms": 100_000, "retry_in_ms": None}
    fleet.controller = ObservedController(ControllerConfig(), fleet.clock)
    await fleet.join()
    assert await fleet.quarantined() == ("a",)
    fleet.hung.clear()
    await fleet.report("a")
    assert (await fleet.place()).replica_id == "a", "it is tried at once"


async def test_a_fleet_that_is_quarantined_whole_serves_and_promises_nothing() -> None:
    fleet = Fleet("a", "b")
    fleet.hung = {"a", "b"}
    await fleet.join()
    placed = await fleet.place()
    assert placed.replica_id in fleet.names and placed.tier is Tier.BEST_EFFORT
    assert (await fleet.place(tiers=PROMISED)).reason == "unattainable"
    assert (await fleet.controller.load()).ready == 0


async def test_a_drained_replica_is_not_tried_and_comes_back_as_what_it_was() -> None:
    fleet = await Fleet("a", "b").join()
    await fleet.fault("a")
    await fleet.controller.drain("a", True)
    await fleet.pass_s(2 * MIN_OPEN_S)
    assert await fleet.places(3) == {"b"}
    told = await fleet.told("a")
    assert (told["condition"], told["quarantine"]["reason"]) == ("draining", "hung")
    await fleet.controller.drain("b", True)
    assert (await fleet.place()).reason == "no_replica"
    await fleet.controller.drain("a", False)
    assert (await fleet.place()).replica_id == "a", "the last one left, and to be tried anyway"


async def test_a_replica_that_leaves_takes_its_quarantine_with_it() -> None:
    fleet = await Fleet("a", "b", "c").join()
    await fleet.fault("a")
    await fleet.controller.goodbye("a")
    assert await fleet.quarantined() == ()
    fleet.names = ("b", "c")
    await fleet.fault("a")
    assert await fleet.quarantined() == (), "nobody knows it"
    await fleet.fault("b")
    fleet.clock.advance(ControllerConfig().forget_after_s)
    await fleet.controller.snapshot()
    await fleet.join()
    assert await fleet.quarantined() == ()


# Routers that are wrong.


async def test_a_router_that_is_cut_off_takes_at_most_half_of_the_replicas() -> None:
    fleet = await Fleet("a", "b", "c", "d").join()
    for name in fleet.names:
        await fleet.fault(name)
    assert await fleet.quarantined() == ("a", "b")
    assert 'sluice_failure_notices_total{outcome="ignored",reason="hung"} 2.0' in (
        await fleet.metrics()
    )
    # The others' requests bring these back, and as long as it goes on it is not believed.
    await fleet.pass_s(MIN_OPEN_S)
    for _ in ("a", "b"):
        tried = (await fleet.place()).replica_id
        assert tried in ("a", "b")
        await fleet.report(tried, steps=1, finished=(fleet.keys,))
    for _ in range(10):
        await fleet.fault(*fleet.names)
        assert await fleet.quarantined() == ()
        await fleet.pass_s(ACCUSED_S / 2)
    # Another one is believed meanwhile, and the first one again when it has stopped.
    await fleet.fault("c", source=OTHER)
    assert await fleet.quarantined() == ("c",)
    await fleet.pass_s(ACCUSED_S + 1)
    await fleet.fault("d")
    assert await fleet.quarantined() == ("c", "d")


async def test_a_router_alone_does_not_quarantine_the_only_replica_of_a_role() -> None:
    fleet = await Fleet("a").join()
    await fleet.fault(*["a"] * 9)
    assert await fleet.quarantined() == ()
    fleet.names += ("prefill",)
    await fleet.controller.hello(hello("prefill", now_s=fleet.clock(), role="prefill"))
    await fleet.fault("prefill", source=OTHER)
    assert await fleet.quarantined() == ()


async def test_replicas_that_are_gone_or_closed_do_not_count_for_half() -> None:
    fleet = await Fleet("a", "b", "c").join()
    await fleet.fault("a")
    await fleet.controller.replica_gone(["a"])
    await fleet.fault("b")
    assert await fleet.quarantined() == ("a", "b"), "one of the two that are left"
    await fleet.fault("c")
    assert await fleet.quarantined() == ("a", "b")


async def test_routers_without_number_are_forgotten() -> None:
    fleet = await Fleet("a", "b", "c").join()
    for source in range(MAX_ROUTERS + 50):
        await fleet.fault("a", fault=ReplicaFault.FAILED, source=source)
    assert len(fleet.controller._quarantine._accused) == MAX_ROUTERS


NAMES = ("a", "b", "c", "d")
EVENTS = st.one_of(
    st.tuples(st.just("fault"), st.sampled_from(NAMES), st.sampled_from(ReplicaFault)),
    st.tuples(st.just("hangs"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.just("wait"), st.just(""), st.floats(0.01, 30.0)),
    st.tuples(st.just("place"), st.just(""), st.integers(1, 4)),
    st.tuples(st.just("works"), st.sampled_from(NAMES), st.integers(1, 3)),
    st.tuples(st.just("release"), st.just(""), st.integers(1, 4)),
    st.tuples(st.just("leaves"), st.sampled_from(NAMES), st.none()),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_one_request_tries_a_replica_and_somebody_serves(
    events: list[tuple[str, str, Any]],
) -> None:
    asyncio.run(_live_through(events))


async def _live_through(events: list[tuple[str, str, Any]]) -> None:
    fleet = await Fleet(*NAMES).join()
    tried: dict[str, tuple[int, float]] = {}
    for what, name, how in events:
        match what:
            case "fault":
                await fleet.fault(name, fault=how)
                tried.pop(name, None)
            case "hangs":
                (fleet.hung.add if how else fleet.hung.discard)(name)
                await fleet.report(name)
            case "wait":
                await fleet.pass_s(how)
            case "place":
                for _ in range(how):
                    out = set(await fleet.quarantined())
                    placed = (await fleet.place()).replica_id
                    assert placed is not None
                    if placed in out and out != set(NAMES):
                        last = tried.get(placed, (0, -PROBE_S))
                        at_s = fleet.clock()
                        assert at_s - last[1] >= ENDED_PROBE_S, "one at a time"
                        tried[placed] = (fleet.keys, at_s)
            case "works":
                keys = (tried[name][0],) if name in tried and how > 1 else ()
                await fleet.report(name, steps=1, finished=keys, rows={0: free_row()})
                if keys:
                    tried.pop(name)
            case "release":
                await fleet.controller.release([max(0, fleet.keys - how)])
            case "leaves":
                await fleet.controller.goodbye(name)
                tried.pop(name, None)
                fleet.hung.discard(name)
                fleet.seqs[name] = 0
                await fleet.controller.hello(hello(name, now_s=fleet.clock()))
                fleet.steps[name] = 0
    # Once nothing is wrong any more, all are back in bounded time.
    fleet.hung.clear()
    await fleet.pass_s(0.1)
    for _ in range(3 * len(NAMES)):
        await fleet.pass_s(MAX_OPEN_S)
        placed = (await fleet.place()).replica_id
        assert placed is not None
        await fleet.report(placed, steps=1, finished=(fleet.keys,))
    assert await fleet.quarantined() == ()
