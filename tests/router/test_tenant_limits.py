"""What a client may ask for: caps, clamping, refusal, and who it is."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from sluice.controller.actor import Quotas
from sluice.deploy.config import SluiceConfig, parse_config
from sluice.protocol.messages import QuotaUse
from sluice.protocol.requests import ResponseHead, ResponseTail
from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.errors import ApiError, Reason
from sluice.router.request.slo import Objective, SloReader
from sluice.router.tenancy.auth import ApiKey, KeyRing, client_of
from sluice.router.tenancy.limits import ANYONE, NO_CHARGE, Client, RateLimiter, TenantLimits
from sluice.scheduling.request.objective import SLO
from tests.router.far_side import CHAT_BODY, Clock, Edge, FarSide, hang, serve

CLASSES = {
    "fast": ServiceClass(ttft_ms=100, tpot_ms=10, priority=8, service_tiers=("priority",)),
    "slow": ServiceClass(ttft_ms=5_000, tpot_ms=200, e2e_ms=60_000, service_tiers=("flex",)),
    "free": ServiceClass(),
}
READER = SloReader(RouterConfig(classes=CLASSES, default_class="fast"))


def read(caps: TenantLimits, body: dict[str, Any] | None = None, **headers: str) -> Objective:
    raw = [(f"x-slo-{name}".encode(), value.encode()) for name, value in headers.items()]
    return READER.read(body or {}, raw, caps)


def key(secret: str = "secret-1", name: str | None = None, **caps: Any) -> ApiKey:
    return ApiKey(key=SecretStr(secret), name=name, limits=TenantLimits(**caps))


def test_what_is_within_the_caps_is_served_as_asked() -> None:
    caps = TenantLimits(classes=("slow", "fast"), max_priority=8, min_ttft_ms=100, min_tpot_ms=10)
    assert read(caps) == Objective(SLO(0.1, 0.01, None, 8, "fast"), {})
    assert read(caps, {"slo": {"class": "slow"}}).clamped == {}
    caps = TenantLimits(min_ttft_ms=500, min_tpot_ms=500, min_e2e_ms=500)
    assert read(caps, {"slo": {"class": "free"}}) == Objective(SLO(service_class="free"), {})


def test_what_is_beyond_is_clamped_and_said_field_by_field() -> None:
    caps = TenantLimits(classes=("slow",), max_priority=4, min_ttft_ms=500.5, min_tpot_ms=50)
    body = {"slo": {"class": "fast", "priority": 9, "tpot_ms": 1}}
    slo, clamped, *_ = read(caps, body, **{"ttft-ms": "20"})
    assert slo == SLO(0.5005, 0.05, 60.0, 4, "slow")
    said = {"class": "slow", "priority": "4", "ttft_ms": "500.5", "tpot_ms": "50"}
    assert clamped == said


def test_what_a_class_presets_is_held_to_the_caps_too() -> None:
    caps = TenantLimits(max_priority=2, min_ttft_ms=300, beyond="refuse")
    clamped = {"priority": "2", "ttft_ms": "300"}
    assert read(caps) == Objective(SLO(0.3, 0.01, None, 2, "fast"), clamped)
    # Nor does it count as asking for a class that none was named.
    only_slow = TenantLimits(classes=("slow", "free"), beyond="refuse")
    assert read(only_slow).slo.service_class == "slow"


def test_an_end_to_end_objective_cannot_tighten_the_ttft() -> None:
    tight = {"slo": {"e2e_ms": 10}}
    assert read(TenantLimits(min_ttft_ms=500), tight).slo.e2e_s == 0.5
    assert read(TenantLimits(min_ttft_ms=500, min_e2e_ms=900), tight).slo.e2e_s == 0.9


@pytest.mark.parametrize(
    ("caps", "body", "headers", "message"),
    [
        (
            {"max_priority": 3},
            {"slo": {"priority": 4}},
            {},
            "slo.priority must be at most 3 with this API key, got 4",
        ),
        (
            {"min_ttft_ms": 500},
            {},
            {"ttft-ms": "499.5"},
            "x-slo-ttft-ms must be at least 500 ms with this API key, got 499.5",
        ),
        (
            {"classes": ("slow", "free")},
            {"service_tier": "priority"},
            {},
            "service_tier must be one of slow, free with this API key, got 'fast'",
        ),
        (
            {"min_e2e_ms": 2.5},
            {"slo": {"e2e_ms": 1}},
            {},
            "slo.e2e_ms must be at least 2.5 ms with this API key, got 1.0",
        ),
    ],
)
def test_a_refusal_names_the_field_and_what_is_allowed(
    caps: dict[str, Any], body: dict[str, Any], headers: dict[str, str], message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read(TenantLimits(beyond="refuse", **caps), body, **headers)
    error = caught.value
    assert (error.reason.status, error.reason) == (403, Reason.NOT_PERMITTED)
    assert (error.param, error.message) == (message.split()[0], message)


_MS = st.floats(0.001, 1e6)
_CAPS = st.builds(
    TenantLimits,
    classes=st.none() | st.lists(st.sampled_from([*CLASSES]), min_size=1, unique=True).map(tuple),
    max_priority=st.integers(1, 10),
    min_ttft_ms=st.none() | _MS,
    min_tpot_ms=st.none() | _MS,
    min_e2e_ms=st.none() | _MS,
    beyond=st.sampled_from(["clamp", "refuse"]),
)
_ASKED = {"ttft_ms": _MS, "tpot_ms": _MS, "e2e_ms": _MS, "priority": st.integers(1, 10)}
_MS_TEXT = _MS.map("{:.6f}".format)
_HEADERS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"), _MS_TEXT),
        **dict.fromkeys(("x-llm-d-slo-tpot-ms", "x-slo-e2e-ms"), _MS_TEXT),
        "x-slo-priority": st.integers(1, 10).map(str),
        "x-slo-class": st.sampled_from([*CLASSES]),
    },
)


@given(
    caps=_CAPS,
    slo=st.fixed_dictionaries({}, optional={**_ASKED, "class": st.sampled_from([*CLASSES])}),
    tier=st.none() | st.sampled_from(["priority", "flex"]),
    headers=_HEADERS,
)
def test_nothing_that_a_client_sends_passes_its_caps(
    caps: TenantLimits, slo: dict[str, Any], tier: str | None, headers: dict[str, str]
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    body = {"slo": slo, "service_tier": tier}
    wanted = READER.read(body, raw).slo
    try:
        got, clamped, *_ = READER.read(body, raw, caps)
    except ApiError as error:
        assert (caps.beyond, error.reason.status) == ("refuse", 403)
        return
    assert caps.classes is None or got.service_class in caps.classes
    assert got.priority <= caps.max_priority
    floors = (caps.min_ttft_ms, caps.min_tpot_ms, caps.min_e2e_ms)
    for value_s, floor_ms in zip((got.ttft_s, got.tpot_s, got.e2e_s), floors, strict=True):
        assert value_s is None or floor_ms is None or value_s >= floor_ms / 1000
    # Nobody's TTFT can be forced below its floor by the end of the request either.
    assert got.e2e_s is None or caps.min_ttft_ms is None or got.e2e_s >= caps.min_ttft_ms / 1000
    # What was not clamped is as it would be without caps.
    if not clamped:
        assert got == wanted


def test_the_holder_of_a_key_is_known_by_name_and_by_a_lasting_id() -> None:
    named, renewed = key("k-one", name="acme", max_priority=3), key("k-2", name="acme")
    ring = KeyRing([named, SecretStr("k-plain"), key("k-bare", max_in_flight=1)])

    def client(secret: str) -> Client:
        return ring.check([(b"authorization", b"Bearer " + secret.encode())])

    acme, plain, bare = client("k-one"), client("k-plain"), client("k-bare")
    assert (acme.name, acme.caps.max_priority) == ("acme", 3)
    assert client_of(renewed).owner == acme.owner
    assert plain.name == bare.name == "unnamed"
    assert len({acme.owner, plain.owner, bare.owner, ANYONE.owner}) == 4
    assert ring.holder(bare.owner) == bare
    assert ring.holder("key-of-nobody") is None
    assert client_of(key("k-plain")).owner == plain.owner
    assert "k-" not in repr((acme, plain, bare))
    assert KeyRing([]).check([]) == ANYONE
    assert KeyRing([]).holder(ANYONE.owner) == ANYONE


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"name": "a"}], "needs either key or sha256"),
        ([{"key": "s3cret", "limits": {"max_priority": 11}}], "max_priority"),
        ([{"key": "s3cret", "name": "two words"}], "must match"),
        ([{"key": "s3cret", "name": "unnamed"}], "not be 'unnamed'"),
        ([{"key": "s3cret", "limits": {"classes": []}}], "classes"),
        (
            [{"key": "s3cret", "limits": {"classes": ["gold"]}}],
            r"\['gold'\]; known are: batch, inter",
        ),
        ([{"key": "s3cret", "limits": {"beyond": "ignore"}}], "'clamp' or 'refuse'"),
        ([{"key": "s3cret"}, "s3cret"], "two entries of api_keys have the same key"),
        (
            [
                {"key": "s3cret", "name": "a"},
                {"key": "t", "name": "a", "limits": {"max_priority": 2}},
            ],
            "named 'a' have different limits",
        ),
        ([{"key": "s3cret", "sha256": "0" * 64}], "needs either key or sha256"),
        ([{"sha256": "s3cret"}], "64 hexadecimal digits"),
        ([{"key": "s3cret"}, {"sha256": sha256(b"s3cret").hexdigest()}], "have the same key"),
        ([{"s3cret": {"max_priority": 2}}], "an unknown field; allowed are key"),
        ([{"key": "t", "limits": {"s3cret": 2}}], "an unknown field; allowed are classes"),
        ({"s3cret": {"max_priority": 2}}, "tuple"),
        ([{"key": ["s3cret"]}], "valid string"),
        ([{"key": "s3cret é"}], "printable ASCII"),
        ([{"key": "***"}], "asterisks only"),
        ([5], "valid string"),
    ],
)
def test_a_wrong_key_entry_is_refused_without_showing_it(entries: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_config({"router": {"api_keys": entries}})
    assert "s3cret" not in str(caught.value)


def test_keys_are_in_no_dump_and_both_forms_are_in_the_schema() -> None:
    keys = ["s3cret-plain", {"key": "s3cret-object", "name": "acme"}]
    config = parse_config({"router": {"api_keys": keys}})
    for text in (config.model_dump_json(), repr(config), str(config.model_dump())):
        assert "s3cret" not in text
        assert "acme" in text
    schema = SluiceConfig.model_json_schema()["$defs"]
    forms = schema["RouterConfig"]["properties"]["api_keys"]["items"]["oneOf"]
    assert {form.get("type") or form["$ref"] for form in forms} == {"string", "#/$defs/ApiKey"}
    # What is printed in place of a key is not taken for one.
    with pytest.raises(ValueError, match="asterisks only"):
        parse_config(json.loads(config.model_dump_json()))


async def test_a_clamped_answer_says_so() -> None:
    keyed = RouterConfig(
        api_keys=(key(name="acme", classes=("batch", "standard"), max_priority=1),)
    )
    edge = Edge(FarSide(a=serve), config=keyed)
    async with edge.client() as client:
        client.headers["authorization"] = "Bearer secret-1"
        body = {**CHAT_BODY, "slo": {"class": "interactive", "priority": 5}}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.headers["x-sluice-clamped"] == "class=batch, priority=1"
        assert response.headers["x-sluice-class"] == "batch"
        response = await client.post("/v1/chat/completions", json={**CHAT_BODY, "stream": True})
        assert response.headers["x-sluice-clamped"] == "priority=1"
        response = await client.post(
            "/v1/chat/completions", json={**CHAT_BODY, "slo": {"class": "batch"}}
        )
        assert "x-sluice-clamped" not in response.headers
    assert edge.side.calls[0][1].slo == SLO(service_class="batch")
    assert edge.sample("sluice_clamped_total", client="acme", field="priority") == 2
    assert edge.sample("sluice_clamped_total", client="acme", field="class") == 1
    assert edge.sample("sluice_client_requests_total", client="acme", outcome="ok") == 3


async def test_a_refused_one_reaches_nobody() -> None:
    keyed = RouterConfig(api_keys=(key(max_priority=1, beyond="refuse"),))
    edge = Edge(FarSide(a=serve), config=keyed)
    async with edge.client() as client:
        client.headers["authorization"] = "Bearer secret-1"
        response = await client.post(
            "/v1/chat/completions", json={**CHAT_BODY, "slo": {"priority": 5}}
        )
    assert response.status_code == 403
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("not_permitted", "permission_error")
    assert edge.controller.queries == []
    refused = {"class": "none", "reason": "not_permitted"}
    assert edge.sample("sluice_refusals_total", **refused) == 1


async def test_each_key_has_its_own_number_of_requests() -> None:
    one, two = key("secret-1", name="one", max_in_flight=1), key("secret-2", name="two")
    edge = Edge(FarSide(a=hang), config=RouterConfig(api_keys=(one, two)))
    async with edge.client() as client:

        async def post(secret: str) -> Any:
            headers = {"authorization": f"Bearer {secret}"}
            return await client.post("/v1/chat/completions", json=CHAT_BODY, headers=headers)

        first = asyncio.create_task(post("secret-1"))
        await edge.side.until(lambda: len(edge.side.live) == 1)
        response = await post("secret-1")
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "client_full"
        assert response.headers["retry-after"] == "1"
        second = asyncio.create_task(post("secret-2"))
        await edge.side.until(lambda: len(edge.side.live) == 2)
        first.cancel()
        await edge.side.until(lambda: len(edge.side.live) == 1)
        edge.side.behaviours["a"] = serve
        assert (await post("secret-1")).status_code == 200
        second.cancel()
        await asyncio.wait([first, second])
    labels = {"client": "one", "outcome": "refused"}
    assert edge.sample("sluice_client_requests_total", **labels) == 1


# Rate limits: what a key may use, alone and over several routers.


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
