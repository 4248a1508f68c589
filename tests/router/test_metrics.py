"""What a router counts, and its page of metrics with and without an observer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.config import ControllerConfig
from sluice.controller.observability.metrics import (
    KEPT_S,
    MAX_PUSH_SAMPLES,
    MetricsPusher,
    samples_of,
    text_of,
)
from sluice.controller.observability.metrics_hub import MetricsHub
from sluice.protocol.messages import MetricSample, MetricsPush
from sluice.protocol.requests import (
    EngineRequest,
    KVHandle,
    ResponseChunk,
    ResponseHead,
    ResponseTail,
)
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.metrics import ReplicaCollector
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import (
    MAX_NAMES,
    OPERATIONS,
    OTHERS,
    PROVIDER,
    Fallback,
    Outcome,
    RequestFigures,
    RouterMetrics,
)
from sluice.router.metrics.page import PAGE_PERIOD_S, ControllerMetricsPage, merged
from sluice.router.request.arrival import INFERENCE_PATHS
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.tenancy.limits import UNNAMED, Client
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.request.objective import MAX_PRIORITY, SLO, TokenClock
from tests.controller.fleet import Clock as FleetClock
from tests.controller.fleet import ObservedController, hello, newer_push
from tests.router.far_side import (
    CHAT_BODY,
    WORDS,
    Clock,
    Edge,
    FarController,
    FarSide,
    Items,
    answer,
    event,
    fail,
    serve,
)


class HubClient:
    """The observer's side of the page: a real hub, reachable or not."""

    def __init__(self) -> None:
        self.hub = MetricsHub()
        self.up = True
        self.error: Exception | None = None
        self.asked = 0
        self.asking = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def push_metrics(self, push: MetricsPush) -> bool:
        if self.up:
            self.hub.push(push, now_s=1.0)
        return self.up

    async def render_metrics(self) -> bytes | None:
        self.asked += 1
        self.asking.set()
        text = text_of(self.hub.families(now_s=1.0)) if self.up else None
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return text


def page_of(client: HubClient, clock: Clock, metrics: RouterMetrics) -> ControllerMetricsPage:
    pusher = MetricsPusher(client.push_metrics, metrics.registry, "mine")
    return ControllerMetricsPage(client, pusher, metrics.registry, clock, clock.pause)  # type: ignore[arg-type]


async def read(page: ControllerMetricsPage) -> dict[str, float]:
    text = (await page.render()).decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_page_is_the_fleets_or_else_this_routers_gauges() -> None:
    client = HubClient()
    clock = Clock()
    mine, others = RouterMetrics(), RouterMetrics()
    await MetricsPusher(client.push_metrics, others.registry, "others").push_now()
    page = page_of(client, clock, mine)
    mine.retries.inc(2)
    mine.fallbacks(Fallback.NO_ANSWER).inc()
    mine.in_flight.inc(4)
    others.retries.inc(3)
    await MetricsPusher(client.push_metrics, others.registry, "others").push_now()
    fleet = await read(page)
    assert fleet["sluice_retries_total"] == 5
    assert fleet["sluice_observer_up"] == 1
    client.up = False
    clock.now_s += PAGE_PERIOD_S
    alone = await read(page)
    assert alone["sluice_in_flight_requests"] == 4
    assert alone["sluice_observer_up"] == 0
    assert alone["sluice_controller_up"] == 0, "as this router's own calls find"
    # A scraper would read the lower counts as a reset, and count them on top afterwards.
    assert not [name for name in alone if name.endswith(("_total", "_count", "_sum", "_bucket"))]


async def test_the_last_gauges_stand_while_the_observer_does_not_answer() -> None:
    client, clock, mine = HubClient(), Clock(), RouterMetrics()
    sample = MetricSample("sluice_y", "gauge", "Y.", "sluice_y", (("replica", "r"),), 3.0)
    client.hub.push(newer_push("replica", (sample,)), 1.0)
    page = page_of(client, clock, mine)
    found = await read(page)
    assert (found["sluice_y"], found["sluice_observer_page_age_seconds"]) == (3.0, 0.0)
    client.up = False
    clock.now_s += KEPT_S
    found = await read(page)
    assert (found["sluice_y"], found["sluice_observer_up"]) == (3.0, 0)
    assert found["sluice_observer_page_age_seconds"] == KEPT_S
    assert not [name for name in found if name.endswith(("_total", "_count", "_sum", "_bucket"))]
    clock.now_s += PAGE_PERIOD_S
    found = await read(page)
    assert "sluice_y" not in found and found["sluice_observer_page_age_seconds"] == 0
    client.up = True
    clock.now_s += PAGE_PERIOD_S
    assert (await read(page))["sluice_y"] == 3.0


async def test_a_push_that_fails_takes_the_fleets_page_from_nobody() -> None:
    client, metrics = HubClient(), RouterMetrics()
    await MetricsPusher(client.push_metrics, metrics.registry, "others").push_now()
    page = page_of(client, Clock(), metrics)

    async def lost(push: MetricsPush) -> bool:
        return False

    client.push_metrics = lost  # type: ignore[method-assign]
    found = await read(page)
    assert found["sluice_observer_up"] == 1
    assert "sluice_retries_total" in found


async def test_scrapes_at_once_ask_the_observer_once() -> None:
    client, clock, metrics = HubClient(), Clock(), RouterMetrics()
    page = page_of(client, clock, metrics)
    began_s = clock.now_s
    scrapes = [asyncio.create_task(page.render()) for _ in range(50)]
    assert len({*await asyncio.gather(*scrapes)}) == 1
    assert client.asked == 1
    assert clock.now_s == began_s, "nobody waits for the first page"
    client.gate.clear()
    client.asking.clear()
    under_way = asyncio.create_task(page.render())
    await client.asking.wait()
    late = [asyncio.create_task(page.render()) for _ in range(50)]
    client.gate.set()
    await asyncio.gather(under_way, *late)
    assert client.asked == 3
    assert clock.now_s == began_s + 2 * PAGE_PERIOD_S


async def test_a_page_is_no_older_than_the_scrape() -> None:
    """One router gets a scrape, and another the next, which began a page earlier."""
    metrics, fast, slow = RouterMetrics(), HubClient(), HubClient()
    slow.hub = fast.hub
    clock = Clock()
    early = page_of(slow, clock, RouterMetrics())
    slow.gate.clear()
    left = asyncio.create_task(early.render())
    await slow.asking.wait()
    metrics.retries.inc()
    assert (await read(page_of(fast, clock, metrics)))["sluice_retries_total"] == 1
    next_scrape = asyncio.create_task(read(early))
    await asyncio.sleep(0)
    slow.gate.set()
    assert (await next_scrape)["sluice_retries_total"] == 1
    assert (await read(early))["sluice_retries_total"] == 1
    await left


async def test_a_scraper_that_leaves_takes_the_page_from_nobody() -> None:
    client = HubClient()
    page = page_of(client, Clock(), RouterMetrics())
    client.gate.clear()
    first, second = (asyncio.create_task(page.render()) for _ in range(2))
    await client.asking.wait()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    client.gate.set()
    assert b"sluice_observer_up 1.0" in await second
    assert client.asked == 1


@pytest.mark.parametrize("error", [ValueError("over a limit"), RuntimeError("a bug")])
async def test_an_observer_that_refuses_or_fails_leaves_this_routers_page(
    error: Exception,
) -> None:
    client, clock, metrics = HubClient(), Clock(), RouterMetrics()
    page = page_of(client, clock, metrics)
    metrics.in_flight.inc(2)
    client.error = error
    alone = await read(page)
    assert alone["sluice_in_flight_requests"] == 2
    assert alone["sluice_observer_up"] == 0
    client.error = None
    clock.now_s += PAGE_PERIOD_S
    assert (await read(page))["sluice_observer_up"] == 1


LABEL_VALUES = st.text(max_size=12)


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,8}", fullmatch=True),
        st.dictionaries(LABEL_VALUES, st.integers(0, 9), max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_pages_of_models_lose_and_mix_up_nothing(pages: dict[str, dict[str, int]]) -> None:
    texts, expected = {}, {}
    for model, values in pages.items():
        registry = CollectorRegistry()
        plain = Gauge("sluice_plain", "Without labels.", registry=registry)
        gauge = Gauge("sluice_labelled", "With one: { } \n done", ["x"], registry=registry)
        plain.set(len(values))
        expected["sluice_plain", model, None] = len(values)
        for label, value in values.items():
            gauge.labels(label).set(value)
            expected["sluice_labelled", model, label] = value
        texts[model] = generate_latest(registry)
    families = list(text_string_to_metric_families(merged(texts).decode()))
    assert {
        (sample.name, sample.labels["model"], sample.labels.get("x")): sample.value
        for family in families
        for sample in family.samples
    } == expected
    assert len({family.name for family in families}) == len(families)


# The tokens and times that the edge counts.


CLASS = {"class": "standard"}
OPERATION = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "sluice",
    "gen_ai_request_model": "m",
}
KEY = "a-key-of-acme-123"
KEYS = {"api_keys": [{"key": KEY, "name": "acme"}]}
TAIL = ResponseTail(5, len(WORDS), queued_s=0.5, cached_tokens=4)


async def timed(side: FarSide, replica: str, request: EngineRequest) -> Items:
    """Three tokens a second apart; plain, they left the engine a second apart."""
    if request.body.get("stream"):
        yield ResponseHead(200, "text/event-stream", replica)
        for word in WORDS:
            yield ResponseChunk(event(word, request.request_id), 1)
            await side.let_go()
            side.clock.now_s += 1  # type: ignore[attr-defined]
        yield TAIL
        return
    yield ResponseHead(200, "application/json", replica)
    yield ResponseChunk(json.dumps({"object": "chat.completion"}).encode())
    yield TAIL._replace(token_offsets_s=(1.0, 2.0, 3.0))


def edge(*decisions: RouteDecision, config: Any = KEYS, **behaviours: Any) -> Edge:
    side, clock = FarSide(**behaviours), Clock()
    side.clock = clock  # type: ignore[attr-defined]
    controller = FarController(*decisions) if decisions else None
    return Edge(side, controller, RouterConfig.model_validate(config), clock)


async def ask(router: Edge, path: str = "/v1/chat/completions", **body: Any) -> None:
    async with router.client() as client:
        await client.post(
            path, json={**CHAT_BODY, **body}, headers={"authorization": f"Bearer {KEY}"}
        )


def tokens(router: Edge) -> dict[str, float]:
    """By type; those of the class and of the client are the same."""
    types = ("prompt", "cached", "generated")
    found = {each: router.sample("sluice_tokens_total", **CLASS, type=each) for each in types}
    for each, count in found.items():
        assert router.sample("sluice_client_tokens_total", client="acme", type=each) == count
    return found


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_and_times_of_a_served_request(stream: bool) -> None:
    router = edge(a=timed)
    await ask(router, stream=stream)
    assert tokens(router) == {"prompt": 5, "cached": 4, "generated": 3}
    assert router.sample("sluice_queue_seconds_sum", **CLASS) == 0.5
    assert router.sample("sluice_e2e_seconds_count", **CLASS) == 1
    took_s = router.sample("gen_ai_server_request_duration_seconds_sum", **OPERATION, error_type="")
    assert took_s == router.sample("sluice_e2e_seconds_sum", **CLASS) == (3 if stream else 0)
    for name, count in (("input", 5), ("output", 3)):
        labels = {**OPERATION, "gen_ai_token_type": name}
        assert router.sample("gen_ai_client_token_usage_sum", **labels) == count
    ttft_s = router.sample("gen_ai_server_time_to_first_token_seconds_sum", **OPERATION)
    assert ttft_s == router.sample("sluice_ttft_seconds_sum", **CLASS)
    assert router.sample("gen_ai_server_time_per_output_token_seconds_sum", **OPERATION) == 1
    # Of a plain response nobody saw the gaps.
    assert router.sample("sluice_inter_token_seconds_count", **CLASS) == (2 if stream else 0)
    assert router.sample("sluice_inter_token_seconds_sum", **CLASS) == (2 if stream else 0)


async def test_of_a_stream_that_broke_off_the_tokens_that_were_sent_count() -> None:
    router = edge(a=fail(ReplicaFailedError(Reason.INTERNAL, "It broke.", retry=False), after=2))
    await ask(router, stream=True)
    assert tokens(router) == {"prompt": 0, "cached": 0, "generated": 2}
    duration = "gen_ai_server_request_duration_seconds_count"
    assert router.sample(duration, **OPERATION, error_type="failed") == 1
    assert router.sample("sluice_e2e_seconds_count", **CLASS) == 0
    assert router.sample("gen_ai_server_time_to_first_token_seconds_count", **OPERATION) == 0


async def test_a_vector_is_no_generated_token() -> None:
    async def embed(side: FarSide, replica: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "application/json", replica)
        yield ResponseChunk(b"{}")
        yield ResponseTail(5, 1, (0.1,))

    router = edge(a=embed)
    await ask(router, "/v1/embeddings", messages=None, input="hello")
    assert tokens(router) == {"prompt": 5, "cached": 0, "generated": 0}
    embeddings = {**OPERATION, "gen_ai_operation_name": "embeddings"}
    duration = "gen_ai_server_request_duration_seconds_count"
    assert router.sample(duration, **embeddings, error_type="") == 1


async def test_the_cache_and_the_queue_are_those_of_the_replica_that_computes_the_prompt() -> None:
    async def prefill(side: FarSide, replica: str, request: EngineRequest) -> Items:
        yield ResponseHead(200, "application/json", replica)
        yield ResponseTail(5, 0, queued_s=0.25, kv_handle=KVHandle("p", {}, 5), cached_tokens=1)

    pair = RouteDecision("d", "placed", Tier.GUARANTEED, 0.5, role="decode", prefill_id="p")
    router = edge(pair, p=prefill, d=timed)
    router.side.roles = ("mixed", "decode", "prefill")
    router = Edge(router.side, router.controller, router.config, router.side.clock)  # type: ignore[attr-defined]
    await ask(router)
    assert tokens(router) == {"prompt": 5, "cached": 1, "generated": 3}
    assert router.sample("sluice_queue_seconds_sum", **CLASS) == 0.25


async def test_endpoints_that_no_engine_schedules_use_no_tokens() -> None:
    router = edge(a=timed)
    await ask(router, "/tokenize", messages=None, prompt="hello")
    ended = {"class": "none", "outcome": "ok", "endpoint": "tokenize"}
    assert router.sample("sluice_requests_total", **ended) == 1
    names = {
        sample.name for family in router.metrics.registry.collect() for sample in family.samples
    }
    assert not {name for name in names if "token" in name and not name.endswith("_created")}


# The page of metrics stays as small as the configuration makes it, whatever clients send and
# however replicas come and go.


NAMED = 6
"""Keys with a name of their own in the test below."""


def test_only_the_first_thousand_names_of_clients_have_series_of_their_own() -> None:
    metrics = RouterMetrics()
    fields = (*wire.SLO_HEADERS, "max_tokens", "max_completion_tokens", "max_output_tokens")

    def serve_one(name: str) -> None:
        for outcome in Outcome:
            figures = RequestFigures.of(TokenClock(SLO(), 0.0), outcome, 1.0)
            client, clamped = Client(name), dict.fromkeys(fields, "1")
            call = Call("", "chat", {}, SLO(), PromptSize(), 0.0, client=client, clamped=clamped)
            metrics.ended(call, figures)

    for index in range(MAX_NAMES + 500):
        serve_one(f"team-{index}")
    for name in (UNNAMED, OTHERS, "team-0"):
        serve_one(name)
    samples = samples_of(metrics.registry)
    requests: Counter[str] = Counter()
    names: set[str] = set()
    for sample in samples:
        labels = dict(sample.labels)
        if sample.name == "sluice_client_requests_total":
            requests[labels["client"]] += int(sample.value)
        names |= {labels["client"]} if "client" in labels else set()
    assert names == {UNNAMED, OTHERS, *(f"team-{index}" for index in range(MAX_NAMES))}
    assert requests["team-0"] == 2 * len(Outcome), "who was known stays so"
    assert requests[OTHERS] == 501 * len(Outcome), "nobody is lost"
    assert len(samples) < 0.9 * MAX_PUSH_SAMPLES, "with room for all the other metrics"


def _odd_request(chance: random.Random, number: int) -> tuple[str, dict[str, Any], dict[str, str]]:
    """A path, a body and headers, full of names that nobody knows."""
    odd = f"odd-{number}"
    path = chance.choice([*INFERENCE_PATHS, f"/v1/{odd}", "/v1/models"])
    body: dict[str, Any] = {
        "model": chance.choice(["m", "m", "m", "local", odd]),
        "user": odd,
        "stream": chance.random() < 0.5,
    }
    content = {"messages": [{"role": "user", "content": odd}], "prompt": odd, "input": odd}
    field = {"chat": "messages", "responses": "input", "embeddings": "input"}
    used = field.get(INFERENCE_PATHS.get(path, "chat"), "prompt")
    body[used] = content[used]
    if chance.random() < 0.2:
        body["service_tier"] = chance.choice(["flex", "priority", odd])
    if chance.random() < 0.2:
        body["slo"] = {"ttft_ms": number + 1, "class": chance.choice(["batch", odd])}
    key = f"key-{chance.randrange(NAMED)}" if chance.random() < 0.9 else odd
    headers = {
        "authorization": f"Bearer {key}",
        "x-request-id": odd,
        "x-sluice-session": odd,
        "traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01",
        "x-slo-priority": str(chance.choice([1, 5, MAX_PRIORITY, 11, 1.5])),
        "user-agent": odd,
    }
    if chance.random() < 0.3:
        headers["x-slo-class"] = chance.choice(["interactive", odd])
    return path, body, headers


async def test_nothing_that_a_client_sends_makes_series_without_end() -> None:
    """No label has a value that is neither configured nor one of the code's own."""
    keys = [
        {"key": f"key-{index}", "name": f"client-{index}", "limits": {"max_priority": 1 + index}}
        for index in range(NAMED)
    ]
    config = RouterConfig.model_validate({"api_keys": keys})
    edge = Edge(FarSide(a=serve, b=answer(400, b"{}")), config=config)
    chance = random.Random(5)

    async with edge.client() as client:
        for number in range(600):
            edge.controller.decisions = [chance.choice("ab")]
            path, body, headers = _odd_request(chance, number)
            await client.post(path, json=body, headers=headers)
    seen = samples_of(edge.metrics.registry)
    assert not any("odd" in value for sample in seen for _, value in sample.labels)
    classes = {*config.classes, "none"}
    operations = set(OPERATIONS.values())
    allowed = {
        "class": classes,
        "type": {"prompt", "cached", "generated"},
        "gen_ai_request_model": {"m", "local"},
        "gen_ai_operation_name": operations,
        "gen_ai_provider_name": {PROVIDER},
        "gen_ai_token_type": {"input", "output"},
        "tokens": {"first", "later"},
        "error_type": {"" if each is Outcome.OK else each.value for each in Outcome},
        "way": {"router"},
        "priority": {str(value) for value in range(1, MAX_PRIORITY + 1)},
        "endpoint": set(INFERENCE_PATHS.values()),
        "outcome": {each.value for each in Outcome} | {"kept", "missed"},
        "client": {UNNAMED, *(f"client-{index}" for index in range(NAMED))},
        "field": set(wire.SLO_HEADERS),
    }
    found: dict[str, set[str]] = {}
    for sample in seen:
        for label, value in sample.labels:
            found.setdefault(label, set()).add(value)
    for label, values in allowed.items():
        assert found[label] <= values, label
    assert found["client"] >= allowed["client"] - {UNNAMED}
    assert found["class"] == classes, "the requests were of every class"
    # Those of reasons and the like are enumerations in the code.
    assert found.keys() <= {*allowed, "admission", "le", "reason", "ring"}


async def test_replicas_that_come_and_go_leave_no_series_behind() -> None:
    clock = FleetClock()
    controller = ObservedController(ControllerConfig(), clock)
    engine = SimulatedEngine(EngineConfig(kind="simulated"), "r", 8)

    async def live(name: str, goodbye: bool) -> int:
        """A replica's life; how many series the page has after it."""
        await controller.hello(hello(name, now_s=clock.now_s))
        rank = Replica(name, "node", engine, ReplicaConfig(), controller)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(ReplicaCollector([rank], lambda: 1))
        await controller.push_metrics(newer_push(name, samples_of(registry)))
        await controller.drain(name, True)
        page = (await controller.render_metrics()).decode()
        assert f'replica="{name}"' in page
        if goodbye:
            await controller.goodbye(name)
        clock.advance(60)
        page = (await controller.render_metrics()).decode()
        assert name not in page
        return sum(len(family.samples) for family in text_string_to_metric_families(page))

    names = [hashlib.sha256(str(index).encode()).hexdigest()[:12] for index in range(40)]
    counts = [await live(name, bool(index % 2)) for index, name in enumerate(names)]
    assert len(set(counts)) == 1, counts
    clock.advance(3_600)
    await controller.push_metrics(newer_push("other", ()))
    assert (await controller.snapshot())["metric_sources"] == 1
