"""Tokens in place of API keys: which are accepted, for whom, and what reading the keys costs."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic import SecretStr, ValidationError

from sluice.router.config import AdminConfig, MetricsConfig, RouterConfig
from sluice.router.errors import ApiError, Reason
from sluice.router.tenancy import tokens
from sluice.router.tenancy.auth import ApiKey, client_of
from sluice.router.tenancy.limits import Client, TenantLimits
from sluice.router.tenancy.tokens import (
    MAX_BYTES,
    MAX_KEYS,
    MAX_TOKEN_BYTES,
    MIN_PAUSE_S,
    REMEMBERED_S,
    TokenIssuer,
    TokenVerifier,
)
from tests.router.far_side import CHAT_BODY, Clock, Edge, FarSide, serve
from tests.router.token_issuer import RSA_KEY, Issuer, ec_key, issuing, published

PEM = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


class Verifier(TokenVerifier):
    """With clocks that pass when told to, and metrics to read."""

    def __init__(self, issuer: Issuer, **config: Any) -> None:
        self.monotonic, self.unix, self.registry = Clock(), Clock(), CollectorRegistry()
        self.unix.now_s = issuer.now_s
        configs = {"corp": issuer.config(**config)}
        super().__init__(configs, self.registry, self.monotonic, self.unix)

    def refusal(self, token: str | bytes) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.check(token.encode() if isinstance(token, str) else token)
        json.dumps(caught.value.document())
        return caught.value

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"issuer": "corp", **labels}) or 0.0


async def reading(issuer: Issuer, **config: Any) -> Verifier:
    verifier = Verifier(issuer, **config)
    await verifier.read_keys()
    return verifier


@pytest.fixture
async def verifier(issuer: Issuer) -> Verifier:
    return await reading(issuer)


def unsigned(header: Any, claims: Any, signature: bytes = b"") -> str:
    return f"{part(header)}.{part(claims)}.{encoded(signature)}"


def part(value: Any) -> str:
    return encoded(json.dumps(value).encode())


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


async def test_keys_are_found_by_discovery_or_by_their_url(issuer: Issuer) -> None:
    found = await reading(issuer)
    assert issuer.paths == ["/.well-known/openid-configuration", "/jwks"]
    direct = await reading(issuer, jwks_url=f"{issuer.url}/jwks")
    assert issuer.paths[2:] == ["/jwks"]
    for verifier in (found, direct):
        for kid in ("one", "rsa"):
            client = verifier.check(issuer.sign(kid=kid).encode())
            assert (client.name, client.caps) == ("acme", TenantLimits())
        assert verifier.sample("sluice_issuer_reads_total", outcome="ok") == 1


FORGED = {
    "expired": (lambda i: i.sign({"exp": i.now_s - 31}), "has expired"),
    "not yet": (lambda i: i.sign({"nbf": i.now_s + 60}), "not valid yet"),
    "issued later": (lambda i: i.sign({"iat": i.now_s + 60}), "not valid yet"),
    "no expiry": (lambda i: i.sign({"exp": None}), "no claim exp"),
    "odd expiry": (lambda i: i.sign({"exp": "tomorrow"}), "claim exp is no time"),
    "endless": (lambda i: i.sign({"exp": float("inf")}), "claim exp is no time"),
    "odd nbf": (lambda i: i.sign({"nbf": float("nan")}), "claim nbf is no time"),
    "other audience": (lambda i: i.sign({"aud": "mail"}), "audience is another; it must be sluice"),
    "no audience": (lambda i: i.sign({"aud": None}), "no claim aud"),
    "other issuer": (lambda i: i.sign({"iss": "https://evil.example"}), "issuer is not accepted"),
    "issuer with a slash": (lambda i: i.sign({"iss": i.url + "/"}), "issuer is not accepted"),
    "no issuer": (lambda i: i.sign({"iss": None}), "issuer is not accepted"),
    "no tenant": (lambda i: i.sign({"tenant": None}), "claim tenant must name the tenant"),
    "tenant list": (lambda i: i.sign({"tenant": ["acme"]}), "claim tenant must name the tenant"),
    "long tenant": (lambda i: i.sign({"tenant": "x" * 257}), "with 1 to 256 characters"),
    "not signed": (
        lambda i: unsigned({"alg": "none", "kid": "one"}, jwt_claims(i)),
        "algorithm is 'none'; allowed are RS256, ES256",
    ),
    "not signed, in capitals": (
        lambda i: unsigned({"alg": "NONE", "kid": "one"}, jwt_claims(i)),
        "algorithm is 'NONE'",
    ),
    "public key as a secret": (
        lambda i: keyed_hash({"alg": "HS256", "kid": "rsa"}, jwt_claims(i), PEM),
        "algorithm is 'HS256'",
    ),
    "algorithm that is not accepted": (
        lambda i: i.sign(kid="rsa", algorithm="PS256"),
        "algorithm is 'PS256'",
    ),
    "algorithm of another key": (
        lambda i: i.sign(kid="rsa", key=i.private["one"], algorithm="ES256"),
        "key that its issuer does not publish",
    ),
    "key of someone else": (lambda i: i.sign(key=ec_key()), "signature is wrong"),
    "key in the token": (
        lambda i: i.sign(key=OTHER, headers={"jwk": published(OTHER, "one")}),
        "signature is wrong",
    ),
    "unknown key": (lambda i: i.sign(kid="two", key=ec_key()), "its issuer does not publish"),
    "no key": (lambda i: unsigned({"alg": "ES256"}, jwt_claims(i)), "which key signed it"),
    "odd key": (lambda i: unsigned({"alg": "ES256", "kid": {}}, jwt_claims(i)), "well-formed"),
    "changed claims": (lambda i: changed(i.sign()), "signature is wrong"),
    "unknown extension": (
        lambda i: i.sign(headers={"crit": ["x"], "x": 1}),
        "not a well-formed signed JWT",
    ),
    "claims that are no object": (lambda i: unsigned({"alg": "ES256"}, [1]), "well-formed"),
    "deep header": (lambda i: f"{DEEP}.{DEEP}.", "well-formed"),
    "deep claims": (lambda i: f"{part({'alg': 'ES256'})}.{DEEP}.", "well-formed"),
    "too large": (lambda i: i.sign({"x": "x" * MAX_TOKEN_BYTES}), "allowed are 8192"),
}

OTHER = ec_key()
DEEP = base64.urlsafe_b64encode(b"[" * 3_000).decode()


def jwt_claims(issuer: Issuer) -> Any:
    return jwt.decode(issuer.sign(), options={"verify_signature": False})


def keyed_hash(header: Any, claims: Any, secret: bytes) -> str:
    """Signed with HMAC. The library does not do that with a public key."""
    signed, _, _ = unsigned(header, claims).rpartition(".")
    digest = hmac.digest(secret, signed.encode(), "sha256")
    return f"{signed}.{encoded(digest)}"


def changed(token: str) -> str:
    header, claims, signature = token.split(".")
    changed = json.loads(base64.urlsafe_b64decode(claims + "==")) | {"tenant": "other"}
    return f"{header}.{part(changed)}.{signature}"


@pytest.mark.parametrize("case", FORGED)
async def test_a_token_that_is_not_valid_gets_401_with_the_reason(
    issuer: Issuer, verifier: Verifier, case: str
) -> None:
    make, said = FORGED[case]
    token = make(issuer)
    if case == "unknown key":
        verifier.monotonic.now_s += 1  # the keys were read too recently to read them again
    error = verifier.refusal(token)
    assert (error.reason.status, error.reason) == (401, Reason.INVALID_TOKEN), error.message
    assert said in error.message
    header = error.response().headers["www-authenticate"]
    assert header.startswith('Bearer error="invalid_token", error_description="The token')
    assert len(header) < 300 and header.isascii()
    assert verifier._accepted == {} and verifier._tenants == {}


LIMITED = {"gold": {"max_priority": 9}, "free": {"max_priority": 1}}


@pytest.mark.parametrize(
    ("config", "claims", "priority"),
    [
        ({"limits": LIMITED}, {"tenant": "gold"}, 9),
        ({"limits": LIMITED}, {"tenant": "golden"}, 10),
        ({"limits": LIMITED}, {"tenant": "acme gold", "plan": "gold"}, 10),
        ({"limits": LIMITED, "default_limits": None}, {"tenant": "acme"}, None),
        ({"limits": LIMITED, "limits_claim": "plan"}, {"plan": "free"}, 1),
        ({"limits": LIMITED, "limits_claim": "plan"}, {"tenant": "gold"}, 10),
        ({"limits": LIMITED, "limits_claim": "plan"}, {"plan": "free gold"}, 10),
        ({"limits": LIMITED, "limits_claim": "roles"}, {"roles": ["x", "free", "gold", 3]}, 9),
        ({"limits": LIMITED, "limits_claim": "scope"}, {"scope": "openid free"}, 1),
        ({"limits": LIMITED, "limits_claim": "plan"}, {"plan": {"gold": 1}}, 10),
    ],
)
async def test_limits_are_those_that_the_operator_configured_for_the_claim(
    issuer: Issuer, config: dict[str, Any], claims: dict[str, Any], priority: int | None
) -> None:
    verifier = await reading(issuer, **config)
    token = issuer.sign(claims)
    if priority is None:
        error = verifier.refusal(token)
        assert error.reason.status == 403 and "claim tenant gives no access" in error.message
    else:
        assert verifier.check(token.encode()).caps.max_priority == priority


async def test_tenants_of_issuers_and_keys_of_the_same_name_are_different_clients(
    issuer: Issuer,
) -> None:
    with issuing() as second:
        configs = {"corp": issuer.config(), "shop": second.config()}
        verifier = TokenVerifier(configs, CollectorRegistry())
        await verifier.read_keys()
        tokens = [verifier.check(each.sign().encode()) for each in (issuer, second)]
        tokens.append(client_of(ApiKey(key=SecretStr("k"), name="acme")))
        assert [client.name for client in tokens] == ["acme"] * 3
        assert len({client.owner for client in tokens}) == 3
        assert len({client.tenant for client in tokens}) == 3
        # An issuer cannot sign for another.
        forged = issuer.sign({"iss": second.url})
        with pytest.raises(ApiError, match="signature is wrong"):
            verifier.check(forged.encode())


async def test_a_tenant_whose_name_is_no_label_gets_one_that_resembles_it(
    issuer: Issuer, verifier: Verifier
) -> None:
    names = {
        tenant: verifier.check(issuer.sign({"tenant": tenant}).encode()).name
        for tenant in ("auth0|7", "auth0_7", "ann@example.org", "unnamed", 'x"\n', "é" * 200)
    }
    assert names["auth0_7"] == "auth0_7" and len(set(names.values())) == len(names)
    assert names["ann@example.org"].startswith("t-ann_example.org-")
    assert all(len(name) <= 64 and name != "unnamed" for name in names.values())


async def test_an_accepted_token_is_not_verified_again_until_it_expires(
    issuer: Issuer, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[Client] = []
    one_token = verifier._verify

    def counted(token: bytes, now_s: float) -> Any:
        accepted = one_token(token, now_s)
        verified.append(accepted.client)
        return accepted

    monkeypatch.setattr(verifier, "_verify", counted)
    token = issuer.sign().encode()
    assert all(verifier.check(token) is verified[0] for _ in range(3))
    assert len(verified) == 1
    # Its key is read again, with the same result: it is verified with the new one.
    await verifier.read_keys()
    assert verifier.check(token) == verified[0] and len(verified) == 2
    verifier.unix.now_s += 3_600 + 29.9
    assert verifier.check(token) == verified[0]
    verifier.unix.now_s += 0.2
    assert "has expired" in verifier.refusal(token).message


async def test_a_withdrawn_key_is_not_accepted_after_the_next_read(
    issuer: Issuer, verifier: Verifier
) -> None:
    token = issuer.sign().encode()
    verifier.check(token)
    issuer.keys = issuer.keys[1:]
    await verifier.read_keys()
    assert "does not publish" in verifier.refusal(token).message
    # Nor is another key under the same id one that signed it.
    issuer.keys = [published(ec_key(), "one")]
    await verifier.read_keys()
    assert "signature is wrong" in verifier.refusal(token).message


async def test_what_is_kept_of_tokens_is_bounded(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MAX_CACHED", 3)
    monkeypatch.setattr(tokens, "MAX_TENANTS", 2)
    verifier = await reading(issuer)
    clients = [verifier.check(issuer.sign({"tenant": f"t{index}"}).encode()) for index in range(5)]
    assert len(verifier._accepted) == 3
    assert [verifier.holder(client.owner) for client in clients] == [None] * 3 + clients[3:]


async def test_the_batches_of_a_tenant_run_on_for_a_day_after_its_last_token(
    issuer: Issuer,
) -> None:
    verifier = await reading(issuer, limits=LIMITED, limits_claim="plan")
    now_s = verifier.unix.now_s
    first = verifier.check(issuer.sign({"plan": "free"}).encode())
    later = verifier.check(issuer.sign({"plan": "gold", "exp": now_s + 60}).encode())
    assert first.owner == later.owner
    assert verifier.holder(first.owner) == later, "with the limits of the latest"
    verifier.unix.now_s += 3_600 + 30 + REMEMBERED_S - 1
    assert verifier.holder(first.owner) == later
    verifier.unix.now_s += 2
    assert verifier.holder(first.owner) is None
    assert verifier.holder("token-of-nobody") is None


async def until(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_unknown_keys_cause_one_read_in_a_while_and_a_new_key_is_found_by_it(
    issuer: Issuer, verifier: Verifier
) -> None:
    clock, reads = verifier.monotonic, issuer.paths
    watch = asyncio.create_task(verifier.watch())
    try:
        issuer.private["two"] = ec_key()
        token = issuer.sign(kid="two").encode()
        guesses = [issuer.sign(kid=f"guess-{index}", key=ec_key()) for index in range(20)]
        assert {verifier.refusal(guess).reason.status for guess in guesses} == {401}
        assert len(reads) == 2, "they were read a moment ago"
        issuer.keys.append(published(issuer.private["two"], "two"))
        clock.now_s += MIN_PAUSE_S
        error = verifier.refusal(token)
        assert (error.reason.status, error.reason) == (503, Reason.ISSUER_UNAVAILABLE)
        assert error.response().headers["retry-after"] == "2"
        for guess in guesses:
            verifier.refusal(guess)
        await until(lambda: not verifier._issuers[issuer.url].keys._pending)
        assert verifier.check(token).name == "acme"
        assert {verifier.refusal(guess).reason.status for guess in guesses} == {401}
        assert len(reads) == 4, "two answers a read, and one read for all of them"
    finally:
        watch.cancel()


BROKEN: dict[str, Any] = {
    "an error": (lambda _: (500, b"", {}), "answers 500"),
    "a redirect": (lambda _: (302, b"", {"location": "http://127.0.0.1:1/"}), "answers 302"),
    "no JSON": (lambda _: (200, b"<html>", {}), "does not answer with a JSON object"),
    "deep": (lambda _: (200, b"[" * 100_000, {}), "does not answer with a JSON object"),
    "a list": (lambda _: (200, b"[]", {}), "does not answer with a JSON object"),
    "too much": (lambda _: (200, b" " * (MAX_BYTES + 1), {}), "more than 262144 bytes"),
    "no keys": (lambda _: (200, b'{"keys": []}', {}), f"list of 1 to {MAX_KEYS} keys"),
    "many keys": (
        lambda _: (200, json.dumps({"keys": [{}] * (MAX_KEYS + 1)}).encode(), {}),
        f"list of 1 to {MAX_KEYS} keys",
    ),
    "odd keys": (
        lambda _: (200, json.dumps({"keys": odd_keys()}).encode(), {}),
        "none of its keys has a kid and can verify RS256, ES256",
    ),
}


def odd_keys() -> list[Any]:
    """Keys that no signature may be verified with."""
    small = rsa.generate_private_key(65_537, 1024)
    good = published(ec_key(), "one")
    return [
        *(None, 5, {}, {"kid": "one"}, {"kid": "one", "kty": "EC"}),
        {"kid": "one", "kty": "oct", "k": "c2VjcmV0", "alg": "HS256"},
        {"kid": "one", "kty": [], "crv": {}},
        published(small, "one"),
        published(ec_key(ec.SECP384R1()), "one"),
        *({**good, "kid": kid} for kid in (None, 5, "x" * 257)),
        {**good, "use": "enc"},
        {**good, "alg": "HS256"},
        {**good, "alg": "RS256"},
        {**good, "x": "AA"},
    ]


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_answer_keeps_the_keys_and_is_logged_once(
    issuer: Issuer, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    verifier = await reading(issuer, jwks_url=f"{issuer.url}/jwks")
    issuer.answer, said = BROKEN[case]
    for _ in range(2):
        await verifier.read_keys()
    (record,) = caplog.records
    assert record.message.startswith("cannot read the signing keys of issuer corp: ")
    assert said in record.message
    assert verifier.sample("sluice_issuer_broken") == 1
    assert verifier.sample("sluice_issuer_reads_total", outcome="failed") == 2
    assert verifier.check(issuer.sign().encode()).name == "acme"
    issuer.answer = None
    await verifier.read_keys()
    assert verifier.sample("sluice_issuer_broken") == 0


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"issuer": "https://other.example"}, "discovery document is of another issuer"),
        ({"jwks_uri": "http://keys.example/jwks"}, "must be an https URL"),
        ({"jwks_uri": "file:///etc/passwd"}, "must be an https URL"),
        ({"jwks_uri": 5}, "must be an https URL"),
    ],
)
async def test_discovery_leads_to_safe_keys_of_this_issuer_only(
    issuer: Issuer, found: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/jwks", **found}
    issuer.answer = lambda _: (200, json.dumps(whole).encode(), {})
    verifier = await reading(issuer)
    assert said in caplog.text
    assert verifier.refusal(issuer.sign()).reason.status == 503


async def test_an_issuer_that_does_not_answer_is_given_up(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "TIMEOUT_S", 0.01)
    verifier = await reading(issuer, jwks_url="http://127.0.0.1:9/jwks")
    assert verifier.refusal(issuer.sign()).reason is Reason.ISSUER_UNAVAILABLE
    silent = await asyncio.start_server(lambda *_: asyncio.Event().wait(), "127.0.0.1", 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        verifier = await reading(issuer, jwks_url=f"http://127.0.0.1:{port}/jwks")
        assert verifier.sample("sluice_issuer_broken") == 1


async def test_keys_of_an_issuer_that_is_down_are_used_for_a_bounded_time(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "STALE_S", 600)
    verifier = await reading(issuer)
    token = issuer.sign().encode()
    cached = issuer.sign({"tenant": "cached"}).encode()
    verifier.check(cached)
    issuer.answer = lambda _: (503, b"", {})
    await verifier.read_keys()
    verifier.monotonic.now_s += 600
    assert verifier.check(token).name == "acme" and verifier.check(cached).name == "cached"
    unknown = verifier.refusal(issuer.sign(kid="two", key=ec_key()))
    assert unknown.reason is Reason.ISSUER_UNAVAILABLE, "it may have been published meanwhile"
    verifier.monotonic.now_s += 0.1
    for each in (token, cached):
        assert verifier.refusal(each).reason is Reason.ISSUER_UNAVAILABLE
    issuer.answer = None
    await verifier.read_keys()
    assert verifier.check(token).name == "acme" and verifier.check(cached).name == "cached"


_VERIFIERS: dict[str, Any] = {}


@given(data=st.data())
def test_no_other_bytes_are_accepted_and_all_are_refused_in_order(data: st.DataObject) -> None:
    """Whatever is changed in a token, it is not accepted; and nothing but an answer comes of it."""
    if not _VERIFIERS:
        with issuing() as issuer:
            verifier = asyncio.run(reading(issuer))
            _VERIFIERS.update(verifier=verifier, token=issuer.sign().encode())
    verifier, token = _VERIFIERS["verifier"], _VERIFIERS["token"]
    assert verifier.check(token).name == "acme"
    place = data.draw(st.integers(0, len(token) - 1))
    end = data.draw(st.integers(place, len(token)))
    other = token[:place] + data.draw(st.binary(max_size=8)) + token[end:]
    if other.replace(b"=", b"") != token:  # padding is not part of what is signed
        assert verifier.refusal(other).reason.status == 401
    header = data.draw(st.dictionaries(st.sampled_from(["alg", "kid", "crit", "b64"]), _JSON))
    claims = data.draw(_JSON | st.dictionaries(st.sampled_from(["iss", "aud", "exp"]), _JSON))
    assert verifier.refusal(unsigned(header, claims, b"x" * 64)).reason.status in (401, 503)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"algorithms": []}, "at least 1"),
        ({"audience": []}, "at least 1"),
        ({"issuer": "http://login.example"}, "issuer must be an https URL.*or jwks_url must be"),
        ({"issuer": "corp"}, "or jwks_url must be set"),
        ({"jwks_url": "http://login.example/jwks"}, "https URL"),
        ({"jwks_url": "ftp://127.0.0.1/jwks"}, "https URL"),
        ({"jwks_url": "https://me:secret@login.example/jwks"}, "without user"),
        ({"default_limits": None}, "limits or default_limits must be set"),
        ({"default_limits": {"classes": ["gold"]}}, "issuers.corp names unknown classes"),
        ({"limits": {"a": {"classes": ["gold"]}}}, "known are: batch, interactive, standard"),
    ],
)
def test_a_configuration_that_accepts_too_much_or_nothing_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    fields = {"issuer": "https://login.example", "audience": ["sluice"], "default_limits": {}}
    RouterConfig(issuers={"corp": fields})
    with pytest.raises(ValidationError, match=said):
        RouterConfig(issuers={"corp": {**fields, **changes}})


def test_issuers_are_few_and_distinct() -> None:
    fields = {"audience": ["sluice"], "default_limits": {}}
    many = {f"i{n}": {"issuer": f"https://i{n}.example", **fields} for n in range(9)}
    with pytest.raises(ValidationError, match="at most 8"):
        RouterConfig(issuers=many)
    same = {name: {"issuer": "https://login.example", **fields} for name in ("a", "b")}
    with pytest.raises(ValidationError, match="the same issuer"):
        RouterConfig(issuers=same)
    with pytest.raises(ValidationError, match="names of issuers must match"):
        RouterConfig(issuers={"not a label": same["a"]})
    issuer = TokenIssuer(issuer="kubernetes", jwks_url="https://k8s.example/keys", **fields)
    assert issuer.jwks_url == "https://k8s.example/keys"


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@asynccontextmanager
async def served(issuer: Issuer) -> AsyncIterator[httpx.AsyncClient]:
    limits = {"gold": {"max_priority": 3, "requests_per_minute": 2, "models": ["m"]}}
    router = RouterConfig(
        api_keys=(SecretStr("api-key"),),
        issuers={"corp": issuer.config(limits=limits)},
        metrics=MetricsConfig(keys=(SecretStr("metrics-key"),)),
        admin=AdminConfig(keys=(SecretStr("admin-key"),)),
    )
    edge = Edge(FarSide(a=serve), config=router)
    async with edge.client() as client, edge.api.router.lifespan_context(edge.api):
        yield client


async def test_a_token_is_as_good_as_a_key_and_gets_its_tenants_limits(issuer: Issuer) -> None:
    body = {**CHAT_BODY, "slo": {"priority": 9}}
    async with served(issuer) as client:

        async def ask(credentials: str) -> httpx.Response:
            return await client.post("/v1/chat/completions", json=body, headers=bearer(credentials))

        golden = issuer.sign({"tenant": "gold"})
        answers = [await ask(golden), await ask(golden), await ask(golden)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[0].headers["x-sluice-clamped"] == "priority=3"
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
        # The limit is the tenant's, not the token's.
        assert (await ask(issuer.sign({"tenant": "gold", "jti": "2"}))).status_code == 429
        assert (await ask(issuer.sign())).headers.get("x-sluice-clamped") is None
        assert (await ask("api-key")).status_code == 200
        models = (await client.get("/v1/models", headers=bearer(golden))).json()
        assert [each["id"] for each in models["data"]] == ["m"]
        refused = await ask(issuer.sign({"aud": "mail"}))
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_token"
        assert 'error="invalid_token"' in refused.headers["www-authenticate"]
        assert (await ask("some.other.key")).json()["error"]["code"] == "invalid_token"
        for no_token in ("other-key", "a.b", "a.b.c.d", ".."):
            assert (await ask(no_token)).json()["error"]["code"] == "invalid_api_key"
        page = (await client.get("/metrics", headers=bearer("metrics-key"))).text
        assert 'client="gold"' in page and 'client="acme"' in page


async def test_a_token_opens_neither_the_metrics_nor_the_admin_api(issuer: Issuer) -> None:
    async with served(issuer) as client:
        for path in ("/metrics", "/admin/v1/fleet"):
            answer = await client.get(path, headers=bearer(issuer.sign()))
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_without_keys_and_with_an_issuer_nothing_is_open(issuer: Issuer) -> None:
    edge = Edge(FarSide(a=serve), config=RouterConfig(issuers={"corp": issuer.config()}))
    async with edge.client() as client, edge.api.router.lifespan_context(edge.api):
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/metrics")).status_code == 403
        assert (await client.get("/v1/models", headers=bearer(issuer.sign()))).status_code == 200
        document = (await client.get("/openapi.json", headers=bearer(issuer.sign()))).json()
        assert document["security"] == [{"key": []}]


async def test_refusals_while_keys_are_unknown_delay_no_client_with_access(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone can name the issuer in a token, so these refusals wait with those of wrong keys."""
    monkeypatch.setattr("sluice.router.ingress.middleware.REFUSALS_PER_S", 1.0)
    clock = Clock()
    router = RouterConfig(
        api_keys=(
            ApiKey(key=SecretStr("slow"), limits=TenantLimits(requests_per_minute=1, burst_s=60)),
        ),
        issuers={"corp": issuer.config()},
    )
    edge = Edge(FarSide(a=serve), config=router, clock=clock)
    async with edge.client() as client:  # not started, so it has no keys

        async def ask(credentials: str) -> tuple[int, float]:
            """The status, and how long the answer waited, seconds."""
            began_s, headers = clock.now_s, bearer(credentials)
            answer = await client.post("/v1/chat/completions", json=CHAT_BODY, headers=headers)
            return answer.status_code, clock.now_s - began_s

        assert await ask("slow") == (200, 0)
        refused = [await ask(issuer.sign()) for _ in range(4)]
        assert refused == [(503, 0), (503, 0), (503, 1), (503, 1)]
        assert await ask("slow") == (429, 0)
