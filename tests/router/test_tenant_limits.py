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

from sluice.deploy.config import SluiceConfig, parse_config
from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.errors import ApiError, Reason
from sluice.router.request.slo import Objective, SloReader
from sluice.router.tenancy.auth import ApiKey, KeyRing, client_of
from sluice.router.tenancy.limits import ANYONE, Client, TenantLimits
from sluice.scheduling.request.objective import SLO
from tests.router.far_side import CHAT_BODY, Edge, FarSide, hang, serve

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
    assert read(caps) == (SLO(0.1, 0.01, None, 8, "fast"), {}, None)
    assert read(caps, {"slo": {"class": "slow"}}).clamped == {}
    caps = TenantLimits(min_ttft_ms=500, min_tpot_ms=500, min_e2e_ms=500)
    assert read(caps, {"slo": {"class": "free"}}) == (SLO(service_class="free"), {}, None)


def test_what_is_beyond_is_clamped_and_said_field_by_field() -> None:
    caps = TenantLimits(classes=("slow",), max_priority=4, min_ttft_ms=500.5, min_tpot_ms=50)
    body = {"slo": {"class": "fast", "priority": 9, "tpot_ms": 1}}
    slo, clamped, _ = read(caps, body, **{"ttft-ms": "20"})
    assert slo == SLO(0.5005, 0.05, 60.0, 4, "slow")
    said = {"class": "slow", "priority": "4", "ttft_ms": "500.5", "tpot_ms": "50"}
    assert clamped == said


def test_what_a_class_presets_is_held_to_the_caps_too() -> None:
    caps = TenantLimits(max_priority=2, min_ttft_ms=300, beyond="refuse")
    clamped = {"priority": "2", "ttft_ms": "300"}
    assert read(caps) == (SLO(0.3, 0.01, None, 2, "fast"), clamped, None)
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
        got, clamped, _ = READER.read(body, raw, caps)
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
