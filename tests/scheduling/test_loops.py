"""Which turns share a deadline, what of it each gets, and which loops are promised."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from sluice.scheduling.placement import loops
from sluice.scheduling.placement.loops import (
    MIN_ENDED,
    MIN_PROMISED,
    LoopEnding,
    LoopPart,
    LoopPromises,
    LoopTurn,
    LoopTurnEnd,
)

KEPT = LoopEnding("agent", promised=True, kept=True)
MISSED = LoopEnding("agent", promised=True, kept=False)
BEST_EFFORT = LoopEnding("agent", promised=False, kept=True)


class Agents:
    """One loop after the other in one class, on a clock of its own."""

    def __init__(self, level: float | None = 0.99) -> None:
        self.loops = LoopPromises(level)
        self.now_s = 1_000.0
        self.number = 0

    def begin(self, key: int = 0, deadline_s: float = 60.0, **fields: Any) -> LoopPart:
        turn = LoopTurn(key or self.number, "agent", 0, deadline_s, 10.0)
        return self.loops.begin(turn._replace(**fields), self.now_s)

    def end(
        self,
        part: LoopPart,
        took_s: float,
        key: int = 0,
        answered: bool | None = True,
        promised: bool = True,
    ) -> None:
        self.now_s += took_s
        ended = LoopTurnEnd(key or self.number, part.age_s + took_s, took_s, answered, promised)
        self.loops.end(ended, self.now_s)

    def loop(
        self, turns: int, took_s: float = 1.0, tool_s: float = 0.5, deadline_s: float = 60.0
    ) -> list[LoopPart]:
        """A loop of that many turns, and its end."""
        self.number += 1
        parts = []
        for turn in range(turns):
            if turn:
                self.now_s += tool_s
            parts.append(self.begin(deadline_s=deadline_s))
            self.end(parts[-1], took_s)
        self.now_s += 11.0
        return parts

    def learn(self, turns: int = 4) -> None:
        for _ in range(MIN_ENDED):
            self.loop(turns)
        self.loops.expire(self.now_s)
        self.loops.ended.clear()


def test_the_turns_of_a_session_share_a_deadline_until_it_is_idle() -> None:
    agents = Agents()
    first = agents.begin(1)
    assert (first.age_s, first.turns, first.part_s, first.promised) == (0.0, 1, 60.0, None)
    agents.end(first, 5.0, 1)
    agents.now_s += 9.0
    second = agents.begin(1)
    assert (second.age_s, second.turns, second.part_s) == (14.0, 2, 46.0)
    agents.end(second, 20.0, 1)  # longer than it may be idle, but a turn runs
    agents.now_s += 9.0
    assert agents.begin(1).turns == 3
    agents.now_s += 1.0
    assert agents.begin(2).turns == 1  # another session
    agents.end(LoopPart(45.0, 3, 0.0), 0.0, 1)
    agents.now_s += 11.0
    again = agents.begin(1)
    assert (again.age_s, again.turns, again.part_s) == (0.0, 1, 60.0)


def test_a_turn_that_waited_counts_from_its_arrival() -> None:
    agents = Agents()
    part = agents.begin(1, waited_s=2.0)
    assert (part.age_s, part.part_s) == (2.0, 60.0)
    agents.end(part, 1.0, 1)
    later = agents.begin(1, waited_s=0.5)
    assert (later.age_s, later.part_s) == (3.0, 57.5)


def test_loops_are_promised_once_enough_of_them_have_ended() -> None:
    agents = Agents()
    for _ in range(MIN_PROMISED):
        assert agents.loop(4)[0].promised is None
    agents.loops.expire(agents.now_s)
    assert agents.loops.ended == {BEST_EFFORT: MIN_PROMISED}
    assert [part.promised for part in agents.loop(4)] == [True] * 4
    # Of another class nothing is known.
    assert agents.begin(9_999, service_class="chat").promised is None
    agents.loops.expire(agents.now_s)
    assert agents.loops.ended[KEPT] == 1


def test_the_fewer_loops_are_known_the_more_time_a_promise_must_leave() -> None:
    """Each took 5.5 s. Until enough are known, none counts as unattainable."""
    agents = Agents()
    for _ in range(MIN_PROMISED):
        agents.loop(4)
    for ended in range(MIN_PROMISED, MIN_ENDED):
        agents.begin(7_000 + ended)  # runs, so that none is let in only to learn
        needs_s = 5.5 * (1 + MIN_ENDED / ended)
        for more_s, promised in ((-0.1, None), (0.1, True)):
            part = agents.begin(8_000 + ended, deadline_s=needs_s + more_s)
            assert (part.needs_s, part.promised) == (pytest.approx(needs_s, rel=0.01), promised)
            agents.end(part, 0.0, 8_000 + ended, answered=None)
        agents.end(LoopPart(1e9, 1, 0.0), 0.0, 7_000 + ended, answered=None)
        agents.loop(4)
    agents.begin(7)
    assert agents.begin(8, deadline_s=5.4).promised is False


@pytest.mark.parametrize(
    ("sigma", "long", "share"),
    [(0.3, 0.0, 0.99), (1.0, 0.0, 0.99), (1.5, 0.0, 0.98), (0.2, 0.1, 0.99)],
)
def test_the_first_promises_are_kept(sigma: float, long: float, share: float) -> None:
    """Loops of log-normal times, of which ``long`` take five times as long, one after another, in
    classes whose deadlines 90 % of them keep, or more."""
    rng, ended = random.Random(3), Counter[LoopEnding]()

    def took_s() -> float:
        return rng.lognormvariate(0, sigma) * (5.0 if rng.random() < long else 1.0)

    drawn = sorted(took_s() for _ in range(4_000))
    for run in range(0, 400, 2):
        agents, deadline_s = Agents(), drawn[3_600 + run] * rng.choice([1, 2, 4])
        while agents.number < MIN_ENDED:
            agents.loop(1, took_s(), deadline_s=deadline_s)
        agents.loops.expire(agents.now_s)
        ended += agents.loops.ended
    assert ended[KEPT] > 600
    kept = ended[KEPT] / (ended[KEPT] + ended[MISSED])
    print(f"sigma {sigma}, long {long}: {ended[KEPT] + ended[MISSED]} promised, {kept:.4f} kept")
    assert kept >= share


def test_a_turn_leaves_what_later_turns_and_their_tools_need() -> None:
    agents = Agents()
    agents.learn(turns=4)
    parts = agents.loop(6, deadline_s=40.0)
    # Three more turns are expected, and three times half a second of tools.
    assert parts[0].part_s == pytest.approx((40.0 - 1.5) / 4)
    assert parts[1].part_s == pytest.approx((40.0 - 1.5 - 1.0) / 3)
    assert parts[3].part_s == pytest.approx(40.0 - 4.5)
    # More turns than any loop had: as many again are expected.
    assert parts[4].part_s == pytest.approx((40.0 - 6.0 - 5 * 0.5) / 6)


def test_a_first_turn_that_takes_longer_gets_more() -> None:
    agents = Agents()
    for _ in range(MIN_ENDED):
        agents.number += 1
        for took_s in (4.0, 1.0, 1.0):
            agents.end(agents.begin(), took_s)
        agents.now_s += 11.0
    first = agents.begin(9_999)
    assert first.part_s == pytest.approx(60.0 * 4 / (4 + 2 * 2), rel=0.01)  # usual: 6 / 3


def test_a_turn_gets_twice_its_usual_time_while_that_is_left() -> None:
    agents = Agents()
    agents.learn(turns=30)
    agents.number += 1
    agents.end(agents.begin(), 40.0)
    assert agents.begin().part_s == pytest.approx(2 * agents.loops._classes["agent"].turn_s)
    agents.now_s += 19.5
    assert agents.begin().part_s == pytest.approx(0.5)
    agents.now_s += 1.0
    assert agents.begin().part_s == pytest.approx(-0.5)


def test_a_loop_that_would_probably_be_late_is_not_promised() -> None:
    agents = Agents()
    agents.learn(turns=8)  # takes 11.5 s
    agents.begin(7)  # runs, so that no loop is let in only to learn
    tight = agents.begin(8, deadline_s=11.0)
    assert tight.promised is False
    assert tight.needs_s == pytest.approx(11.5, rel=0.01)
    assert tight.part_s == 11.0  # best effort has all the time there is
    assert agents.begin(9, deadline_s=12.0).promised is True


def test_slower_turns_leave_room_for_fewer_loops() -> None:
    agents = Agents()
    agents.learn(turns=8)
    agents.begin(7)
    for key in range(100, 130):  # of loops that run at the same time
        agents.end(agents.begin(key), 3.0, key)
    agents.now_s += 1.0
    assert agents.begin(8, deadline_s=15.0).promised is False


def test_where_no_loop_runs_one_is_let_in_without_a_promise() -> None:
    agents = Agents()
    agents.learn(turns=8)
    assert agents.begin(7, deadline_s=5.0).promised is None
    assert agents.begin(8, deadline_s=5.0).promised is False


def test_a_loop_whose_first_turn_was_not_promised_is_best_effort() -> None:
    agents = Agents()
    agents.learn()
    part = agents.begin(7)
    assert part.promised is True
    agents.end(part, 1.0, 7, promised=False)
    assert agents.begin(7).promised is False


def test_a_first_turn_without_a_promise_may_end_after_another_one() -> None:
    agents = Agents()
    agents.learn()
    part = agents.begin(7)
    agents.end(agents.begin(7), 1.0, 7)
    agents.end(part, 1.0, 7, promised=False)
    assert agents.begin(7).promised is False


def test_a_first_turn_that_was_refused_has_begun_nothing() -> None:
    agents = Agents()
    agents.learn()
    agents.begin(6)
    part = agents.begin(7, deadline_s=2.0)
    assert part.promised is False
    agents.end(part, 0.0, 7, answered=False, promised=False)
    agents.now_s += 1.0
    again = agents.begin(7, deadline_s=60.0)
    assert (again.turns, again.age_s, again.promised) == (1, 0.0, True)


def test_a_first_turn_whose_client_left_has_begun_nothing() -> None:
    """So the next one is not refused for want of a promise."""
    agents = Agents()
    agents.learn()
    agents.end(agents.begin(7), 1.0, 7, answered=None, promised=False)
    again = agents.begin(7)
    assert (again.turns, again.age_s, again.promised) == (1, 0.0, True)


@pytest.mark.parametrize(
    ("ends", "counted"),
    [
        ([(1.0, True)], KEPT),
        ([(61.0, True)], MISSED),
        ([(61.0, True), (1.0, True)], MISSED),
        ([(1.0, True), (1.0, False)], MISSED),  # its last turn was not answered
        ([(1.0, True), (1.0, False), (1.0, True)], KEPT),  # it was sent again
        ([(1.0, True), (70.0, None)], KEPT),  # its client left
        ([(1.0, None)], None),
    ],
)
def test_a_loop_is_kept_if_all_was_answered_by_its_deadline(
    ends: list[tuple[float, bool | None]], counted: LoopEnding | None
) -> None:
    agents = Agents()
    agents.learn()
    for took_s, answered in ends:
        agents.end(agents.begin(7), took_s, 7, answered)
    agents.loops.expire(agents.now_s + 1_000.0)
    assert agents.loops.ended == ({} if counted is None else {counted: 1})


def test_a_turn_that_never_ends_is_late() -> None:
    agents = Agents()
    agents.learn()
    agents.end(agents.begin(7), 1.0, 7)
    agents.begin(7)
    agents.loops.expire(agents.now_s + 65.0)
    assert agents.loops.ended[MISSED] == 0
    agents.loops.expire(agents.now_s + 70.0)
    assert agents.loops.ended[MISSED] == 1


def test_a_loop_that_its_client_names_is_known_after_its_deadline_and_counts_once() -> None:
    agents = Agents()
    agents.end(agents.begin(7, stated=True), 1.0, 7)
    agents.now_s += 100.0
    late = agents.begin(7, stated=True)
    assert (late.turns, late.part_s) == (2, -41.0)
    agents.end(late, 1.0, 7)
    agents.loops.expire(agents.now_s + 1_000.0)
    assert sum(agents.loops.ended.values()) == 1
    agents.loops.expire(agents.now_s + loops.KEPT_S)
    assert len(agents.loops) == 0


def test_a_loop_is_over_with_the_turn_that_its_client_says_is_the_last() -> None:
    agents = Agents()
    agents.learn()
    for _ in range(2):
        first = agents.begin(7)
        assert first.turns == 1, "a later turn begins another loop"
        agents.begin(7)
        agents.loops.end(LoopTurnEnd(7, 1.0, 1.0, True, True, final=True), agents.now_s)
        assert agents.loops.ended[KEPT] == 0, "a turn beside it runs"
        agents.end(first, 2.0, 7)
        assert agents.loops.ended.pop(KEPT) == 1
    # An answer that failed may be asked for again.
    agents.begin(8)
    agents.loops.end(LoopTurnEnd(8, 1.0, 1.0, False, True, final=True), agents.now_s)
    assert not agents.loops.ended


def test_a_loop_that_its_client_names_and_ends_is_known_after_it() -> None:
    agents = Agents()
    for turns in (1, 2):
        assert agents.begin(7, stated=True).turns == turns
        agents.loops.end(LoopTurnEnd(7, 1.0, 1.0, True, True, final=True), agents.now_s + 1.0)
    assert sum(agents.loops.ended.values()) == 1
    agents.loops.expire(agents.now_s + loops.KEPT_S + 61.0)
    assert len(agents.loops) == 0


def test_tenants_count_by_their_own_loops() -> None:
    agents = Agents()
    for number in range(2 * MIN_ENDED):
        tenant, turns = number % 2 + 1, 2 if number % 2 else 12
        for turn in range(turns):
            part = agents.begin(number + 1, tenant=tenant)
            agents.end(part, 1.0, number + 1)
            assert part.turns == turn + 1
        agents.now_s += 11.0
    agents.begin(501, tenant=1)
    agents.begin(502, tenant=2)
    assert agents.begin(503, tenant=1, deadline_s=10.0).promised is False
    assert agents.begin(504, tenant=2, deadline_s=10.0).promised is True


def test_one_loop_of_each_tenant_is_let_in_by_what_other_tenants_need() -> None:
    agents = Agents()
    agents.learn(turns=8)
    assert agents.begin(101, tenant=1, deadline_s=5.0).promised is None
    assert agents.begin(102, tenant=1, deadline_s=5.0).promised is False
    assert agents.begin(103, tenant=2, deadline_s=5.0).promised is None


def test_a_loop_is_judged_by_the_longest_deadline_that_its_client_states() -> None:
    agents = Agents()
    agents.learn()
    agents.end(agents.begin(7), 1.0, 7)
    shorter = agents.begin(7, deadline_s=0.5)
    assert (shorter.part_s, shorter.promised) == (-0.5, True)
    agents.end(shorter, 1.0, 7)
    agents.loops.expire(agents.now_s + 100.0)
    assert agents.loops.ended[KEPT] == 1


@pytest.mark.parametrize(("answered", "counted"), [(False, KEPT), (True, MISSED)])
def test_ends_may_be_told_in_any_order(answered: bool, counted: LoopEnding) -> None:
    """Of two routers, the first to tell may have had the last turn."""
    agents = Agents()
    agents.learn()
    agents.begin(7)
    agents.begin(7)
    agents.end(LoopPart(0.0, 1, 0.0), 1.0, 7, not answered)
    agents.end(LoopPart(0.0, 1, 0.0), 0.5, 7, answered)
    agents.loops.expire(agents.now_s + 100.0)
    assert agents.loops.ended[counted] == 1


def test_a_controller_that_restarts_learns_a_loop_from_its_router() -> None:
    agents = Agents()
    part = agents.begin(7, waited_s=0.5, age_s=30.0, turns=5, promised=True)
    assert (part.age_s, part.turns, part.promised) == (30.0, 6, True)
    assert part.part_s == 30.5


def test_a_router_alone_promises_nothing_and_gives_all_that_is_left() -> None:
    agents = Agents(level=None)
    for _ in range(2 * MIN_ENDED):
        parts = agents.loop(3)
        assert [part.promised for part in parts] == [None] * 3
        assert parts[2].part_s == pytest.approx(57.0)
    # It keeps what the controller knows.
    agents.begin(7)
    agents.loops.known(7, LoopPart(20.0, 4, 5.0, True), agents.now_s)
    agents.now_s += 1.0
    part = agents.begin(7)
    assert (part.age_s, part.turns, part.promised) == (21.0, 5, True)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MAX_LOOPS", 5)
    agents = Agents()
    for key in range(1, 100):
        agents.begin(key)
    assert len(agents.loops) == 5
    assert len(agents.loops._ends) <= 10
    assert len(agents.loops._classes["agent"].live) == 5
    assert agents.begin(99).turns == 2
    assert agents.begin(1).turns == 1
    for key in range(100, 200):  # each is over at once
        agents.begin(key)
        agents.loops.end(LoopTurnEnd(key, 1.0, 1.0, True, True, final=True), agents.now_s)
    assert len(agents.loops._ends) <= 11


def test_a_tenant_with_many_loops_drops_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MAX_LOOPS", 5)
    agents = Agents()
    agents.begin(1, tenant=1)
    for key in range(2, 100):
        agents.begin(key, tenant=2)
    assert len(agents.loops) == 5
    assert agents.begin(1, tenant=1).turns == 2
    assert agents.begin(97, tenant=2).turns == 2


def test_promised_loops_are_kept_on_a_server_that_is_shared(seed: int = 3) -> None:
    """Loops of log-normal numbers of turns arrive at a server that serves all turns at once, and
    would be overloaded by them: of the promised ones 99 % are in time."""
    rng, agents = random.Random(seed), LoopPromises(0.99)
    now_s, next_s, key, running = 0.0, 0.0, 0, {}  # type: ignore[var-annotated]
    waiting: list[tuple[float, int, int, float]] = []
    while now_s < 6_000.0:
        least_s = min((left_s for left_s, *_ in running.values()), default=1e9)
        ends_s = now_s + least_s * max(1, len(running))
        until_s = min(next_s, ends_s, min(waiting)[0] if waiting else 1e9)
        for turn in running.values():
            turn[0] -= (until_s - now_s) / len(running)
        now_s = until_s
        begins = []
        if now_s == ends_s:
            done = min(running, key=lambda key: running[key][0])
            _, left, arrived_s, began_s, promised = running.pop(done)
            ended = LoopTurnEnd(done, now_s - began_s, now_s - arrived_s, True, promised)
            agents.end(ended, now_s)
            if left > 1:
                waiting.append((now_s + rng.lognormvariate(0, 1), done, left - 1, began_s))
        elif now_s == next_s:
            next_s, key = now_s + rng.expovariate(0.4), key + 1
            begins.append((key, max(1, round(rng.lognormvariate(2.3, 0.5))), now_s))
        else:
            begins.append(min(waiting)[1:])
            waiting.remove(min(waiting))
        for of, left, began_s in begins:
            part = agents.begin(LoopTurn(of, "agent", 0, 90.0, 30.0), now_s)
            if part.promised is False:
                agents.end(LoopTurnEnd(of, 0.0, 0.0, False, False), now_s)
            else:
                work_s = rng.expovariate(3.0)
                running[of] = [work_s, left, now_s, began_s, part.promised is True]
    kept, missed = agents.ended[KEPT], agents.ended[MISSED]
    assert kept > 200
    assert kept / (kept + missed) >= 0.99
