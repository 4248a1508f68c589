"""An operator's drain: who gets no requests, for how long, and what is said of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.controller.actor import SETTLING_S
from sluice.controller.config import ControllerConfig
from sluice.controller.state.drains import KEPT_S, Drains
from sluice.protocol.messages import RouteReply
from sluice.scheduling.fleet.fleet import Fleet
from tests.controller.fleet import (
    Clock,
    ObservedController,
    decode_row,
    delta,
    hello,
    newer_push,
    query,
    waiting_row,
)
from tests.examples import examples


def make(clock: Clock | None = None) -> ObservedController:
    return ObservedController(ControllerConfig(), clock or Clock())


async def placed(controller: ObservedController, *keys: int) -> list[str | None]:
    reply = await controller.route([query(key) for key in keys])
    return [each.replica_id for each in reply.decisions]


async def replica(controller: ObservedController, name: str) -> dict[str, Any]:
    view = json.loads(json.dumps(await controller.snapshot(), allow_nan=False))
    (found,) = [each for each in view["replicas"] if each["replica_id"] == name]
    return dict(found)


async def test_a_drained_replica_gets_nothing_and_finishes_what_it_has() -> None:
    controller = make()
    await controller.hello(hello("b"))
    assert await placed(controller, 3, 4) == ["b", "b"]
    await controller.hello(hello("a", [waiting_row(1, 10), decode_row(2, 10)]))
    told = await controller.drain("b", True)
    assert told == {
        "replica_id": "b",
        "draining": True,
        "drain": "operator",
        "last": False,
        "left": 2,
        "waiting": 0,
        "running": 0,
        "reserved": 2,
    }
    assert set(await placed(controller, *range(5, 9))) == {"a"}
    epoch = (await controller.snapshot())["epoch"]
    reply = await controller.report(delta("b", epoch, 1, {0: waiting_row(3, 10)}, finished=(4,)))
    assert reply.closed and not reply.resync
    told = await controller.drain("b", True)
    assert told is not None and (told["left"], told["waiting"]) == (1, 1)
    assert (await replica(controller, "b"))["condition"] == "draining"
    told = await controller.drain("b", False)
    assert told is not None and (told["draining"], told["drain"]) == (False, None)
    assert "b" in await placed(controller, *range(10, 14))


async def test_the_last_replica_that_takes_requests_can_be_spared() -> None:
    clock = Clock()
    controller = make(clock)

    async def spared(name: str) -> bool:
        told = await controller.drain(name, True, spare_last=True)
        assert told is not None and told["draining"] is not told["last"]
        return bool(told["last"])

    for name in ("a", "b", "c"):
        await controller.hello(hello(name))
    await controller.replica_gone(["c"])
    assert not await spared("a")
    assert await spared("b") and await placed(controller, 1) == ["b"]
    assert not await spared("a"), "it is drained, and was not the last one"
    await controller.drain("a", False)
    assert not await spared("b") and await spared("a")
    assert not (await controller.drain("a", True) or {})["last"]
    assert await placed(controller, 2) == [None]
    assert not await spared("b")


async def test_routers_hear_what_is_closed_with_every_answer() -> None:
    clock = Clock()
    controller = make(clock)
    clock.advance(SETTLING_S)

    async def heard() -> RouteReply:
        return await controller.route([])

    assert (await heard()).closed is None, "a controller that knows no replica cannot know"
    await controller.hello(hello("a"))
    assert (await heard()).closed == ()
    await controller.drain("a", True)
    assert (await heard()).closed == ("a",)
    assert (await controller.route([query(1)])).decisions[0].reason == "no_replica"


async def test_a_controller_that_has_just_started_does_not_say_that_nothing_is_drained() -> None:
    """A router that knows better from the one before must not forget it."""
    clock = Clock()
    controller = make(clock)
    await controller.hello(hello("a"))
    assert (await controller.route([])).closed is None, "others may be drained"
    assert (await controller.push_metrics(newer_push("router", ()))).closed is None
    await controller.hello(hello("b")._replace(closed=True))
    assert (await controller.route([])).closed == ("b",)
    await controller.drain("b", False)
    assert (await controller.route([])).closed == (), "an operator said so"
    other = make(clock)
    await other.hello(hello("a"))
    clock.advance(SETTLING_S)
    assert (await other.route([])).closed == ()


async def test_a_drain_survives_a_resync_a_silence_and_a_restart_of_the_controller() -> None:
    clock = Clock()
    controller = make(clock)
    await controller.hello(hello("a"))
    await controller.drain("a", True)
    assert (await controller.hello(hello("a", seq=5))).closed, "a resync"
    clock.advance(60)
    assert await placed(controller, 1) == [None]
    assert (await controller.snapshot())["replicas"] == []
    # It was only out of reach; its clock and ours are the same here.
    assert (await controller.hello(hello("a", seq=6, now_s=60))).closed
    restarted = make()
    reply = await restarted.hello(hello("a", seq=7)._replace(closed=True))
    assert reply.closed and (await replica(restarted, "a"))["drain"] == "operator"


async def test_a_setting_is_remembered_once_the_replica_reports_after_the_answer_with_it() -> None:
    controller = make()
    await controller.hello(hello("a"))
    epoch = (await controller.snapshot())["epoch"]
    assert await controller.remembers("b") is None
    assert await controller.remembers("a"), "it was never drained, and remembers nothing else"
    seq = 0
    for drained in (True, False):
        await controller.drain("a", drained)
        for heard in (False, False, True):
            assert await controller.remembers("a") is heard
            await controller.drain("a", drained)
            seq += 1
            assert (await controller.report(delta("a", epoch, seq))).closed is drained
    await controller.drain("a", True)
    # The answer to the next report is lost: the replica greets again, with what it remembers.
    await controller.report(delta("a", epoch, seq + 1))
    await controller.hello(hello("a", seq=seq + 2))
    assert await controller.remembers("a") is False
    await controller.hello(hello("a", seq=seq + 3)._replace(closed=True))
    assert await controller.remembers("a")


async def test_dead_drained_replicas_are_forgotten_and_those_out_of_reach_stay_drained() -> None:
    clock = Clock()
    controller = make(clock)
    ids = [f"r{index}" for index in range(20)]
    for name in ids:
        await controller.hello(hello(name))
        await controller.drain(name, True)
    await controller.drain(ids[-1], False)
    clock.advance(60)
    await controller.hello(hello("new", now_s=60))
    assert (await controller.route([])).closed == tuple(ids[:-1]), "they may be only out of reach"
    clock.advance(KEPT_S - 1)
    back = hello(ids[0], now_s=KEPT_S + 59)
    assert (await controller.hello(back)).closed, "it is drained, although it never heard of it"
    clock.advance(1)
    await controller.hello(hello("new", now_s=KEPT_S + 60))
    assert (await controller.route([])).closed == (ids[0],)


def test_words_on_silent_replicas_are_bounded_and_those_on_living_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.controller.state.drains.MAX_SILENT", 10)
    fleet = Fleet()
    drains = Drains(fleet)
    drains.drain("alive")
    for index in range(100):
        name = f"dead{index}"
        drains.drain(name)
        if index % 2:
            drains.take_back(name)
        drains.silent([name], float(index))
    assert len(drains) == 11
    assert set(fleet.closed) == {"alive", *(f"dead{index}" for index in range(90, 100, 2))}
    drains.silent([], 99 + KEPT_S)
    assert fleet.closed == ("alive",)


Step = tuple[str, float]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["drain", "undo", "report", "away", "restart"]),
            st.sampled_from([1.0, 60.0]),
        ),
        min_size=10,
        max_size=40,
    )
)
def test_the_last_word_that_reached_anybody_counts(steps: list[Step]) -> None:
    """Whatever happens to the controller and the way to the replica, in any order."""

    async def run() -> None:
        clock = Clock()
        controller = make(clock)
        wanted = closed = False
        seq = 0

        async def greet() -> bool:
            nonlocal seq
            seq += 1
            message = hello("a", seq=seq, now_s=clock.now_s)._replace(closed=closed)
            return (await controller.hello(message)).closed

        closed = await greet()
        for what, seconds in steps:
            clock.advance(seconds if what == "away" else 0)
            if what in ("drain", "undo"):
                told = await controller.drain("a", what == "drain")
                if told is not None:
                    wanted = what == "drain"
            elif what == "report":
                closed = await greet()
                assert closed == wanted
            elif what == "restart":
                controller = make(clock)
                wanted = closed  # all that is left is what the replica has heard
        assert await greet() == wanted

    asyncio.run(run())


async def test_a_replica_that_ends_takes_its_drain_along() -> None:
    clock = Clock()
    controller = make(clock)
    clock.advance(SETTLING_S)
    await controller.hello(hello("a"))
    await controller.hello(hello("b"))
    await controller.drain("a", True)
    await controller.goodbye("a")
    assert (await controller.route([])).closed == ()


async def test_a_replica_that_drains_by_itself_is_told_apart() -> None:
    controller = make()
    await controller.hello(hello("a", draining=True))
    assert (await replica(controller, "a"))["drain"] == "replica"
    told = await controller.drain("a", False)
    assert told is not None and told["draining"], "an operator cannot take that back"


async def test_routers_hear_who_leaves_whoever_drains_it() -> None:
    controller = make()
    for each in (hello("a", draining=True), hello("b"), hello("c")):
        await controller.hello(each)
    await controller.drain("b", True)
    await controller.drain("gone", True)
    assert (await controller.sync()).leaving == ("a", "b")
    await controller.goodbye("a")
    await controller.drain("b", False)
    assert (await controller.sync()).leaving == ()


async def test_unknown_and_malformed_names() -> None:
    controller = make()
    assert await controller.drain("nobody", True) is None
    assert await controller.drain("nobody", False) is None
    assert (await controller.route([])).closed is None
    for wrong in ("", "x" * 300, 3):
        with pytest.raises(ValueError, match="replica_id"):
            await controller.drain(wrong, True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="drain"):
        await controller.drain("a", "yes")  # type: ignore[arg-type]


async def test_the_queue_of_a_replica_is_told_by_class_and_tier() -> None:
    controller = make()
    await controller.hello(hello("a"))
    slo = query(1).slo
    batch = query(2)._replace(slo=slo.__class__(ttft_s=1.0, service_class="batch"))
    await controller.route([query(1), batch, query(3)])
    epoch = (await controller.snapshot())["epoch"]
    lent = waiting_row(9, 5)
    lent["best_effort"] = 1
    rows = {0: waiting_row(1, 10), 1: decode_row(2, 10), 2: waiting_row(3, 10), 3: lent}
    await controller.report(delta("a", epoch, 1, rows))
    assert (await replica(controller, "a"))["queue"] == [
        {"class": None, "tier": "best-effort", "waiting": 1, "running": 0},
        {"class": "batch", "tier": "guaranteed", "waiting": 0, "running": 1},
        {"class": "standard", "tier": "guaranteed", "waiting": 2, "running": 0},
    ]
    # A class is remembered for as long as its request lives.
    await controller.report(delta("a", epoch, 2, {1: waiting_row(1, 10)}, finished=(2,)))
    queue = (await replica(controller, "a"))["queue"]
    assert [each["class"] for each in queue] == [None, "standard"]
