"""The page of metrics stays as small as the configuration makes it, whatever clients send and
however replicas come and go."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.config import ControllerConfig
from sluice.controller.observability.metrics import MAX_PUSH_SAMPLES, samples_of
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.metrics import ReplicaCollector
from sluice.replica.server import Replica
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.metrics.instruments import (
    MAX_NAMES,
    OPERATIONS,
    OTHERS,
    PROVIDER,
    Outcome,
    RequestFigures,
    RouterMetrics,
)
from sluice.router.request.arrival import INFERENCE_PATHS
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.router.tenancy.limits import UNNAMED, Client
from sluice.scheduling.request.objective import MAX_PRIORITY, SLO, TokenClock
from tests.controller.fleet import Clock, ObservedController, hello, newer_push
from tests.router.far_side import Edge, FarSide, answer, serve

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
    clock = Clock()
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
