"""The limits of keys and of the router over the whole API."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from sluice.router.config import AdminConfig, MetricsConfig, RouterConfig
from sluice.router.dispatch.models import TTL_S, Catalog
from sluice.router.errors import ApiError, Reason
from sluice.router.request.body import BodyBudget, HeldBytes
from sluice.router.request.call import MAX_INLINE_BYTES
from sluice.router.tenancy.auth import ApiKey
from sluice.router.tenancy.limits import ANYONE, Client, TenantLimits
from tests.router.far_side import (
    CHAT_BODY,
    COMPLETION_BODY,
    Clock,
    Edge,
    FarController,
    FarSide,
    answer,
    hang,
    serve,
    stall,
)

# Prompts that are longer than any engine of their model takes are refused at the edge.

LONGEST = 50_000


def edge(max_model_len: int | None = LONGEST) -> Edge:
    side = FarSide(a=serve)
    side.max_model_len = max_model_len
    return Edge(side)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [7] * (LONGEST + 1)}, "prompt"),
        ("/v1/completions", {"prompt": [[7], [7] * (LONGEST + 1)]}, "prompt"),
        ("/v1/embeddings", {"input": [7] * (LONGEST + 1)}, "input"),
        ("/v1/embeddings", {"input": [[7] * (LONGEST + 1), "text"]}, "input"),
    ],
)
async def test_a_prompt_that_no_engine_takes_reaches_none(
    path: str, body: dict[str, Any], param: str
) -> None:
    router = edge()
    async with router.client() as client:
        answer = await client.post(path, json={"model": "m", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert f"{LONGEST + 1} token ids; this model takes at most {LONGEST} tokens" in error["message"]
    assert router.side.calls == []


@pytest.mark.parametrize(
    ("max_model_len", "body"),
    [
        (LONGEST, {"prompt": [7] * LONGEST}),
        (LONGEST, {"prompt": [[7] * LONGEST, [7] * LONGEST]}),
        (LONGEST, {"prompt": "x" * 10 * LONGEST}),
        (LONGEST, {"prompt": [7] * 2 * LONGEST, "truncate_prompt_tokens": 10}),
        (None, {"prompt": [7] * 2 * LONGEST}),
    ],
    ids=["fits", "each fits", "text", "is shortened", "nobody says"],
)
async def test_any_other_is_left_to_the_engine(
    max_model_len: int | None, body: dict[str, Any]
) -> None:
    router = edge(max_model_len)
    assert 2 * LONGEST > MAX_INLINE_BYTES
    async with router.client() as client:
        answer = await client.post("/v1/completions", json={**COMPLETION_BODY, **body})
    assert answer.status_code == 200
    assert router.side.calls[0][1].body["prompt"] == body["prompt"]


async def test_a_model_that_nobody_serves_is_unknown_whatever_its_prompt() -> None:
    router = edge()
    async with router.client() as client:
        body = {"model": "other", "prompt": [7] * (LONGEST + 1)}
        assert (await client.post("/v1/completions", json=body)).status_code == 404


async def test_engines_that_take_more_are_noticed() -> None:
    side, clock = FarSide(a=serve), Clock()
    catalog = Catalog(side, clock=clock)
    side.max_model_len = 10
    assert await catalog.exceeded(10) is None
    assert await catalog.exceeded(11) == 10
    side.max_model_len = 20
    clock.now_s += TTL_S
    assert await catalog.exceeded(20) is None
    assert await catalog.exceeded(21) == 20


CHAT = "/v1/chat/completions"


def keyed(*keys: ApiKey, **more: Any) -> RouterConfig:
    return RouterConfig(api_keys=keys, **more)


def key(secret: str = "secret-1", name: str | None = None, **caps: Any) -> ApiKey:
    return ApiKey(key=SecretStr(secret), name=name, limits=TenantLimits(**caps))


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def code_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


async def test_a_key_that_asks_too_often_is_told_when_to_come_back() -> None:
    clock = Clock()
    config = keyed(key(name="acme", requests_per_minute=2), key("secret-2"))
    edge = Edge(FarSide(a=serve), config=config, clock=clock)
    async with edge.client() as client:
        client.headers.update(bearer("secret-1"))
        for left in (1, 0):
            response = await client.post(CHAT, json=CHAT_BODY)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        # Before its body is read: it may be anything.
        response = await client.post(CHAT, content=b"\xff")
        assert (response.status_code, code_of(response)) == (429, "request_rate_exceeded")
        assert response.headers["retry-after"] == "30"
        assert response.headers["x-ratelimit-reset-requests"] == "60.000s"
        assert (await client.get("/v1/models")).status_code == 200
        other = await client.post(CHAT, json=CHAT_BODY, headers=bearer("secret-2"))
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        clock.now_s += 30
        assert (await client.post("/v1/completions", json=COMPLETION_BODY)).status_code == 200
    assert edge.sample("sluice_client_requests_total", client="acme", outcome="refused") == 1
    refused = {"class": "none", "reason": "request_rate_exceeded"}
    assert edge.sample("sluice_refusals_total", **refused) == 1


async def test_who_leaves_an_answer_that_nobody_saw_has_used_all_that_was_set_aside() -> None:
    side = FarSide(a=hang)
    edge = Edge(side, config=keyed(key(tokens_per_minute=1_000)), clock=Clock())
    async with edge.client() as client:
        client.headers.update(bearer("secret-1"))
        left = []
        for more in ({"stream": True}, {}):
            body = {**CHAT_BODY, "max_tokens": 100, **more}
            asking = asyncio.create_task(client.post(CHAT, json=body))
            await side.until(lambda: bool(side.live))
            asking.cancel()
            await side.until(lambda: not side.live)
            side.behaviours["a"] = serve
            response = await client.post("/tokenize", json={"prompt": "x"})
            left.append(int(response.headers["x-ratelimit-remaining-tokens"]))
            side.behaviours["a"] = hang
    # A stream that has shown nothing has made nothing: its prompt counts.
    streamed, whole = 1_000 - left[0], left[0] - left[1]
    assert 5 < streamed < 20
    assert 100 < whole < 120


async def test_tokens_are_counted_as_the_engine_says_once_a_request_has_ended() -> None:
    clock = Clock()
    edge = Edge(FarSide(a=serve), config=keyed(key(tokens_per_minute=600)), clock=clock)
    async with edge.client() as client:
        client.headers.update(bearer("secret-1"))

        async def left() -> int:
            response = await client.post(CHAT, content=b"no JSON")
            return int(response.headers["x-ratelimit-remaining-tokens"])

        body = {**CHAT_BODY, "max_tokens": 500}
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert await left() == 600 - 8
        assert (await client.post(CHAT, json={**body, "stream": True})).status_code == 200
        assert await left() == 600 - 16
        # An output that does not fit any more, whatever the prompt.
        response = await client.post(CHAT, json={**body, "max_tokens": 584})
        assert (response.status_code, code_of(response)) == (429, "token_rate_exceeded")
        assert int(response.headers["retry-after"]) == 1
        edge.side.behaviours["a"] = answer(400, b"{}")
        assert (await client.post(CHAT, json=body)).status_code == 400
        assert await left() == 600 - 16


async def test_what_is_refused_or_left_pays_for_what_was_done() -> None:
    clock = Clock()
    config = keyed(key(tokens_per_minute=600), max_attempts=1)
    edge = Edge(FarSide(a=stall), FarController("a"), config, clock)
    async with edge.client() as client:
        client.headers.update(bearer("secret-1"))
        body = {**CHAT_BODY, "max_tokens": 500, "stream": True}
        left = asyncio.create_task(client.post(CHAT, json=body))
        await edge.side.until(lambda: len(edge.side.live) == 1)
        await edge.side.let_go()
        left.cancel()
        await asyncio.wait([left])
        await edge.side.until(lambda: not edge.side.live)
        edge.side.behaviours["a"] = answer(503, b"{}")
        response = await client.post(CHAT, json=body)
        assert (response.status_code, code_of(response)) == (503, "replicas_full")
        # What is said of the refused one still counts what was set aside for it.
        assert response.headers["x-ratelimit-remaining-tokens"] == str(600 - 8 - 507)
        # The prompt of the one that left, and its one token.
        response = await client.post(CHAT, content=b"no JSON")
        assert response.headers["x-ratelimit-remaining-tokens"] == str(600 - 7 - 1)


async def test_the_bodies_inside_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.router.ingress.middleware.HELD_BYTES", 0)
    edge = Edge(FarSide(a=hang), config=RouterConfig(max_body_bytes=1_700))
    body = {**CHAT_BODY, "metadata": {"note": "x" * 1_450}}
    async with edge.client() as client:
        first = asyncio.create_task(client.post(CHAT, json=body))
        second = asyncio.create_task(client.post(CHAT, json=body))
        await edge.side.until(lambda: len(edge.side.live) == 2)
        held = edge.sample("sluice_held_body_bytes")
        assert 2 * 1_450 < held < 2 * 1_700
        response = await client.post(CHAT, json=body)
        assert (response.status_code, code_of(response)) == (503, "router_full")
        assert response.headers["retry-after"] == "1"
        assert edge.sample("sluice_held_body_bytes") == held
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second])
        await edge.side.until(lambda: not edge.side.live)
        edge.side.behaviours["a"] = serve
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert edge.sample("sluice_held_body_bytes") == 0


def test_a_body_that_does_not_fit_leaves_no_trace() -> None:
    edge = Edge(FarSide(a=serve))
    budget = BodyBudget(10, edge.metrics.held_bytes)
    acme, other = Client("acme", "name-acme"), Client("other", "name-other")
    with HeldBytes(budget, ANYONE) as one:
        one.add(7)
        with pytest.raises(ApiError, match="10 bytes"), HeldBytes(budget, acme) as two:
            two.add(2)
            two.add(2)
        assert budget.held == 7
    with HeldBytes(budget, acme) as one:
        one.add(5)
        with pytest.raises(ApiError) as caught, HeldBytes(budget, acme) as two:
            two.add(1)
        assert caught.value.reason is Reason.CLIENT_FULL
        with HeldBytes(budget, other) as two:
            # As many as it leaves to others.
            two.add(2)
            with pytest.raises(ApiError) as caught:
                two.add(1)
            assert caught.value.reason is Reason.CLIENT_FULL
    assert budget.held == 0
    assert not budget.of_client


async def test_one_key_leaves_places_in_the_router_for_others() -> None:
    config = keyed(key(), key("secret-2"), max_in_flight=20)
    edge = Edge(FarSide(a=hang), config=config)
    async with edge.client() as client:
        greedy = [
            asyncio.create_task(client.post(CHAT, json=CHAT_BODY, headers=bearer("secret-1")))
            for _ in range(20)
        ]
        await edge.side.until(lambda: sum(task.done() for task in greedy) == 4)
        refused = [task.result() for task in greedy if task.done()]
        assert {(each.status_code, code_of(each)) for each in refused} == {(429, "client_full")}
        others = [
            asyncio.create_task(client.post(CHAT, json=CHAT_BODY, headers=bearer("secret-2")))
            for _ in range(2)
        ]
        await edge.side.until(lambda: len(edge.side.live) == 18)
        for task in (*greedy, *others):
            task.cancel()
        await asyncio.wait([*greedy, *others])


def test_bodies_of_many_clients_leave_room_for_one_more() -> None:
    budget = BodyBudget(1_000, Edge(FarSide(a=serve)).metrics.held_bytes)
    heavy = Client("heavy", "name-heavy", TenantLimits(weight=2.0))
    clients = [heavy, *[Client(f"c{index}", f"name-c{index}") for index in range(4)]]
    sizes: Counter[Client] = Counter()
    with ExitStack() as stack:
        held = {each: stack.enter_context(HeldBytes(budget, each)) for each in clients}
        for each in clients * 1_000:
            with suppress(ApiError):
                held[each].add(1)
                sizes[each] += 1
        first, *others = (sizes[each] for each in clients)
        assert max(others) - min(others) <= 1
        assert 1.2 * others[0] < first <= 2 * others[0]
        with HeldBytes(budget, Client("new", "name-new")) as one:
            one.add(others[0] // 4)


async def test_long_outputs_are_cut_and_long_prompts_refused() -> None:
    config = keyed(key(max_output_tokens=50, max_prompt_tokens=1_000), max_output_tokens=80)
    edge = Edge(FarSide(a=serve), config=config)
    async with edge.client() as client:
        client.headers.update(bearer("secret-1"))
        response = await client.post(CHAT, json={**CHAT_BODY, "max_tokens": 70})
        assert response.headers["x-sluice-clamped"] == "max_tokens=50"
        response = await client.post(
            "/v1/completions", json={**COMPLETION_BODY, "prompt": "x" * 5_000}
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
    assert edge.side.calls[0][1].body["max_tokens"] == 50
    assert edge.controller.queries[0].output_tokens == 50


async def test_keys_can_be_kept_apart_in_the_prefix_caches() -> None:
    keys = (key("secret-1", name="a"), key("secret-2", name="b"))
    config = keyed(*keys, prefix_sharing="key")
    edge = Edge(FarSide(a=serve), config=config)
    long = {**COMPLETION_BODY, "prompt": "once upon a time " * 100}
    async with edge.client() as client:
        for secret, salt in (("1", None), ("2", None), ("1", "mine"), ("2", "mine"), ("1", None)):
            body = long if salt is None else {**long, "cache_salt": salt}
            headers = bearer(f"secret-{secret}")
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
        stolen = {**long, "cache_salt": edge.side.calls[0][1].body["cache_salt"]}
        await client.post("/v1/completions", json=stolen, headers=bearer("secret-2"))
    salts = [request.body["cache_salt"] for _, request in edge.side.calls]
    assert salts[0] == salts[4]
    assert len({*salts[:4], salts[5]}) == 5
    # The controller's index of held prompts is told the same.
    prefixes = [query.prefix for query in edge.controller.queries]
    assert prefixes[0] == prefixes[4]
    assert len({prefix[0] for prefix in (*prefixes[:4], prefixes[5])}) == 5


async def test_a_key_sees_and_uses_its_models_only() -> None:
    keys = (key("secret-1", models=("local",)), key("secret-2"))
    edge = Edge(FarSide(a=serve), config=keyed(*keys))
    async with edge.client() as client:

        async def use(secret: str, model: str | None) -> int:
            path, body = ("/tokenize", {"prompt": "x"}) if model is None else (CHAT, CHAT_BODY)
            named = body if model is None else {**body, "model": model}
            return (await client.post(path, json=named, headers=bearer(secret))).status_code

        assert [await use("secret-1", model) for model in ("local", "m", None)] == [200, 404, 404]
        assert [await use("secret-2", model) for model in ("local", "m", None)] == [200, 200, 200]
        unknown, hidden = [
            (await client.post(CHAT, json={**CHAT_BODY, "model": model}, headers=bearer(secret)))
            .json()["error"]["message"]
            .replace(repr(model), "?")
            for model, secret in (("nothing", "secret-1"), ("m", "secret-1"))
        ]
        assert unknown == hidden
        for secret, seen in (("secret-1", []), ("secret-2", ["m"])):
            listed = await client.get("/v1/models", headers=bearer(secret))
            assert [entry["id"] for entry in listed.json()["data"]] == seen


METRICS = MetricsConfig(keys=(SecretStr("metrics-key"),))
ADMIN = AdminConfig(keys=(SecretStr("admin-key"),))


@pytest.mark.parametrize(
    ("config", "secret", "status"),
    [
        (RouterConfig(), None, 200),
        (RouterConfig(metrics=METRICS), None, 200),
        (keyed(key()), None, 403),
        (keyed(key()), "secret-1", 403),
        (keyed(key(), metrics=METRICS), None, 401),
        (keyed(key(), metrics=METRICS), "secret-1", 401),
        (keyed(key(), metrics=METRICS), "metrics-key", 200),
        (keyed(key(), metrics=METRICS, admin=ADMIN), "admin-key", 401),
        (keyed(key(), metrics=MetricsConfig(access="open")), None, 200),
    ],
)
async def test_who_reads_the_metrics(config: RouterConfig, secret: str | None, status: int) -> None:
    async with Edge(FarSide(a=serve), config=config).client() as client:
        response = await client.get("/metrics", headers=bearer(secret) if secret else {})
        assert response.status_code == status
        if secret == "metrics-key":
            response = await client.get("/v1/models", headers=bearer(secret))
            assert response.status_code == 401


def test_one_key_cannot_open_both() -> None:
    with pytest.raises(ValidationError, match=r"in both api_keys and metrics\.keys"):
        keyed(key("metrics-key"), metrics=METRICS)


async def test_a_running_router_takes_in_a_new_key_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.tenancy.auth.POLL_S", 0.01)
    path = tmp_path / "keys.yaml"
    path.write_text("- old-key\n")
    edge = Edge(FarSide(a=serve), config=RouterConfig(api_keys_file=path))
    async with edge.client() as client, edge.api.router.lifespan_context(edge.api):

        async def status(secret: str) -> int:
            return (await client.get("/v1/models", headers=bearer(secret))).status_code

        assert (await status("old-key"), await status("new-key")) == (200, 401)
        path.write_text("- new-key\n")
        async with asyncio.timeout(120):
            while await status("new-key") != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await status("old-key") == 401
        # Not even an empty file opens the door.
        path.write_text("")
        async with asyncio.timeout(120):
            while not edge.sample("sluice_key_file_broken", ring="api"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await status("new-key"), await status("any")) == (200, 401)


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/tokenize", {"prompt": "x" * 400}, 100),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 400}]}, 104),
        ("/detokenize", {"tokens": [7] * 100}, 100),
    ],
)
async def test_counting_and_decoding_tokens_is_charged_by_their_number(
    path: str, body: dict[str, Any], tokens: int
) -> None:
    edge = Edge(FarSide(a=answer(200, b"{}")), config=keyed(key(tokens_per_minute=250)))
    async with edge.client() as client:
        client.headers.update(bearer("secret-1"))
        for _ in range(2):
            response = await client.post(path, json=body)
            assert response.status_code == 200
        left = int(response.headers["x-ratelimit-remaining-tokens"])
        assert 250 - 2 * tokens <= left <= 250 - 2 * tokens + 10  # some have drained
        assert code_of(await client.post(path, json=body)) == "token_rate_exceeded"
