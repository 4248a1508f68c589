"""Moore-Hodgson against an exhaustive search; its admission against its definition in plain Python,
and against a fluid server."""

from __future__ import annotations

from itertools import combinations
from math import inf
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import Promises, make_policy
from sluice.scheduling.admission.base import Constraint
from sluice.scheduling.batching.base import fitting
from sluice.scheduling.batching.deadline_triage import before, keep
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet, FleetSettings
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery, Tier
from sluice.scheduling.routing import make_policy as make_routing
from tests.examples import examples
from tests.scheduling.fleets import fleet_of, job, report, row

MODEL = LinearLatency(a=0.010, b=0.000_1, c=0.000_001)
SLIP_S = 1e-9


class Load(NamedTuple):
    """A decode: when it is due first, its work per step, and its pace."""

    due_s: float
    own_s: float
    pace_s: float


class Prefill(NamedTuple):
    """A promised prefill: its deadline and its work."""

    due_s: float
    work_s: float


def load_of(due_s: float, context: int, tpot_s: float) -> Load:
    own_s = MODEL.work_s(1, context)
    return Load(due_s, own_s, max(tpot_s, MODEL.a + own_s))


def capacity(loads: list[Load], begun_s: float, until_s: float) -> float:
    """FairBatching's appendix A, steps 1 to 4, one load after another."""
    left_s = until_s - begun_s - MODEL.a
    tightest_s = inf
    for load in sorted(loads):
        more = load.own_s / load.pace_s
        if load.pace_s < tightest_s:
            more += MODEL.a / load.pace_s - MODEL.a / tightest_s
            tightest_s = load.pace_s
        left_s -= more * max(0.0, until_s - load.due_s)
    return left_s


def margin_s(
    queue: list[Prefill],
    loads: list[Load],
    begun_s: float,
    step_ends_s: float,
    now_s: float,
    new: Prefill,
    own_s: float,
    tpot_s: float,
    headroom: float,
    overtaking_s: float = 0.0,
) -> float:
    """By how much the promises hold with a new one, where ``overtaking_s`` more must fit; below 0:
    one of them does not. Each sum is made anew."""
    usable = 1 - headroom
    usable_s = now_s + (new.due_s - now_s) * usable
    ahead_s = sum(each.work_s for each in queue if each.due_s <= new.due_s)
    starts_s = max(ahead_s, capacity(loads, begun_s, now_s) + MODEL.a)
    margins = [(new.due_s - now_s) * usable - new.work_s - MODEL.a]
    if new.due_s < inf:
        margins += [
            capacity(loads, begun_s, usable_s) - starts_s - new.work_s - overtaking_s,
            usable_s - max(now_s, step_ends_s) - MODEL.a - new.work_s - overtaking_s,
        ]
    after = list(loads)
    if tpot_s < inf:
        pace_s = max(tpot_s, MODEL.a + own_s)
        after.append(Load(new.due_s + tpot_s, own_s, pace_s))
        paces = [load.pace_s for load in after]
        margins.append(tpot_s * usable - MODEL.a - own_s)
        margins.append(
            usable - MODEL.a / min(paces) - sum(load.own_s / load.pace_s for load in after)
        )
    # In the order in which they are served: of equal deadlines, the one that came first.
    done_s = 0.0
    for later in sorted(queue, key=lambda each: each.due_s):
        done_s += later.work_s
        if not new.due_s < later.due_s < inf:
            continue
        if capacity(loads, begun_s, later.due_s) < done_s:
            continue  # It is late already, and forbids nothing.
        # Others are left the head-room that they were tested with themselves.
        later_s = later.due_s - headroom * max(0.0, later.due_s - now_s)
        more_s = capacity(loads, begun_s, later.due_s) - capacity(after, begun_s, later.due_s)
        left_s = capacity(loads, begun_s, later_s) - more_s - done_s
        margins.append(left_s - new.work_s - overtaking_s)
    return min(margins)


SLOS = [SLO(ttft_s=t, tpot_s=p) for t in (0.25, 0.5, 2.0, None) for p in (0.03125, 0.0625, 0.125)]
SLOS += [SLO(ttft_s=t) for t in (0.25, 0.5, 2.0)]
slos = st.sampled_from(SLOS)
tokens = st.integers(2, 4_000)


@settings(max_examples=examples(200))
@given(
    waiting=st.lists(st.tuples(slos, tokens, st.integers(0, 8)), max_size=8),
    decoding=st.lists(st.tuples(slos, tokens, st.integers(1, 40)), max_size=8),
    slo=slos,
    prompt=tokens,
    gone_s=st.sampled_from([0.0, 0.01, 0.1]),
    headroom=st.sampled_from([0.0, 0.1]),
    overtaking_s=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_it_promises_what_the_definition_allows(
    waiting: list[tuple[SLO, int, int]],
    decoding: list[tuple[SLO, int, int]],
    slo: SLO,
    prompt: int,
    gone_s: float,
    headroom: float,
    overtaking_s: float,
) -> None:
    rows, queue, loads = [], [], []
    for own, size, eighths in waiting:
        arrival_s = -eighths / 8
        rows.append(row(own, size, arrival_s=arrival_s))
        due_s, tpot_s = arrival_s + own.columns[0], own.columns[1]
        queue.append(Prefill(due_s, MODEL.work_s(size, 0)))
        if tpot_s < inf:
            loads.append(load_of(max(0.0, due_s + tpot_s), size, tpot_s))
    for own, size, emitted in decoding:
        rows.append(row(own, size, emitted=emitted, arrival_s=-1.0, first_token_s=-1.0))
        if own.columns[1] < inf:
            due_s = -1.0 + min(own.columns[0], 0.0) + emitted * own.columns[1]
            loads.append(load_of(max(0.0, due_s), size + emitted - 1, own.columns[1]))
    fleet = fleet_of(report(*rows, latency=MODEL, free_blocks=1_000_000))
    of = fleet.figures[0]
    query = RouteQuery(99, slo, prompt)
    margin = margin_s(
        queue,
        loads,
        float(of[figure.BEGUN_S]),
        float(of[figure.STEP_ENDS_S]),
        gone_s,
        Prefill(gone_s + slo.columns[0], MODEL.work_s(prompt, 0)),
        MODEL.work_s(1, prompt),
        slo.columns[1],
        headroom,
        overtaking_s if rows else 0.0,
    )
    assume(abs(margin) > SLIP_S)
    promises = make_policy("moore_hodgson", {"headroom": headroom}).promises(
        job(fleet, query, gone_s)._replace(overtaking_s=overtaking_s), fleet
    )
    assert bool(promises.holds[0]) == (margin > 0)
    if not promises.holds[0]:
        assert promises.wait_s[0] > 0


class Promise(NamedTuple):
    """A promise: when it was made, its prefill and its decode after that."""

    made_s: float
    prefill: Prefill
    load: Load | None


def ends(promises: list[Promise]) -> list[float]:
    """When each prefill ends on a fluid server that takes the earliest deadline first, knows a
    request from its promise on, holds every decode from its deadline on, and takes the fixed time
    of a step whenever it begins anew."""
    left = [each.prefill.work_s for each in promises]
    done = [inf] * len(promises)
    times = sorted({each.made_s for each in promises})
    loads = [each.load for each in promises if each.load is not None]
    times += [load.due_s for load in loads]
    now_s, debt_s, idle = times[0], 0.0, True
    while min(done, default=0.0) == inf or inf in done:
        ready = [i for i, each in enumerate(promises) if each.made_s <= now_s and left[i] > 0]
        begun = [load for load in loads if load.due_s <= now_s]
        paces = [load.pace_s for load in begun]
        rate = 1 - sum(load.own_s / load.pace_s for load in begun)
        rate -= MODEL.a / min(paces) if paces else 0.0
        coming_s = min((t for t in times if t > now_s), default=inf)
        if not ready:
            idle, now_s = True, coming_s
            continue
        if idle:
            idle, debt_s = False, MODEL.a
        first = min(ready, key=lambda i: promises[i].prefill.due_s)
        need_s = debt_s + left[first]
        assert rate > 0
        step_s = min(coming_s - now_s, need_s / rate)
        spent_s = step_s * rate
        now_s += step_s
        if spent_s >= need_s - 1e-12:
            left[first], debt_s, done[first] = 0.0, 0.0, now_s
        else:
            paid_s = min(debt_s, spent_s)
            debt_s -= paid_s
            left[first] -= spent_s - paid_s
    return done


PROMISE_ONLY = frozenset({Tier.GUARANTEED})


@settings(max_examples=examples(150))
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.7]),
            st.sampled_from(
                [SLO(ttft_s=t, tpot_s=p) for t in (0.2, 0.5, 1.5) for p in (0.05, None)]
            ),
            tokens,
        ),
        min_size=2,
        max_size=25,
    )
)
@example(  # The first is done, and due last: the others are not done with it.
    [
        (0.0, SLO(ttft_s=1.5, tpot_s=0.05), 2),
        (0.02, SLO(ttft_s=0.5, tpot_s=0.05), 2577),
        (0.0, SLO(ttft_s=0.2), 99),
        (0.02, SLO(ttft_s=0.2), 99),
        (0.02, SLO(ttft_s=0.2), 1879),
        (0.0, SLO(ttft_s=0.2, tpot_s=0.05), 2),
    ]
)
def test_a_fluid_server_keeps_every_promise_that_was_made_between_two_reports(
    asked: list[tuple[float, SLO, int]],
) -> None:
    fleet = Fleet(FleetSettings(aged_after_s=1e9, stale_after_s=1e9, reservation_ttl_s=1e9))
    fleet.report("0", report(latency=MODEL, free_blocks=1_000_000), 0.0)
    placer = Placer(
        fleet, make_routing("round_robin"), make_policy("moore_hodgson", {"headroom": 0})
    )
    now_s, promises = 0.0, []
    for key, (after_s, slo, prompt) in enumerate(asked):
        now_s += after_s
        query = RouteQuery(key + 1, slo, prompt, tiers=PROMISE_ONLY, output_tokens=100)
        if placer.place(query, now_s).replica_id is None:
            continue
        due_s, tpot_s = now_s + slo.columns[0], slo.columns[1]
        load = load_of(due_s + tpot_s, prompt, tpot_s) if tpot_s < inf else None
        promises.append(Promise(now_s, Prefill(due_s, MODEL.work_s(prompt, 0)), load))
    for promise, end_s in zip(promises, ends(promises) if promises else [], strict=True):
        assert end_s <= promise.prefill.due_s + 1e-6


def promise(fleet: Fleet, query: RouteQuery) -> Promises:
    return make_policy("moore_hodgson").promises(job(fleet, query), fleet)


def test_an_earlier_deadline_is_no_harder_for_others_than_their_own() -> None:
    # Half of each second goes to decodes.
    slo = SLO(ttft_s=0.1, tpot_s=0.1)
    decodes = [row(slo, 1_999, key=key, emitted=1, first_token_s=0.0) for key in range(20)]
    fleet = fleet_of(report(*decodes, latency=MODEL, free_blocks=1_000_000))
    placer = Placer(fleet, make_routing("round_robin"), make_policy("moore_hodgson"))
    key = 100
    while placer.place(RouteQuery(key, SLO(ttft_s=10.0), 1_000, tiers=PROMISE_ONLY), 0.0).tier:
        key += 1
    assert key > 110
    # There is room for a short one by the end, and nothing else is due before.
    for ttft_s in (10.0, 5.0, 1.0):
        assert promise(fleet, RouteQuery(1, SLO(ttft_s=ttft_s), 10)).holds.all()


def test_a_promise_that_an_idle_replica_could_not_keep_has_no_wait() -> None:
    idle = fleet_of(report(latency=MODEL))
    # 0.4 s of prefill within 0.2 s, and a step of 10 ms for tokens every 5 ms.
    for slo in (SLO(ttft_s=0.2), SLO(ttft_s=1.0, tpot_s=0.005)):
        made = promise(idle, RouteQuery(1, slo, 4_000))
        assert (made.holds.tolist(), made.wait_s.tolist()) == ([False], [inf])
    # Nor has a prompt that the memory of no replica holds, or one at a replica without a place.
    nowhere = fleet_of(report(latency=MODEL, places=0))
    for fleet, prompt in ((nowhere, 100), (idle, 400_000)):
        made = promise(fleet, RouteQuery(1, SLO(ttft_s=1e6), prompt))
        assert (made.holds.tolist(), made.wait_s.tolist()) == ([False], [inf])


def test_the_wait_is_the_time_in_which_the_work_that_is_too_much_gets_done() -> None:
    slo = SLO(ttft_s=1.0)
    # 0.9 s of work, a request of 0.3 s: of 0.99 s it is 0.21 s too much.
    queue = [row(slo, 3_000, key=key) for key in range(3)]
    fleet = fleet_of(report(*queue, latency=MODEL, free_blocks=10_000))
    made = make_policy("moore_hodgson", {"headroom": 0}).promises(
        job(fleet, RouteQuery(9, slo, 3_000)), fleet
    )
    assert not made.holds[0]
    work_s = MODEL.work_s(3_000, 0)
    assert made.wait_s[0] == pytest.approx(4 * work_s - 0.99)


def test_decodes_that_end_soon_free_what_they_hold_and_no_more() -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    ending = [
        row(slo, 1_599, key=key, emitted=2, expected=3, first_token_s=0.0) for key in range(4)
    ]
    fleet = fleet_of(report(*ending, latency=MODEL, free_blocks=10))
    # Each holds 100 blocks. Within 5 s all 400 come free, and there are 10.
    assert fleet.figures[0, figure.BLOCKS_PER_S] * figure.FREED_WITHIN_S <= 400
    fits = RouteQuery(9, SLO(ttft_s=6.0), 16 * 380)
    assert promise(fleet, fits).holds.all()
    assert not promise(fleet, fits._replace(prompt_tokens=16 * 450)).holds.any()


def test_a_running_prefill_takes_one_place() -> None:
    slo = SLO(ttft_s=10.0)
    one = row(slo, 100, computed=50, running=True)
    query = RouteQuery(9, slo, 100)
    assert promise(fleet_of(report(one, places=2)), query).holds.all()
    assert not promise(fleet_of(report(one, places=1)), query).holds.any()


def test_best_effort_requests_hold_neither_blocks_nor_places_that_count() -> None:
    slo = SLO(ttft_s=1.0)
    lent = row(slo, 1_600, emitted=5, best_effort=True, first_token_s=0.0)
    query = RouteQuery(9, slo, 800)
    fleet = fleet_of(report(lent, places=1, free_blocks=0))
    assert promise(fleet, query).holds.all()
    mine = row(slo, 1_600, emitted=5, first_token_s=0.0)
    assert not promise(fleet_of(report(mine, places=1, free_blocks=0)), query).holds.any()


def test_a_short_prompt_does_not_wait_for_a_step_that_can_be_preempted() -> None:
    long = row(SLO(ttft_s=60.0), 20_000, running=True)
    query = RouteQuery(9, SLO(ttft_s=0.2), 500)
    assert not promise(fleet_of(report(long, latency=MODEL)), query).holds.any()
    assert promise(fleet_of(report(long, latency=MODEL, preempts=True)), query).holds.all()
    # What is due no later is not preempted.
    urgent = row(SLO(ttft_s=0.1), 2_000, running=True)
    fleet = fleet_of(report(urgent, latency=MODEL, preempts=True))
    assert not promise(fleet, query).holds.any()


def test_a_pace_is_not_promised_that_the_stops_before_steps_leave_no_time_for() -> None:
    """Steps of 10 ms of decodes beside prefills that need up to 20 ms to stop for each."""
    stops = report(latency=MODEL, preempts=True)._replace(planned_stop_s=0.02)
    tight, loose = (RouteQuery(9, SLO(ttft_s=1.0, tpot_s=tpot_s), 500) for tpot_s in (0.03, 0.1))
    assert promise(fleet_of(report(latency=MODEL, preempts=True)), tight).holds.all()
    found = promise(fleet_of(stops), tight)
    assert not found.holds.any()
    assert found.wait_s[0] == inf
    assert found.binds[0] == Constraint.TPOT
    assert promise(fleet_of(stops), loose).holds.all()
    # Beside others that fill the rest of the tightest pace it has to wait.
    many = [
        row(SLO(ttft_s=1.0, tpot_s=0.05), 5_000, key=key, emitted=5, first_token_s=0.0)
        for key in range(3)
    ]
    assert promise(fleet_of(report(*many, latency=MODEL, preempts=True)), loose).holds.all()
    found = promise(fleet_of(stops._replace(rows=np.array(many))), loose)
    assert not found.holds.any()
    assert found.wait_s[0] < inf


def test_a_promised_prefill_has_no_decode_that_its_own_stops_could_delay() -> None:
    """Stops of 40 ms are those of the longest prefill. Its tight TPOT begins when it has ended."""
    long, other = (
        row(SLO(ttft_s=30.0, tpot_s=0.035), tokens, key=key)
        for key, tokens in ((1, 6_000), (2, 5_000))
    )
    short = RouteQuery(9, SLO(ttft_s=0.9, tpot_s=0.2), 100)
    stops = report(latency=MODEL, preempts=True)._replace(planned_stop_s=0.04)
    for rows, holds in (([long], True), ([long, other], False), ([other, long], False)):
        fleet = fleet_of(stops._replace(rows=np.array(rows)))
        assert promise(fleet, short).holds.all() == holds
    decode = row(SLO(ttft_s=1.0, tpot_s=0.035), 500, key=2, emitted=5, first_token_s=0.0)
    fleet = fleet_of(stops._replace(rows=np.array([long, decode])))
    assert not promise(fleet, short).holds.any()


def test_a_prefill_replica_promises_first_tokens_however_long_stops_take() -> None:
    fleet = fleet_of(report(latency=MODEL, preempts=True)._replace(planned_stop_s=0.5))
    assert promise(fleet, RouteQuery(9, SLO(ttft_s=0.2), 500)).holds.all()


jobs = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(0, 40)), min_size=0, max_size=8
)


def columns(rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sizes, weights and capacities of jobs, by capacity."""
    table = np.array(sorted(rows, key=lambda row: row[2]), dtype=np.float64).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def feasible(size: np.ndarray, capacity: np.ndarray, chosen: list[int]) -> bool:
    return bool((np.cumsum(size[chosen]) <= capacity[chosen]).all())


def test_the_fewest_jobs_are_late() -> None:
    # With all six in order of deadline the third is the first to be late; the longest up to it,
    # 10, goes. Then the fifth is late, and 8 goes. Four of six are on time.
    size = np.array([10.0, 3.0, 4.0, 8.0, 10.0, 6.0])
    due = np.array([15.0, 6.0, 9.0, 23.0, 20.0, 30.0])
    order = np.argsort(due)
    kept = keep(size[order], np.ones(6), due[order])
    assert size[order][kept].tolist() == [3.0, 4.0, 8.0, 6.0]


@given(jobs)
def test_the_kept_fit_their_capacities_and_with_equal_weights_none_could_be_more(
    rows: list[tuple[int, int, int]],
) -> None:
    size, weight, capacity = columns(rows)
    for weights in (weight, np.ones(len(size))):
        kept = np.flatnonzero(keep(size, weights, capacity)).tolist()
        assert feasible(size, capacity, kept)
    best = max(
        len(chosen)
        for count in range(len(size) + 1)
        for chosen in combinations(range(len(size)), count)
        if feasible(size, capacity, list(chosen))
    )
    assert len(kept) == best


def test_the_job_of_least_weight_per_size_goes() -> None:
    size, due = np.array([4.0, 4.0]), np.array([4.0, 6.0])
    assert keep(size, np.array([1.0, 2.0]), due).tolist() == [False, True]
    assert keep(size, np.array([2.0, 1.0]), due).tolist() == [True, False]


def test_a_job_that_could_never_be_on_time_costs_no_other_its_place() -> None:
    kept = keep(np.array([3.0, 50.0]), np.array([1.0, 1000.0]), np.array([5.0, 40.0]))
    assert kept.tolist() == [True, False]


@given(st.lists(st.floats(0, 10), max_size=10), st.floats(-5, 30))
def test_what_fits_in_turn_stays_within_the_room_and_skips_only_what_does_not(
    sizes: list[float], room: float
) -> None:
    taken = fitting(np.array(sizes), room)
    left = room
    for size, has in zip(sizes, taken, strict=True):
        assert has == (size <= left)
        left -= size if has else 0.0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=12),
    st.lists(st.integers(0, 10), max_size=8),
)
def test_late_jobs_go_as_far_to_the_front_as_makes_no_other_late(
    jobs: list[tuple[int, int]], late: list[int]
) -> None:
    size = np.array([float(work) for work, _ in jobs])
    room = np.cumsum(size) + np.cumsum([float(slack) for _, slack in jobs])
    places = before(size, room, np.array(late, np.float64))
    for number, place in enumerate(places.tolist()):
        so_far = [(places[other], late[other]) for other in range(number + 1)]

        def is_held(
            moved: int, so_far: list[tuple[int, int]] = so_far, number: int = number
        ) -> bool:
            ahead = [*so_far[:number], (moved, late[number])]
            done = [
                size[: job + 1].sum() + sum(work for at, work in ahead if at <= job)
                for job in range(len(size))
            ]
            return bool((np.array(done) <= room + 1e-9).all())

        assert is_held(place)
        assert place == 0 or not is_held(place - 1) or late[number] == 0
