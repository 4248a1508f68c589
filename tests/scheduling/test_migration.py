"""Which running streams move, and where they may go."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.placement.migration import (
    AT_ONCE,
    MAX_MOVES,
    MAX_PAUSE_S,
    REST_S,
    WORTH,
    RunningStream,
    streams_to_move,
)
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.job import STAYS, RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import make_policy as make_routing
from tests.examples import examples
from tests.scheduling.fleets import fleet_of, report, row

NOW_S = 100.0

STREAMS = st.builds(
    RunningStream,
    left_tokens=st.one_of(st.just(inf), st.floats(1, 10_000)),
    token_s=st.floats(0, 1),
    tpot_s=st.one_of(st.just(inf), st.floats(0.001, 1)),
    slack_s=st.floats(-10, 10),
    e2e_left_s=st.one_of(st.just(inf), st.floats(-10, 100)),
    recovers=st.booleans(),
    moves=st.integers(0, MAX_MOVES + 1),
    moved_s=st.one_of(st.just(-inf), st.floats(NOW_S - 2 * REST_S, NOW_S)),
)


@settings(max_examples=examples(200))
@given(st.lists(STREAMS, max_size=20), st.integers(0, 2 * AT_ONCE), st.booleans())
def test_a_bounded_number_moves_and_none_of_it_too_often(
    streams: list[RunningStream], under_way: int, leaves: bool
) -> None:
    chosen = streams_to_move(streams, under_way, NOW_S, leaves)
    assert len(set(chosen)) == len(chosen) <= max(0, AT_ONCE - under_way)
    for place in chosen:
        stream = streams[place]
        assert stream.moves < MAX_MOVES and NOW_S - stream.moved_s >= REST_S
        assert leaves or stream.late
    if leaves and len(chosen) < AT_ONCE - under_way:
        able = [s for s in streams if s.moves < MAX_MOVES and NOW_S - s.moved_s >= REST_S]
        assert len(chosen) == len(able), "a replica that leaves keeps none that may move"


@settings(max_examples=examples(200))
@given(st.lists(STREAMS, max_size=20))
def test_what_would_end_the_drain_or_be_late_first_moves_first(
    streams: list[RunningStream],
) -> None:
    left = [streams[place].left_s for place in streams_to_move(streams, -100, NOW_S, True)]
    assert left == sorted(left, reverse=True)
    slack = [streams[place].slack_s for place in streams_to_move(streams, -100, NOW_S, False)]
    assert slack == sorted(slack)


@settings(max_examples=examples(200))
@given(STREAMS)
def test_the_terms_of_a_move_keep_the_objective(stream: RunningStream) -> None:
    terms = stream.terms
    if terms is None:
        assert not stream.late
        return
    assert 0.0 < terms.pause_s <= MAX_PAUSE_S and 0.0 <= terms.tpot_s <= stream.tpot_s
    if stream.recovers and stream.left_tokens < inf:
        taken_s = terms.pause_s + stream.left_tokens * terms.tpot_s
        assert taken_s <= stream.granted_s + 1e-6
    if not stream.recovers:
        assert terms == (min(stream.slack_s, MAX_PAUSE_S), stream.tpot_s), "no token comes late"
    if stream.late and stream.left_tokens < inf:
        assert stream.left_s > stream.granted_s, "it misses where it is"


def test_a_stream_at_its_pace_or_nearly_done_stays() -> None:
    slow = RunningStream(1_000, token_s=0.06, tpot_s=0.05, slack_s=1.0)
    assert slow.late
    assert not slow._replace(token_s=0.05).late, "at its pace"
    assert not slow._replace(left_tokens=99).late, "it ends before its slack is used up"
    assert not slow._replace(tpot_s=inf, slack_s=inf).late, "nothing is guaranteed"
    assert slow._replace(tpot_s=inf, slack_s=inf, e2e_left_s=59.0).late
    assert not slow._replace(tpot_s=inf, slack_s=inf, e2e_left_s=61.0).late
    assert slow.pays(transfer_s=60.0 / WORTH)
    assert not slow.pays(transfer_s=61.0 / WORTH)
    assert RunningStream(inf, 0.0).pays(1.0), "its pace is not known yet"


def test_a_stream_that_is_behind_needs_a_faster_pace_or_is_lost() -> None:
    behind = RunningStream(100, token_s=0.06, tpot_s=0.05, slack_s=-1.0)
    # 4 s are left for 100 tokens, of which the pause may take a tenth.
    assert behind.terms == pytest.approx((0.4, 0.036))
    assert behind.late
    assert behind._replace(recovers=False).terms is None, "that every token is in time is over"
    assert behind._replace(slack_s=-5.0).terms is None
    ahead = behind._replace(slack_s=1.0)
    assert ahead.terms == pytest.approx((1.0, 0.05)), "the pause takes what it is ahead by"
    assert ahead._replace(recovers=False).terms == (1.0, 0.05)


def placer_of(*reports: Report) -> Placer:
    """Decides for replicas ``"0"``, ``"1"``, and so on."""
    routing, admission = make_routing("least_tokens"), make_admission("moore_hodgson")
    return Placer(fleet_of(*reports), routing, admission)


def moving(**more: Any) -> RouteQuery:
    """A stream of 10,000 tokens that runs at the first replica."""
    slo = SLO(ttft_s=0.2, tpot_s=0.05)
    query = RouteQuery(1, slo, 10_000, 0.0, frozenset({Tier.GUARANTEED}), 100, moves_from="0")
    return query._replace(**{"brings_kv": True, **more})


def test_a_stream_with_its_kv_goes_where_its_prompt_would_take_too_long() -> None:
    """Computing 10,000 tokens takes a second, and 0.2 s are left; the transfer takes 55 ms."""
    assert placer_of(report(), report()).place(moving(brings_kv=False), 0.0).reason == STAYS
    moved = placer_of(report(), report()).place(moving(), 0.0)
    assert (moved.replica_id, moved.tier) == ("1", Tier.GUARANTEED)
    assert moved.kv_transfer_s == pytest.approx(0.055)
    slow = moving(slo=SLO(ttft_s=0.05, tpot_s=0.05))
    assert placer_of(report(), report()).place(slow, 0.0).reason == STAYS, "it would be late"


@pytest.mark.parametrize("tier", Tier)
def test_it_never_stays_at_its_replica_nor_goes_to_one_that_cannot_fetch(tier: Tier) -> None:
    query = moving(tiers=frozenset({tier}))
    assert placer_of(report()).place(query, 0.0).reason == STAYS
    assert placer_of(report(), report(role="prefill")).place(query, 0.0).reason == STAYS
    placed = placer_of(report(), report(role="prefill"), report(role="decode")).place(query, 0.0)
    assert (placed.replica_id, placed.tier) == ("2", tier)


def test_a_guaranteed_stream_never_goes_to_a_worse_place() -> None:
    """The other replica has no time left in each second for more decodes of this pace."""
    busy = [row(SLO(tpot_s=0.05), 100, key=key, emitted=5, first_token_s=0.0) for key in range(99)]
    full = report(*busy, latency=LinearLatency(a=0.019, b=0.000_1, c=0.0))
    fast = moving(slo=SLO(ttft_s=5.0, tpot_s=0.025))
    assert placer_of(report(), full).place(fast, 0.0).reason == STAYS
    assert placer_of(report(), report()).place(fast, 0.0).replica_id == "1"
