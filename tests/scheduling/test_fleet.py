"""The arrays of a fleet: against the rows that they are made of, and after any history."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.assumptions import UNKNOWN_OUTPUT_TOKENS
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet, FleetSettings
from sluice.scheduling.fleet.report import _MAX_STALE, Ledger, Reservation
from sluice.scheduling.fleet.transfer import FIXED_S, TOKEN_S, Transfers, TransferTime
from sluice.scheduling.latency.model import LinearLatency, RooflineLatency
from sluice.scheduling.request.deadline import paced
from sluice.scheduling.request.objective import SLO
from tests.scheduling.fleets import fleet_of, report, row


def made(
    replica_id: str, tokens: float = 10, now_s: float = 0, awaited_s: float = -inf
) -> Reservation:
    """A decision that takes ``tokens`` of a replica."""
    return Reservation(
        replica_id, now_s, True, tokens, 0, tokens, now_s + 1, 0.1, 1, 100, awaited_s
    )


def tokens_at(ledger: Ledger, replica_id: str) -> list[float]:
    return [entry.new_tokens for entry in ledger.at(replica_id)]


def test_what_nobody_could_confirm_is_postponed() -> None:
    ledger = Ledger(ttl_s=5)
    ledger.reserve(1, made("a"))
    ledger.reserve(2, made("b", now_s=1, awaited_s=3))
    ledger.postpone(10)
    ledger.reserve(3, made("c", now_s=10))
    assert ledger.expire(14.9) == set()
    assert ledger.expire(15) == {"a", "c"}
    assert ledger.expire(17.9) == set()
    assert ledger.expire(18) == {"b"}


def test_the_ends_of_ended_reservations_are_forgotten() -> None:
    ledger = Ledger(ttl_s=5)
    for key in range(5 * _MAX_STALE):
        ledger.reserve(key, made("a", now_s=key / 1_000))
        ledger.release([key])
        assert len(ledger._ends) <= _MAX_STALE + 2
    assert ledger.expire(1_000) == set()
    assert ledger.expired == 0


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Ledger(ttl_s=0)
    with pytest.raises(ValueError, match="tokens >= 0"):
        Ledger(ttl_s=1).reserve(1, made("a", -1))


_replicas = st.sampled_from(["a", "b", "c"])
_actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("reserve"),
            st.integers(0, 20),
            _replicas,
            st.integers(0, 500),
            st.sampled_from([0, 2, 30]),
        ),
        st.tuples(st.just("release"), st.lists(st.integers(0, 20), max_size=4)),
        st.tuples(st.just("drop"), _replicas),
        # Eighths, so that an age is what it seems.
        st.tuples(st.just("wait"), st.integers(0, 32).map(lambda eighths: eighths / 8)),
    ),
    max_size=80,
)


@given(_actions)
def test_what_is_reserved_equals_a_recount_and_all_drains_to_zero(
    actions: list[tuple[object, ...]],
) -> None:
    ledger = Ledger(ttl_s=5, limit=12)
    now_s = 0.0
    # Oldest first, as the ledger has them.
    known: dict[int, Reservation] = {}

    def ends_s(key: int) -> tuple[float, int]:
        entry = known[key]
        return max(entry.made_s, entry.awaited_s) + 5, key

    for action in actions:
        before = {name: tokens_at(ledger, name) for name in "abc"}
        match action:
            case ("reserve", int(key), str(name), int(tokens), int(later_s)):
                entry = made(name, tokens, now_s, now_s + later_s if later_s else -inf)
                changed = ledger.reserve(key, entry) | {name}
                if known.pop(key, None) is None and len(known) == 12:
                    known.pop(min(known, key=ends_s))
                known[key] = entry
            case ("release", list(keys)):
                changed = ledger.release(keys)
                known = {key: entry for key, entry in known.items() if key not in keys}
            case ("drop", str(name)):
                ledger.drop_replica(name)
                changed = {name}
                known = {k: entry for k, entry in known.items() if entry.replica_id != name}
            case ("wait", float(seconds)):
                now_s += seconds
                changed = ledger.expire(now_s)
                known = {k: entry for k, entry in known.items() if ends_s(k)[0] > now_s}
            case _:
                raise AssertionError(action)
        for name in "abc":
            expected = [e.new_tokens for e in known.values() if e.replica_id == name]
            assert tokens_at(ledger, name) == expected
            # Whoever keeps sums must hear of every change.
            assert name in changed or tokens_at(ledger, name) == before[name]
        assert len(ledger) == len(known) <= 12
    ledger.expire(now_s + 35)
    assert len(ledger) == 0
    assert not ledger._of_replica


# The time that KV takes between replicas, learnt from sums.


def test_until_something_was_seen_it_is_what_is_documented() -> None:
    assert TransferTime().seconds(1_000) == FIXED_S + 1_000 * TOKEN_S


def test_it_learns_both_numbers_from_prompts_of_different_sizes() -> None:
    learns = TransferTime()
    for turn in range(200):
        count, tokens = 1 + turn % 4, 200 + turn % 7 * 1_500
        learns.see(count, count * (0.02 + 5e-5 * tokens), count * tokens)
    assert learns.fixed_s == pytest.approx(0.02, rel=0.1)
    assert learns.token_s == pytest.approx(5e-5, rel=0.1)


def test_it_follows_a_change() -> None:
    learns = TransferTime()
    for seconds in (0.01, 0.3):
        for turn in range(1_000):
            learns.see(1, seconds, 500 + turn % 2 * 1_000)
    assert learns.seconds(1_000) == pytest.approx(0.3, rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(1, 10_000), st.floats(0, 1e4), st.integers(0, 10**9)), max_size=30
    )
)
def test_it_is_never_negative(seen: list[tuple[int, float, int]]) -> None:
    learns = TransferTime()
    for count, seconds, tokens in seen:
        learns.see(count, seconds, tokens)
        assert learns.fixed_s >= 0
        assert learns.token_s >= 0


def test_a_fleet_learns_from_what_comes_between_reports_and_from_one_that_starts_anew() -> None:
    told = report(role="decode", transfers=Transfers(10, 5.0, 10_000))
    fleet = fleet_of(told)
    first_s = fleet.transfer.seconds(1_000)
    assert FIXED_S < first_s < 0.5
    fleet.report("0", told, 0.1)
    assert fleet.transfer.seconds(1_000) == first_s
    fleet.report("0", told._replace(transfers=Transfers(2, 1.0, 2_000)), 0.2)
    again_s = fleet.transfer.seconds(1_000)
    assert again_s > first_s
    fleet.report("0", told._replace(transfers=Transfers(40, 20.0, 40_000)), 0.3)
    assert again_s < fleet.transfer.seconds(1_000) < 0.5


MODEL = LinearLatency(a=0.010, b=0.000_1, c=0.000_001)
ROOFLINE = RooflineLatency(1e-4, 0.0, 0.01, 1e-5, 0.0, 0.02)

# Halves and quarters are the same in the single precision of a row.
slos = st.builds(
    SLO,
    ttft_s=st.sampled_from([None, 0.25, 0.5, 2.0]),
    tpot_s=st.sampled_from([None, 0.03125, 0.0625, 0.125]),
    e2e_s=st.sampled_from([None, 16.0, 32.0]),
    priority=st.integers(1, 3),
)
prompts = st.integers(2, 4_000)
EIGHTHS = st.integers(-16, 0).map(lambda eighths: eighths / 8)

waiting = st.builds(row, slos, prompts, arrival_s=EIGHTHS)
decoding = st.builds(
    lambda slo, prompt, emitted, early: row(
        slo, prompt, emitted=emitted, arrival_s=-2.0, first_token_s=-2.0 + early / 8
    ),
    slos,
    prompts,
    st.integers(1, 40),
    st.integers(0, 8),
)
best_effort = st.builds(
    row, slos, prompts, arrival_s=EIGHTHS, best_effort=st.just(True), running=st.booleans()
)
tables = st.lists(st.one_of(waiting, decoding, best_effort), max_size=12)


def state(fleet: Fleet) -> dict[str, tuple[list[float], *tuple[list[list[float]], ...]]]:
    """All that a fleet has of each replica: figures, prefills, loads, best-effort prefills."""
    found = {}
    for replica_id, at in fleet.row_of.items():
        figures, start = fleet.figures[at], int(fleet.starts[at])
        counts = figures[[figure.QUEUED, figure.LOADS, figure.LENT_QUEUED]].astype(int).tolist()
        entries = zip((fleet.prefills, fleet.loads, fleet.lent), counts, strict=True)
        lists = [each[start : start + count].tolist() for each, count in entries]
        found[replica_id] = (figures.tolist(), *lists)
    return found


COUNTED_APART = (
    figure.WAITING,
    figure.RESERVED,
    figure.BATCH_S,
    figure.STEP_ENDS_S,
    figure.STEP_WORK_S,
    figure.CLAIMED_BLOCKS,
)
"""Figures that tell where a request is, or what the engine does at that very moment; a reservation
claims the memory of its whole output, whatever the others free before its end."""


@given(rows=tables, slo=slos, prompt=prompts, promised=st.booleans())
def test_a_reservation_counts_as_the_same_request_reported_waiting(
    rows: list[np.ndarray], slo: SLO, prompt: int, promised: bool
) -> None:
    # Something older is there, so that both fleets work since the same moment.
    rows = [row(SLO(), 2, arrival_s=-3.0, best_effort=True), *rows]
    new = row(slo, prompt, arrival_s=0.0, best_effort=not promised)
    due_s, tpot_s = paced(*slo.columns[:3], UNKNOWN_OUTPUT_TOKENS)
    reserved, reported = Fleet(), Fleet()
    reserved.report("0", report(*rows, latency=MODEL), 0.0)
    reserved.reserve(
        7,
        Reservation(
            "0", 0.0, promised, prompt, 0, prompt, due_s, tpot_s, slo.priority,
            UNKNOWN_OUTPUT_TOKENS,
        ),
    )  # fmt: skip
    reported.report("0", report(*rows, new, latency=MODEL), 0.0)
    assert has_same(reserved, reported, COUNTED_APART)
    figures = reserved.figures[0]
    assert figures[figure.RESERVED] == 1
    assert reported.figures[0, figure.WAITING] == figures[figure.WAITING] + 1
    # Once the report has it, the reservation is gone, and both are the same.
    reserved.confirm([7], "0")
    reserved.report("0", report(*rows, new, latency=MODEL), 0.0)
    assert state(reserved) == state(reported)
    assert len(reserved.ledger) == 0


def has_same(one: Fleet, other: Fleet, but: tuple[int, ...]) -> bool:
    """Whether two fleets of one replica have the same, up to rounding, ``but`` for some figures."""
    left, right = state(one)["0"], state(other)["0"]
    ours, theirs = (np.delete(np.array(each[0]), but) for each in (left, right))
    if not np.allclose(ours, theirs, rtol=1e-9, atol=1e-9):
        return False
    if len(left[1]) != len(right[1]) or len(left[2]) != len(right[2]):
        return False
    return all(np.allclose(left[i], right[i], rtol=1e-9, equal_nan=True) for i in (1, 2))


REPLICAS = ("a", "b", "c", "d")
actions = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.sampled_from(REPLICAS), tables),
        st.tuples(st.just("reserve"), st.sampled_from(REPLICAS), slos, prompts, st.booleans()),
        st.tuples(st.just("release"), st.lists(st.integers(0, 40), max_size=3)),
        st.tuples(st.just("confirm"), st.sampled_from(REPLICAS), st.integers(0, 40)),
        st.tuples(st.just("leave"), st.sampled_from(REPLICAS)),
        st.tuples(st.just("leave_out"), st.sampled_from(REPLICAS)),
        st.tuples(st.just("wait"), st.integers(0, 8)),
    ),
    max_size=40,
)


@given(actions)
def test_what_is_counted_depends_on_the_last_reports_and_the_living_reservations_only(
    history: list[tuple[object, ...]],
) -> None:
    settings_ = FleetSettings(reservation_ttl_s=2.0)
    fleet = Fleet(settings_)
    now_s, key = 0.0, 0
    last: dict[str, list[np.ndarray]] = {}
    at: dict[str, float] = {}
    living: dict[int, Reservation] = {}

    def end(keys: list[int]) -> None:
        for each in keys:
            living.pop(each, None)

    def end_at(name: str) -> None:
        end([each for each, made in living.items() if made.replica_id == name])

    for action in history:
        match action:
            case ("report", str(name), list(rows)):
                last[name], at[name] = rows, now_s
                fleet.report(name, report(*rows, latency=MODEL, made_s=now_s), now_s)
            case ("reserve", str(name), SLO() as slo, int(prompt), bool(promised)):
                if name not in last:
                    continue
                key += 1
                made = Reservation(
                    name, now_s, promised, prompt, 0, prompt, now_s + slo.columns[0],
                    slo.columns[1], 1, 100,
                )  # fmt: skip
                living[key] = made
                fleet.reserve(key, made)
            case ("release", list(keys)):
                fleet.release(keys)
                end(keys)
            case ("confirm", str(name), int(one)):
                if name not in last:
                    continue
                fleet.confirm([one], name)
                fleet.report(name, report(*last[name], latency=MODEL, made_s=now_s), now_s)
                at[name] = now_s
                end([one])
            case ("leave", str(name)):
                assert fleet.leave(name) == (name in last)
                last.pop(name, None)
                end_at(name)
            case ("leave_out", str(name)):
                assert fleet.leave_out(name, now_s + 1) == (name in last)
                end_at(name)
            case ("wait", int(eighths)):
                now_s += eighths / 8
                fleet.expire(now_s)
                end([each for each, made in living.items() if now_s - made.made_s >= 2.0])
        assert len(fleet) == len(last)
        assert len(fleet.ledger) == len(living)
    fresh = Fleet(settings_)
    for name, rows in last.items():
        fresh.report(name, report(*rows, latency=MODEL, made_s=at[name]), now_s)
    for each, made in living.items():
        fresh.reserve(each, made)
    assert state(fleet) == state(fresh)
    fleet.release(list(living))
    assert len(fleet.ledger) == 0


def queue(size: int) -> list[np.ndarray]:
    """Prefills, every third of which is best effort."""
    slos = [SLO(ttft_s=0.5 + key / 64, tpot_s=0.0625) for key in range(size)]
    return [row(slo, 10 + key, best_effort=key % 3 == 0) for key, slo in enumerate(slos)]


def test_entries_move_together_and_stay_what_they_are() -> None:
    fleet = Fleet()
    names = [f"replica-{index}" for index in range(20)]
    sizes = {name: 3 * index for index, name in enumerate(names)}
    for turn in range(6):
        for name in names:
            sizes[name] = (sizes[name] * 7 + 11 * turn) % 90
            fleet.report(name, report(*queue(sizes[name]), latency=MODEL), 0.0)
        for name in names[turn::4]:
            fleet.leave(name)
            sizes[name] = 0
    fresh = Fleet()
    for name in fleet.row_of:
        fresh.report(name, report(*queue(sizes[name]), latency=MODEL), 0.0)
    assert state(fleet) == state(fresh)
    # Memory is in proportion to what there is, and no two replicas share a place.
    counts = [figure.QUEUED, figure.LENT_QUEUED]
    live = int(sum(fleet.figures[at, counts].sum() for at in fleet.row_of.values()))
    assert len(fleet.prefills) <= 16 * (live + 16 * len(fleet))


# Replicas that are closed.


def rows_of(fleet: Fleet) -> list[str]:
    """The replicas that may be chosen."""
    return [fleet.ids[row] for row in fleet.candidates(0.0)]


def test_a_closed_replica_is_no_candidate_until_it_is_reopened() -> None:
    fleet = fleet_of(report(), report())
    fleet.reserve(1, Reservation("0", 0.0, True, 10, 0, 10, 1.0, inf, 1.0, 5))
    fleet.close("0")
    fleet.report("0", report(), 0.0)
    assert rows_of(fleet) == ["1"]
    assert fleet.condition(fleet.row_of["0"], 0.0) == "draining"
    assert fleet.figures[fleet.row_of["0"], figure.RESERVED] == 1
    assert fleet.reopen("0") and not fleet.reopen("0")
    assert rows_of(fleet) == ["0", "1"]


def test_a_replica_that_leaves_and_joins_again_is_still_closed() -> None:
    fleet = fleet_of(report())
    fleet.close("0")
    fleet.leave("0")
    fleet.report("0", report(), 0.0)
    assert rows_of(fleet) == [] and fleet.closed == ("0",)


def test_reopening_does_not_take_back_what_the_replica_says_itself() -> None:
    fleet = fleet_of(report())
    fleet.close("0")
    fleet.report("0", report(draining=True), 0.0)
    assert fleet.reopen("0")
    assert rows_of(fleet) == []


def test_the_names_of_rows_stay_with_who_kept_them() -> None:
    fleet = fleet_of(report(), report())
    kept = fleet.ids
    fleet.leave("0")
    fleet.report("new", report(), 0.0)
    assert kept[:2] == ["0", "1"] and fleet.ids[:2] == ["new", "1"]


# Replicas in quarantine.


def test_a_quarantined_replica_is_chosen_only_where_no_other_is_left() -> None:
    fleet = Fleet(FleetSettings(aged_after_s=1.0, stale_after_s=2.0))
    for name in ("0", "1"):
        fleet.report(name, report(), 0.0)
    fleet.quarantine("0")
    fleet.report("0", report(), 0.0)
    assert rows_of(fleet) == ["1"]
    assert fleet.condition(fleet.row_of["0"], 0.0) == "quarantined"
    assert fleet.may_promise
    assert fleet.capacity(0.0).tolist() == [1]
    fleet.report("0", report(), 1.5)
    assert fleet.candidates(1.5).tolist() == [1], "one that is merely late is better"
    assert not fleet.may_promise
    assert fleet.candidates(2.5).tolist() == [0], "and one that hangs is better than none"
    assert fleet.capacity(2.5).tolist() == []
    fleet.quarantine("1")
    for name in ("0", "1"):
        fleet.report(name, report(), 2.5)
    assert fleet.candidates(2.6).tolist() == [0, 1]
    fleet.close("0")
    assert fleet.candidates(2.6).tolist() == [1], "an operator's word stands above all"
    fleet.readmit("1")
    fleet.reopen("0")
    assert fleet.candidates(2.6).tolist() == [1]
    fleet.leave("0")
    fleet.report("next", report(), 2.6)
    assert fleet.candidates(2.6).tolist() == [0, 1], "its row is given again, and nothing is left"


def test_one_that_is_to_be_tried_is_a_candidate_but_no_capacity() -> None:
    fleet = fleet_of(report(), report())
    fleet.quarantine("0", untried=True)
    assert rows_of(fleet) == ["0", "1"] and fleet.untried == {0}
    assert fleet.condition(0, 0.0) == "quarantined" and fleet.may_promise
    assert fleet.capacity(0.0).tolist() == [1]
    fleet.quarantine("0")
    assert rows_of(fleet) == ["1"] and not fleet.untried


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 3)), max_size=40),
)
def test_what_decisions_read_is_what_was_said_of_the_replicas(
    steps: list[tuple[int, int, int]],
) -> None:
    """What is kept from decision to decision equals what is made again for each."""
    fleet = fleet_of(*[report() for _ in range(4)])
    closed, draining, out = set[int](), set[int](), dict[int, bool]()
    heard_s, gone_s, now_s = dict.fromkeys(range(4), 0.0), dict.fromkeys(range(4), -inf), 0.0
    for each, what, quarters in steps:
        name = str(each)
        now_s += quarters / 4
        match what:
            case 0:
                fleet.close(name)
                closed.add(each)
            case 1:
                fleet.reopen(name)
                closed.discard(each)
            case 2 | 3:
                fleet.quarantine(name, untried=what == 3)
                out[each] = what == 3
            case 4:
                fleet.readmit(name)
                out.pop(each, None)
            case 5:
                gone_s[each] = now_s + 0.5
                fleet.leave_out(name, gone_s[each])
            case _:
                fleet.report(name, report(draining=what == 6), now_s)
                heard_s[each] = now_s
                (draining.add if what == 6 else draining.discard)(each)
        willing = [n for n in range(4) if n not in closed | draining]
        sound = [n for n in willing if out.get(n, True)]
        here = [n for n in range(4) if now_s >= gone_s[n]]
        fresh = [n for n in here if now_s - heard_s[n] < fleet.settings.aged_after_s]
        aged = [n for n in here if now_s - heard_s[n] < fleet.settings.stale_after_s]
        kinds = (fresh, sound), (aged, sound), (fresh, willing), (aged, willing)
        found = [[n for n in known if n in able] for known, able in kinds]
        assert fleet.candidates(now_s).tolist() == next((rows for rows in found if rows), [])
        assert fleet.untried == {n for n, untried in out.items() if untried}
        assert fleet.present(now_s).tolist() == [n for n in aged if n in willing]


def test_replicas_with_models_of_more_pieces_join_those_with_fewer() -> None:
    models = (MODEL, ROOFLINE, MODEL)
    fleet = fleet_of(*[report(latency=model) for model in models])
    found = figure.work_on(fleet.pieces, np.arange(3), 500.0, np.zeros(3)).tolist()
    assert found == [model.work_s(500, 0) for model in models]
    fleet.report("1", report(latency=MODEL), 0.0)
    found = figure.work_on(fleet.pieces, np.arange(3), 500.0, np.zeros(3)).tolist()
    assert found == [MODEL.work_s(500, 0)] * 3
