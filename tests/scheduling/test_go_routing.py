"""GoRouting, by worked examples and against Algorithm 2 in plain Python."""

import random
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling import batching
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.local_orders import ARRIVAL, BY_PRIORITY, DEADLINE, SHORTEST, SLIDE
from sluice.scheduling.fleet.report import Reservation
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import POLICIES, RouteQuery, make_policy
from sluice.scheduling.routing.base import Job
from sluice.scheduling.routing.go_routing import gains
from tests.scheduling.fleets import fleet_of, job, report, row

SOON = SLO(ttft_s=0.5)
LATER = SLO(ttft_s=10.0)


def ask(ttft_s: float = 1.0, prompt: int = 1_000, priority: int = 1) -> RouteQuery:
    return RouteQuery(7, SLO(ttft_s=ttft_s, priority=priority), prompt)


def choose(fleet: Fleet, query: RouteQuery, now_s: float = 0.0, **options: object) -> int:
    return make_policy("go_routing", options).choose(job(fleet, query, now_s), fleet)


def waiting(prompt: int, slo: SLO = LATER) -> np.ndarray:
    return row(slo, prompt)


# A prompt of 1,000 tokens takes 0.101 s on these replicas.


def test_the_idlest_of_the_lightly_loaded_is_taken() -> None:
    fleet = fleet_of(report(waiting(900)), report(waiting(500)), report(waiting(5_000)))
    assert choose(fleet, ask(), mu=0.1) == 1


def test_else_the_fullest_that_stays_below_lambda() -> None:
    fleet = fleet_of(report(waiting(2_000)), report(waiting(3_000)), report(waiting(5_000)))
    # With the request they take about 0.3, 0.4 and 0.6 s of 1 s.
    assert choose(fleet, ask(), mu=0.1, **{"lambda": 0.5}) == 1
    assert choose(fleet, ask(), mu=0.1, **{"lambda": 0.9}) == 2
    assert choose(fleet, ask(), mu=0.1, **{"lambda": 0.35}) == 0


def test_else_the_idlest_candidate() -> None:
    fleet = fleet_of(report(waiting(3_000)), report(waiting(2_000)))
    assert choose(fleet, ask(), mu=0.0, **{"lambda": 0.1}) == 1


def test_only_replicas_that_gain_about_the_most_are_candidates() -> None:
    # At the first the request, of more worth per second, makes the one that waits late: 3 - 1. At
    # the second everything is on time, but there is more to do. No queue stays below lambda.
    fleet = fleet_of(report(waiting(2_970, SOON)), report(waiting(3_960)))
    query = ask(0.55, 2_970, priority=3)
    assert choose(fleet, query, mu=0.1, alpha=0.9) == 1
    assert choose(fleet, query, mu=0.1, alpha=0.6) == 0


def test_where_it_adds_no_gain_the_idlest_is_taken_or_any() -> None:
    fleet = fleet_of(report(waiting(3_000)), report(waiting(2_000)), report(waiting(4_000)))
    late = ask(0.05)
    assert choose(fleet, late) == 1
    policy = make_policy("go_routing", {"fallback": "random", "seed": 1})
    assert {policy.choose(job(fleet, late), fleet) for _ in range(50)} == {0, 1, 2}


def test_what_a_replica_has_worked_since_its_last_step_is_subtracted() -> None:
    fleet = fleet_of(report(waiting(4_000)), report(waiting(3_000), made_s=0.2))
    # At 0.2 s the first has 0.4 - 0.2 s left, the second 0.3 s.
    assert choose(fleet, ask(), now_s=0.2, mu=1.0, **{"lambda": 1.0}) == 0
    assert choose(fleet, ask(), now_s=0.0, mu=1.0, **{"lambda": 1.0}) == 1


def test_what_nobody_has_reported_yet_counts_in_full() -> None:
    fleet = fleet_of(report(), report(waiting(1_000), made_s=0.3))
    fleet.reserve(1, reservation("0", 3_000, 1.0))
    assert choose(fleet, ask(), now_s=0.3, mu=1.0, **{"lambda": 1.0}) == 1


def gains_of(asked: Job, fleet: Fleet, own: bool = False) -> tuple[Floats, Floats, Floats]:
    found: tuple[Floats, Floats, Floats] = gains(fleet.arrays, asked[1:], 1.0, own)
    return found


def test_decodes_lengthen_a_queue() -> None:
    decodes = [
        row(SLO(ttft_s=1.0, tpot_s=0.1), 2_000, emitted=1, first_token_s=0.0) for _ in range(20)
    ]
    fleet = fleet_of(report(waiting(1_000), *decodes), report(waiting(1_100)))
    assert choose(fleet, ask(), mu=1.0, **{"lambda": 1.0}) == 1
    exec_s, _, _ = gains_of(job(fleet, ask()), fleet)
    # Of each 0.1 s 0.01 s are fixed, and 20 decodes take 2.1 ms each.
    assert exec_s[0] == pytest.approx(0.101 * 0.1 / (0.1 - 0.01 - 20 * 0.0021), rel=0.01)


def test_a_long_queue_takes_as_long_as_its_batches_beside_the_decodes() -> None:
    decodes = [
        row(SLO(ttft_s=1.0, tpot_s=0.1), 2_000, emitted=1, first_token_s=0.0) for _ in range(20)
    ]
    waits = [row(LATER, 1_000, key=key) for key in range(10)]
    fleet = fleet_of(report(*waits, *decodes))
    # Batch by batch: what is left of 0.1 s beside the fixed time and the decodes goes to prefill.
    left_s, batches = 10 * 0.101, 0
    while left_s > 0:
        left_s -= 0.1 - 0.01 - 20 * 0.0021
        batches += 1
    exec_s, _, _ = gains_of(job(fleet, ask()), fleet)
    assert exec_s[0] == pytest.approx(0.1 * batches, abs=0.1)


def test_the_tpots_of_the_queue_bound_its_batches_before_and_after() -> None:
    chat = SLO(ttft_s=10.0, tpot_s=0.02)
    fleet = fleet_of(report(*[row(chat, 1_000, key=key) for key in range(4)]))
    # No decode runs yet, but those of the queue will: half of each 0.02 s is fixed.
    exec_s, with_s, _ = gains_of(job(fleet, RouteQuery(7, chat, 1_000)), fleet)
    assert exec_s[0] == pytest.approx(4 * 0.101 * 2, rel=0.01)
    assert with_s[0] == pytest.approx(5 * 0.101 * 2, rel=0.01)
    # One that no batch can hold does not count, as among decodes.
    never = SLO(ttft_s=10.0, tpot_s=0.001)
    other = fleet_of(report(row(never, 1_000)))
    assert gains_of(job(other, ask()), other)[0][0] == pytest.approx(0.101, rel=0.01)


def test_the_order_is_that_of_the_policy_that_runs_at_the_replica() -> None:
    # One of 2,000 tokens is due by 0.32 s, the new one of 1,000 by 0.29 s: together they take 0.31.
    waits = waiting(2_000, SLO(ttft_s=0.32))
    for order, usual, high in (
        # By density, deadline or length the new one goes first, and both are on time.
        (SLIDE, 1, 2),
        (DEADLINE, 1, 2),
        (SHORTEST, 1, 2),
        # By arrival it is late, and with a higher priority it goes first.
        (ARRIVAL, 0, 0),
        (BY_PRIORITY, 0, 2),
    ):
        fleet = fleet_of(report(waits, local_order=order))
        for priority, gain in ((1, usual), (2, high)):
            query = ask(0.29, 1_000, priority)
            asked = job(fleet, query)
            assert gains_of(asked, fleet, own=True)[2] == [gain], (order, priority)
            # The default router assumes the same of all.
            assert gains_of(asked, fleet)[2] == [priority]


def test_a_local_policy_states_its_order() -> None:
    assert batching.POLICIES["fcfs"].local_order == ARRIVAL
    assert batching.POLICIES["deadline_triage"].local_order == SLIDE
    with pytest.raises(TypeError, match="Silent must state `local_order`"):
        type("Silent", (batching.BatchPolicy,), {"name": "silent", "source": "a test"})


def test_best_effort_requests_that_become_late_are_a_loss() -> None:
    lent = row(SLO(ttft_s=0.25, priority=2), 2_000, best_effort=True)
    fleet = fleet_of(report(lent), report(waiting(3_000)))
    # At the first it would be served at once, but one of priority 2 would end at 0.3 s.
    query = ask(1.0, 1_000, priority=1)
    _, _, guaranteed = gains_of(job(fleet, query), fleet)
    exec_s, _, both = gains_of(job(fleet, query), fleet, own=True)
    assert guaranteed.tolist() == [1, 1]
    assert both.tolist() == [-1, 1]
    assert exec_s[0] == 0, "it yields, so it does not delay"
    assert choose(fleet, query) == 1
    # One on its way counts like one reported.
    apart = fleet_of(report(), report(waiting(3_000)))
    apart.reserve(1, reservation("0", 2_000, 0.25)._replace(promised=False, priority=2))
    assert choose(apart, query) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_of_decode_replicas_the_one_with_most_free_blocks_goes_on(name: str) -> None:
    fleet = fleet_of(report(free_blocks=100), report(free_blocks=300), report(free_blocks=200))
    moved = job(fleet)._replace(moved=True)
    policy = make_policy(name)
    assert policy.choose_decode(moved, fleet) == 1
    fleet.reserve(1, reservation("1", 1, 1.0)._replace(kv_tokens=16 * 150))
    assert policy.choose_decode(moved, fleet) == 2


def test_a_prefill_replica_is_weighed_without_decodes_and_by_its_own_deadline() -> None:
    fleet = fleet_of(report(waiting(1_000)), report(waiting(1_000)))
    asked = job(fleet, ask(0.6, 1_000))
    prompt = np.array([False, True])
    # In a batch each: 0.111 s of the queue, and as much more; beside decodes a batch every 0.1 s.
    exec_s, with_s, delta = gains_of(asked._replace(splits=prompt), fleet)
    assert exec_s[1] == pytest.approx(0.111, rel=0.01)
    assert with_s[1] == pytest.approx(0.222, rel=0.01)
    assert exec_s[0] != exec_s[1]
    assert delta.tolist() == [1, 1]
    # It is due 0.1 s after now there, which is too early, and the other one takes it.
    early = asked._replace(splits=prompt, lead_s=np.array([0.0, 0.5]))
    assert gains_of(early, fleet)[2].tolist() == [1, 0]
    for name in ("go_routing", "most_gain"):
        assert make_policy(name).choose(early, fleet) == 0


def test_mu_is_not_above_lambda() -> None:
    with pytest.raises(ValueError, match="mu must not be above lambda"):
        make_policy("go_routing", {"mu": 0.6})


def test_most_gain_is_the_same_without_packing() -> None:
    fleet = fleet_of(report(waiting(2_970, SOON)), report(waiting(3_960)), report(waiting(4_500)))
    policy = make_policy("most_gain")
    # The first is done first, but there one of less worth would be late.
    assert policy.choose(job(fleet, ask(0.55, 2_970, priority=3)), fleet) == 1
    assert (
        make_policy("most_gain", {"alpha": 0.6}).choose(
            job(fleet, ask(0.55, 2_970, priority=3)), fleet
        )
        == 0
    )
    # Nothing is late, or everything: the shortest queue, not the fullest.
    assert policy.choose(job(fleet, ask(2.0, 100)), fleet) == 0
    assert policy.choose(job(fleet, ask(0.01, 100)), fleet) == 0
    # The time to the first token elsewhere counts as its own.
    even = fleet_of(report(waiting(1_000)), report(waiting(1_010)))
    both = np.ones(2, bool)
    later = job(even, ask(2.0, 100))._replace(splits=both, lead_s=np.array([0.1, 0.05]))
    assert policy.choose(later, even) == 1


def test_most_gain_counts_the_seconds_of_the_request_itself() -> None:
    fast = LinearLatency(a=0.005, b=0.000_05, c=0.000_000_5)
    fleet = fleet_of(report(waiting(1_000)), report(waiting(2_500), latency=fast))
    assert make_policy("most_gain").choose(job(fleet, ask(5.0, 2_000)), fleet) == 1
    assert make_policy("most_gain").choose(job(fleet, ask(5.0, 100)), fleet) == 0


def reservation(replica: str, tokens: float, due_s: float) -> Reservation:
    return Reservation(replica, 0.0, True, tokens, 0, tokens, due_s, inf, 1, 10)


# Algorithm 2, literally.

Prefill = tuple[float, float, float]
"""Time until it is due, work, priority."""


def queue_time(
    queue: list[Prefill], of: np.ndarray, now_s: float, tpot_s: float, alone: bool
) -> tuple[float, float, float, float]:
    fixed_s = of[figure.FIXED_S]
    reported = of[figure.WAITING] + of[figure.RUNNING] > 0
    elapsed_s = max(0.0, now_s - of[figure.BEGUN_S]) if reported else 0.0
    work_s = sum(work for _, work, _ in queue)
    if alone:
        return work_s + len(queue) * fixed_s - elapsed_s, 1.0, fixed_s, -elapsed_s
    hopeful = [remain for remain, work, _ in queue if remain >= fixed_s + work]
    paces_s = (of[figure.PACE_S], of[figure.QUEUE_PACE_S], tpot_s)
    budget_s = max(min([*paces_s, *hopeful]), 2 * fixed_s)
    stretch = 1 / max(0.05, 1 - fixed_s / budget_s - of[figure.DECODE_SHARES])
    return stretch * work_s - elapsed_s, stretch, 0.0, -elapsed_s


def estimate_gain(
    queue: list[Prefill], takes: tuple[float, float, float, float], gamma: float
) -> float:
    boundary_s = gamma * max(0.0, takes[0])
    urgent = [prefill for prefill in queue if prefill[0] < boundary_s]
    normal = [prefill for prefill in queue if prefill[0] >= boundary_s]
    urgent.sort(key=lambda prefill: -prefill[2] / prefill[1])
    normal.sort(key=lambda prefill: prefill[0])
    gain, ends_s = 0.0, takes[3]
    for remain, work, worth in urgent + normal:
        ends_s += takes[1] * work + takes[2]
        gain += worth if max(0.0, ends_s) <= remain else 0.0
    return gain


def algorithm_2(
    request: Job, fleet: Fleet, alpha: float, mu: float, heavy: float, gamma: float, alone: bool
) -> int:
    exec_s, with_s, delta = [], [], []
    _, tpot_s, _, priority = request.query.slo.columns
    for place, at in enumerate(request.rows):
        of, first = fleet.figures[at], fleet.starts[at]
        entries = fleet.prefills[first : first + int(of[figure.QUEUED])]
        queue = [
            (
                entry[figure.PREFILL_DUE_S] - request.now_s,
                entry[figure.WORK_S],
                entry[figure.PRIORITY],
            )
            for entry in entries
        ]
        more = [*queue, (request.due_s - request.now_s, request.work_s[place], priority)]
        before = queue_time(queue, of, request.now_s, inf, alone)
        after = queue_time(more, of, request.now_s, tpot_s, alone)
        exec_s.append(max(0.0, before[0]))
        with_s.append(max(0.0, after[0]))
        delta.append(estimate_gain(more, after, gamma) - estimate_gain(queue, before, gamma))
    everyone = list(range(len(exec_s)))
    if max(delta) <= 0:
        return min(everyone, key=exec_s.__getitem__)
    ttft_s = request.query.slo.columns[0]
    candidates = [p for p in everyone if delta[p] >= alpha * max(delta)]
    light = [p for p in candidates if exec_s[p] < mu * ttft_s]
    if light:
        return min(light, key=exec_s.__getitem__)
    room = [p for p in candidates if with_s[p] <= heavy * ttft_s]
    if room:
        return max(room, key=exec_s.__getitem__)
    return min(candidates, key=exec_s.__getitem__)


def random_replica(rng: random.Random) -> list[np.ndarray]:
    """Some prefills, some of them late or computed in part, and decodes."""
    rows = []
    for _ in range(rng.choice((0, 1, 3, 12))):
        slo = SLO(
            ttft_s=rng.choice((None, rng.uniform(0.2, 3.0))),
            tpot_s=rng.choice((None, rng.uniform(0.01, 0.2))),
            priority=rng.randint(1, 3),
        )
        prompt = rng.randint(10, 4_000)
        arrival_s = -rng.uniform(0, 1)
        if rng.random() < 0.3:
            made = row(slo, prompt, arrival_s=arrival_s, emitted=3, first_token_s=arrival_s)
        else:
            made = row(slo, prompt, arrival_s=arrival_s, computed=rng.choice((0, prompt // 2)))
        rows.append(made)
    return rows


def random_fleet(rng: random.Random) -> Fleet:
    replicas = rng.randint(1, 6)
    latency = LinearLatency(a=rng.uniform(0.001, 0.03), b=rng.uniform(1e-5, 2e-4), c=1e-7)
    fleet = fleet_of(*(report(*random_replica(rng), latency=latency) for _ in range(replicas)))
    for key in range(rng.randint(0, 4)):
        made = reservation(str(rng.randrange(replicas)), rng.randint(10, 3_000), rng.uniform(0, 2))
        fleet.reserve(key, made)
    return fleet


def random_ask(rng: random.Random) -> RouteQuery:
    slo = SLO(
        ttft_s=rng.uniform(0.1, 3.0),
        tpot_s=rng.choice((None, rng.uniform(0.02, 0.2))),
        priority=rng.randint(1, 3),
    )
    return RouteQuery(7, slo, rng.randint(10, 4_000))


# Drawn by a seed and not by hypothesis itself: round numbers would meet in ties that rounding
# decides.
@given(st.integers(0, 2**32))
def test_it_is_algorithm_2(seed: int) -> None:
    rng = random.Random(seed)
    fleet = random_fleet(rng)
    request = job(fleet, random_ask(rng), now_s=rng.uniform(0, 0.3))
    mu, heavy = sorted((rng.random(), rng.random()))
    alpha, gamma = rng.uniform(0.1, 1), rng.choice((0.0, 0.5, 1.0, 3.0))
    alone = rng.random() < 0.5
    request = request._replace(splits=np.full(len(request.rows), alone))
    options = {"alpha": alpha, "mu": mu, "lambda": heavy, "gamma": gamma}
    policy = make_policy("go_routing", options)
    expected = algorithm_2(request, fleet, alpha, mu, heavy, gamma, alone)
    assert policy.choose(request, fleet) == expected


@given(st.integers(0, 2**32))
def test_nothing_is_packed_beyond_lambda_while_another_candidate_is_left(seed: int) -> None:
    rng = random.Random(seed)
    fleet = random_fleet(rng)
    request = job(fleet, random_ask(rng))
    heavy = rng.uniform(0.1, 1)
    chosen = choose(fleet, request.query, mu=0.0, alpha=1.0, **{"lambda": heavy})
    exec_s, with_s, delta = gains_of(request, fleet)
    bound_s = heavy * request.query.slo.columns[0]
    if with_s[chosen] > bound_s and delta.max() > 0:
        assert (with_s[delta == delta.max()] > bound_s).all()
        assert exec_s[chosen] == exec_s[delta == delta.max()].min()
