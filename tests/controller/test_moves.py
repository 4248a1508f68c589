"""Promised requests that a replica is going to miss: what routers are told, and where they move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sluice.controller.config import ControllerConfig
from sluice.controller.state.mirror import MAX_LATE
from sluice.protocol.messages import FirstTokenWait, RequestEnding
from sluice.scheduling.request.job import STAYS, RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import (
    Clock,
    ObservedController,
    decode_row,
    delta,
    hello,
    newer_push,
    summary,
    waiting_row,
)

NAME = "a" * 32
TTFT_S = 4.0
CHAT = SLO(ttft_s=TTFT_S, tpot_s=0.5, service_class="chat")
GUARANTEED = frozenset({Tier.GUARANTEED})


def asked(key: int, tokens: int = 5_000, **more: Any) -> RouteQuery:
    return RouteQuery(key, CHAT, tokens, request_id=NAME, tiers=GUARANTEED)._replace(**more)


class Fleet:
    """Replicas ``a`` and ``b``, whose clocks are the controller's, and a router."""

    def __init__(self, **config: Any) -> None:
        self.clock = Clock()
        self.controller = ObservedController(ControllerConfig(**config), self.clock)
        self.seq: dict[str, int] = {}
        self.stepped_s: dict[str, float] = {}

    async def join(self, *names: str, rows: tuple[np.ndarray, ...] = ()) -> None:
        for name in names:
            self.seq[name] = 0
            self.stepped_s[name] = self.clock()
            made = hello(name, rows, now_s=self.clock())
            await self.controller.hello(made._replace(summary=self.summary(name)))

    def summary(self, name: str, correction: float = 1.0) -> np.void:
        record = np.array(summary())
        record["updated_s"] = self.stepped_s[name]
        record["correction"] = correction
        return record[()]

    async def report(
        self,
        name: str,
        changes: dict[int, np.ndarray] | None = None,
        correction: float = 1.0,
        steps: bool = True,
    ) -> None:
        """``steps``: a step of its engine has just ended."""
        self.seq[name] += 1
        if steps:
            self.stepped_s[name] = self.clock()
        epoch = self.controller._epoch
        made = delta(name, epoch, self.seq[name], changes, now_s=self.clock())
        told = await self.controller.report(made._replace(summary=self.summary(name, correction)))
        assert not told.resync

    async def place(self, query: RouteQuery) -> RouteDecision:
        (decision,) = (await self.controller.route([query])).decisions
        return decision

    async def late(self, *waits: FirstTokenWait) -> tuple[int, ...]:
        reply = await self.controller.push_metrics(newer_push("router", ()), (), (), waits)
        return reply.late

    def waiting(self, key: int, tokens: int = 5_000, waited_s: float = 0.0) -> np.ndarray:
        """As the replica that has it reports it."""
        row = waiting_row(key, tokens, self.clock() - waited_s)
        row["ttft_s"], row["tpot_s"] = 0.96 * TTFT_S, 0.5
        return row


def wait(key: int, replica_id: str = "a", waited_s: float = 0.0) -> FirstTokenWait:
    return FirstTokenWait(key, replica_id, TTFT_S, waited_s)


async def test_a_replica_that_works_as_predicted_is_not_left() -> None:
    fleet = Fleet()
    await fleet.join("a", "b")
    made = await fleet.place(asked(1, 10_000))
    assert made.tier is Tier.GUARANTEED
    for waited_s in (0.0, 0.5, 0.9):
        assert await fleet.late(wait(1, "a", waited_s)) == (), "not reported yet"
        fleet.clock.advance(0.4)
        for name in ("a", "b"):
            await fleet.report(name, {0: fleet.waiting(1, 10_000, waited_s)} if name == "a" else {})
    assert await fleet.late(wait(1, waited_s=1.2)) == ()


async def test_steps_that_became_slower_are_seen_at_once() -> None:
    fleet = Fleet()
    await fleet.join("a", "b")
    row = fleet.waiting(1, 20_000)
    await fleet.report("a", {0: row})
    assert await fleet.late(wait(1)) == ()
    await fleet.report("a", {}, correction=2.0)
    assert await fleet.late(wait(1)) == (1,)
    assert await fleet.late(wait(1), wait(1)) == (1,), "asked twice, told once"
    # A part that has been computed no longer counts.
    row["computed_tokens"], row["pending_tokens"] = 18_000, 2_000
    await fleet.report("a", {0: row}, correction=2.0)
    assert await fleet.late(wait(1)) == ()


@pytest.mark.parametrize("silent", [True, False])
async def test_an_engine_that_stopped_is_left_while_there_is_time(silent: bool) -> None:
    """Whether its replica reports or is silent, too."""
    fleet = Fleet()
    await fleet.join("a", "b")
    await fleet.report("a", {0: fleet.waiting(1)})
    told_s = None
    for number in range(1, 40):
        fleet.clock.advance(0.1)
        await fleet.report("b")
        if not silent:
            await fleet.report("a", steps=False)
        if await fleet.late(wait(1, waited_s=0.1 * number)) and told_s is None:
            told_s = 0.1 * number
    # As long again as it has stopped, and a step, is what there is until the first token is due.
    assert told_s == pytest.approx(TTFT_S / 2, abs=0.2)


async def test_what_is_on_its_way_counts_too() -> None:
    fleet = Fleet()
    await fleet.join("a", "b")
    made = await fleet.place(asked(1))
    where, other = (made.replica_id, "b" if made.replica_id == "a" else "a")
    assert where is not None
    for number in range(1, 36):
        fleet.clock.advance(0.1)
        await fleet.report(other)
        found = await fleet.late(wait(1, where, waited_s=0.1 * number))
    assert found == (1,)


async def test_no_more_leave_than_need_to() -> None:
    fleet = Fleet()
    await fleet.join("a", "b")
    rows = {slot: fleet.waiting(slot + 1, 10_000) for slot in range(3)}
    for slot, row in rows.items():
        row["ttft_s"] += 0.001 * slot
    await fleet.report("a", rows, correction=1.5)
    # Three of 1.5 s and more each by 4 s: the third would be late.
    found = await fleet.late(*(wait(key) for key in (1, 2, 3)))
    assert found == (3,)
    await fleet.report("a", rows, correction=3.0)
    # Of 3 s and more each the second is late, and with it gone the third still is.
    assert await fleet.late(*(wait(key) for key in (1, 2, 3))) == (2, 3)


async def test_who_cannot_go_anywhere_or_has_begun_or_is_late_is_not_named() -> None:
    fleet = Fleet()
    await fleet.join("a")
    begun = decode_row(2, 100, fleet.clock())
    begun["pending_tokens"] = 20_000  # computed again
    best_effort = fleet.waiting(3, 20_000)
    best_effort["best_effort"] = 1
    rows = {0: fleet.waiting(1, 20_000), 1: begun, 2: best_effort}
    await fleet.report("a", rows, correction=9.0)
    assert await fleet.late(wait(1), wait(2), wait(3)) == (), "nobody else is there"
    await fleet.join("b")
    assert await fleet.late(wait(1), wait(2), wait(3), wait(4), wait(1, "gone")) == (1,)
    assert await fleet.late(wait(1, waited_s=TTFT_S)) == (), "it is late already"
    fleet.controller._fleet.close("b")
    assert await fleet.late(wait(1)) == ()


async def test_an_answer_names_a_bounded_number() -> None:
    fleet = Fleet()
    await fleet.join("a", "b")
    rows = {slot: fleet.waiting(slot + 1, 5_000) for slot in range(60)}
    await fleet.report("a", rows, correction=9.0)
    found = await fleet.late(*(wait(key) for key in range(1, 61)))
    assert len(found) == MAX_LATE


async def test_it_moves_with_its_promise_and_the_log_says_why() -> None:
    fleet = Fleet()
    await fleet.join("a", "b")
    first = await fleet.place(asked(1))
    where = first.replica_id
    assert where is not None
    fleet.clock.advance(0.5)
    await fleet.report("a")
    await fleet.report("b")
    moved = await fleet.place(asked(2, waited_s=0.5, moves_from=where))
    assert (moved.tier, {where, moved.replica_id}) == (Tier.GUARANTEED, {"a", "b"})
    assert moved.planned == first.planned
    log = await fleet.controller.decisions(10)
    assert [each["moved_from"] for each in log] == [where, None]
    assert f"was predicted to be late at {where}" in log[0]["why"]
    ending = RequestEnding(NAME, "ok", (), 3, 1.0, 0.1, 1.3, replica_id=moved.replica_id, kept=True)  # type: ignore[arg-type]
    await fleet.controller.push_metrics(newer_push("router", ()), [ending])
    told = (await fleet.controller.snapshot())["calibration"]
    assert (told["promised"], told["kept"], told["moved"], told["moved_kept"]) == (1, 1, 1, 1)


async def test_a_running_stream_moves_with_its_kv_and_the_log_says_so() -> None:
    fleet = Fleet()
    await fleet.join("a", "b")
    first = await fleet.place(asked(1))
    where = str(first.replica_id)
    moved = await fleet.place(asked(2, waited_s=0.5, moves_from=where, brings_kv=True))
    assert (moved.tier, {where, moved.replica_id}) == (Tier.GUARANTEED, {"a", "b"})
    assert moved.kv_transfer_s > 0
    (latest, _) = await fleet.controller.decisions(2)
    assert latest["why"].startswith(f"It ran at {where}, and moved with its KV. ")
    # Of its times no replica alone is the cause.
    told = (await fleet.controller.snapshot())["calibration"]
    assert told["promised"] == 0
    wrong = await fleet.place(asked(3, brings_kv=True))
    assert wrong.reason == "invalid_query", "it has its KV from nowhere"
    alone = asked(4, moves_from="a", brings_kv=True, tiers=frozenset({Tier.BEST_EFFORT}))
    assert (await fleet.place(alone)).replica_id == "b"


async def test_what_stays_leaves_no_trace() -> None:
    fleet = Fleet()
    await fleet.join("a", "b")
    first = await fleet.place(asked(1))
    where = str(first.replica_id)
    before = await fleet.controller.snapshot()
    late = asked(2, waited_s=TTFT_S - 0.1, moves_from=where)
    assert await fleet.place(late) == RouteDecision(None, STAYS), "too little time is left"
    both = asked(2, moves_from=where, tiers=frozenset(Tier))
    assert (await fleet.place(both)).reason != STAYS
    await fleet.controller.release([2])
    for unpromised in (asked(2, moves_from=where, slo=SLO()), late._replace(tiers=frozenset(Tier))):
        assert await fleet.place(unpromised) == RouteDecision(None, STAYS), "never as best effort"
    after = await fleet.controller.snapshot()
    assert after["reservations"] == before["reservations"] == 1
    assert [each["moved_from"] for each in await fleet.controller.decisions(9)][-1] is None
    # Nobody waits for what could not be moved.
    assert (await fleet.place(asked(3))).tier is Tier.GUARANTEED


async def test_a_lone_replica_keeps_what_it_has() -> None:
    fleet = Fleet()
    await fleet.join("a")
    await fleet.place(asked(1))
    assert await fleet.place(asked(2, moves_from="a")) == RouteDecision(None, STAYS)
