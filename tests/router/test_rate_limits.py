"""Rate limits: what a key may use, alone and over several routers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.controller.actor import Quotas
from sluice.protocol.messages import QuotaUse
from sluice.protocol.requests import ResponseHead, ResponseTail
from sluice.router.errors import ApiError, Reason
from sluice.router.tenancy.limits import ANYONE, NO_CHARGE, Client, RateLimiter, TenantLimits
from tests.router.far_side import Clock


def client(name: str = "acme", **caps: Any) -> Client:
    return Client(name, f"name-{name}", TenantLimits(**caps))


def refusal(limiter: RateLimiter, who: Client) -> dict[str, Any] | None:
    try:
        limiter.count_request(who)
    except ApiError as error:
        assert error.reason.status == 429
        body: dict[str, Any] = error.document()["error"]
        return body
    return None


def test_requests_come_in_bursts_and_at_the_rate_after() -> None:
    clock = Clock()
    limiter = RateLimiter(clock=clock)
    acme = client(requests_per_minute=6, burst_s=30)
    assert [refusal(limiter, acme) for _ in range(3)] == [None] * 3
    refused = refusal(limiter, acme)
    assert refused is not None
    assert refused["code"] == Reason.REQUEST_RATE
    assert refused["retry_after_ms"] == 10_000
    assert "6 requests a minute, at most 3 at once" in refused["message"]
    # A refused request is none, or who asks too often would never be served.
    clock.now_s += 10
    assert refusal(limiter, acme) is None
    assert refusal(limiter, acme) is not None
    # Others have limits of their own, or none.
    assert refusal(limiter, client("other", requests_per_minute=1)) is None
    assert refusal(limiter, ANYONE) is None
    assert limiter.headers(ANYONE) == []


def test_tokens_are_set_aside_and_what_was_not_needed_comes_back() -> None:
    clock = Clock()
    limiter = RateLimiter(clock=clock)
    acme = client(tokens_per_minute=6_000)
    charge = limiter.reserve(acme, 1_000, 4_000)
    with pytest.raises(ApiError) as caught:
        limiter.reserve(acme, 600, 401)
    assert caught.value.reason is Reason.TOKEN_RATE
    assert caught.value.document()["error"]["retry_after_ms"] == 10
    charge.close(*answered(1_000, 500), 3)
    charge.close(output_tokens=0)  # only the first end counts
    limiter.reserve(acme, 500, 4_000).close(*answered(500, 4_100), 1)  # more than was foreseen
    assert headers(limiter, acme)["x-ratelimit-remaining-tokens"] == "0"
    clock.now_s += 1
    assert headers(limiter, acme)["x-ratelimit-remaining-tokens"] == "0"
    clock.now_s += 59
    assert headers(limiter, acme)["x-ratelimit-remaining-tokens"] == "5900"
    assert limiter.reserve(client("free"), 10**9, 0) is NO_CHARGE


def test_a_request_larger_than_the_bucket_waits_for_an_empty_one_and_is_paid_for() -> None:
    clock = Clock()
    limiter = RateLimiter(clock=clock)
    acme = client(tokens_per_minute=600)
    limiter.reserve(acme, 5_000, 1_000).close(*answered(5_000, 1_000), 1_000)
    for wait_s in (0, 300, 230):
        clock.now_s += wait_s
        with pytest.raises(ApiError):
            limiter.reserve(acme, 700, 0)
    clock.now_s += 71
    limiter.reserve(acme, 700, 0)


def answered(*tokens: int) -> tuple[ResponseHead, ResponseTail | None]:
    return ResponseHead(200, "application/json"), ResponseTail(*tokens) if tokens else None


@pytest.mark.parametrize(
    ("answer", "seen", "left", "used"),
    [
        (None, 0, False, 0),  # refused, or no replica had room
        (None, 0, True, 100),  # a prefill for nobody
        (None, None, True, 600),  # who waits for the whole answer sees nothing of it before
        (None, None, False, 0),
        ((), 7, True, 107),
        ((), 7, False, 107),  # broken off
        ((90, 30), 7, False, 120),
        ((90, 30), None, False, 120),
    ],
)
def test_what_a_request_has_used_however_it_ended(
    answer: tuple[int, ...] | None, seen: int | None, left: bool, used: int
) -> None:
    limiter, acme = RateLimiter(clock=Clock()), client(tokens_per_minute=1_000)
    charge = limiter.reserve(acme, 100, 500)
    charge.sent()
    charge.close(*((None, None) if answer is None else answered(*answer)), seen, left)
    assert headers(limiter, acme)["x-ratelimit-remaining-tokens"] == str(1_000 - used)
    # Before a replica was asked nothing is used.
    limiter.reserve(acme, 100, 200).close(left=True)
    assert headers(limiter, acme)["x-ratelimit-remaining-tokens"] == str(1_000 - used)


def test_what_comes_back_forgives_nothing_that_others_have_used() -> None:
    clock = Clock()
    limiter, acme = RateLimiter(clock=clock), client(tokens_per_minute=6_000)
    waiting = limiter.reserve(acme, 0, 6_000)
    clock.now_s += 60  # all of it has drained
    limiter.reserve(acme, 3_000, 0).close(*answered(3_000, 0), 0)
    waiting.close()
    assert headers(limiter, acme)["x-ratelimit-remaining-tokens"] == "3000"
    # Nor where the bucket was forgotten meanwhile.
    waiting = limiter.reserve(acme, 0, 3_000)
    waiting.close()
    assert headers(limiter, acme)["x-ratelimit-remaining-tokens"] == "3000"


def headers(limiter: RateLimiter, who: Client) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in limiter.headers(who)}


def test_headers_say_what_is_left() -> None:
    clock = Clock()
    limiter = RateLimiter(clock=clock)
    acme = client(requests_per_minute=60, tokens_per_minute=60_000)
    limiter.count_request(acme)
    limiter.reserve(acme, 88, 512)
    assert headers(limiter, acme) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "60000",
        "x-ratelimit-remaining-tokens": "59400",
        "x-ratelimit-reset-tokens": "0.600s",
    }


class FleetOfRouters:
    """Routers with one clock and one controller, which may be away."""

    def __init__(self, count: int) -> None:
        self.clock = Clock()
        self.quotas: Quotas | None = Quotas()
        self.routers = [RateLimiter(self.share, count, self.clock) for _ in range(count)]

    async def share(self, uses: list[QuotaUse]) -> list[float] | None:
        if self.quotas is None:
            return None
        # As over the wire: plain numbers.
        return self.quotas.share([QuotaUse(*use) for use in uses], self.clock.now_s)

    async def second(self, who: Client, tries: list[int]) -> int:
        """How many of so many tries at each router are let in in a second, before the exchange."""
        admitted = sum(
            refusal(router, who) is None
            for router, many in zip(self.routers, tries, strict=True)
            for _ in range(many)
        )
        self.clock.now_s += 1
        for router in self.routers:
            await router.exchange()
        return admitted


@given(
    tries=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), max_size=40),
    away=st.sets(st.integers(0, 39)),
    restarts=st.sets(st.integers(0, 39)),
)
async def test_over_all_routers_the_rate_holds(
    tries: list[list[int]], away: set[int], restarts: set[int]
) -> None:
    fleet, who = FleetOfRouters(3), client(requests_per_minute=60, burst_s=4)
    controller, admitted = fleet.quotas, 0
    bursts = 3 * 4  # one, and what the other two let in before they knew of it
    for second, each in enumerate(tries):
        if second in restarts:
            # What two routers told it after the third one had heard of it for the last time.
            controller, bursts = Quotas(), bursts + 2 * 4
        if second in away and second - 1 not in away:
            bursts += 2  # a second's worth of each router before it knows that it is alone
        fleet.quotas = None if second in away else controller
        admitted += await fleet.second(who, each)
        assert admitted <= (second + 1) + bursts


async def test_greedy_clients_get_the_rate_and_not_one_for_each_router() -> None:
    fleet, who = FleetOfRouters(4), client(requests_per_minute=600, burst_s=1)
    first = sum([await fleet.second(who, [20] * 4) for _ in range(10)])
    later = sum([await fleet.second(who, [20] * 4) for _ in range(20)])
    assert 100 <= first <= 100 + 4 * 10
    # In the long run what routers let in before they knew of each other is paid back.
    assert 150 <= later <= 200 + 4 * 10
    fleet.quotas = None
    alone = sum([await fleet.second(who, [20] * 4) for _ in range(20)])
    assert 150 <= alone <= 200 + 4 * 10 + 3 * 10


async def test_one_router_gets_the_whole_rate_where_the_others_are_idle() -> None:
    fleet, who = FleetOfRouters(4), client(requests_per_minute=120, burst_s=5)
    await fleet.second(who, [10, 0, 0, 0])
    admitted = [await fleet.second(who, [9, 0, 0, 0]) for _ in range(20)]
    assert sum(admitted) == 40


async def test_an_outage_leaves_no_debt_that_has_long_been_paid() -> None:
    fleet, who = FleetOfRouters(2), client(requests_per_minute=60, burst_s=2)
    kept, fleet.quotas = fleet.quotas, None
    for _ in range(100):
        await fleet.second(who, [5, 5])
    fleet.quotas = kept
    for _ in range(6):
        await fleet.second(who, [0, 0])
    assert await fleet.second(who, [2, 0]) == 2


async def test_what_is_empty_is_forgotten() -> None:
    fleet = FleetOfRouters(1)
    for number in range(100):
        refusal(fleet.routers[0], client(f"c{number}", requests_per_minute=60))
    assert len(fleet.routers[0]._accounts) == 100
    for _ in range(2):  # the first tells of what was used
        fleet.clock.now_s += 2
        await fleet.routers[0].exchange()
    assert fleet.routers[0]._accounts == {}


async def test_a_lost_answer_costs_no_more_than_what_was_in_it() -> None:
    fleet, who = FleetOfRouters(1), client(requests_per_minute=60)
    router = fleet.routers[0]
    assert fleet.quotas is not None
    for _ in range(10):
        refusal(router, who)
    fleet.quotas.share([QuotaUse(f"requests/{who.owner}", 10, 10, 1)], fleet.clock.now_s)
    await router.exchange()  # tells of the same ten again
    assert headers(router, who)["x-ratelimit-remaining-requests"] == "40"


@pytest.mark.parametrize("arrived", [True, False])
async def test_what_was_given_back_is_told_once(arrived: bool) -> None:
    fleet, who = FleetOfRouters(1), client(tokens_per_minute=60_000)
    router = fleet.routers[0]
    assert fleet.quotas is not None
    kept = fleet.quotas
    first, other = (router.reserve(who, 0, 20_000) for _ in range(2))
    await router.exchange()
    first.close()

    async def lost(uses: list[QuotaUse]) -> list[float] | None:
        if arrived:
            kept.share(uses, fleet.clock.now_s)
        return None

    router._share = lost
    await router.exchange()
    router._share = fleet.share
    await router.exchange()
    left = int(headers(router, who)["x-ratelimit-remaining-tokens"])
    # Told twice it would have forgiven what the other one holds.
    assert left == (40_000 if arrived else 20_000)
    other.close()
