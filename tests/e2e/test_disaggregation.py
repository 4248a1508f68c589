"""Prefill and decode in pools of their own, on real Ray, Serve and HTTP with simulated engines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import ray

from tests.e2e.conftest import System, system, wait_until

pytestmark = pytest.mark.ray

POOLS = {"prefill": 2, "decode": 2, "mixed": 1}
TOKENS = 40
PROMPT = "word " * 400
# The prompt takes about a second, so does the hand-over of its KV, and so do the tokens.
FIELDS: dict[str, Any] = {
    "name": "disaggregated",
    "engine": {
        "kind": "simulated",
        "model": "sim",
        "simulated": {
            "step_s": 0.025,
            "token_s": 0.002,
            "context_token_s": 0.0,
            "transfer_s": 1.0,
            "transfer_token_s": 0.0,
        },
    },
    "replica": {
        "num_cpus": 0.1,
        "drain_timeout_s": 10,
        "health_check_period_s": 0.5,
        "pools": {role: {"count": count} for role, count in POOLS.items()},
    },
    "router": {"classes": {"standard": {"ttft_ms": 60_000, "tpot_ms": 2_000}}},
}


def fresh(serving: System) -> list[dict[str, Any]]:
    """The replicas that take requests, as the controller knows."""
    return [each for each in serving.snapshot()["replicas"] if each["condition"] == "fresh"]


def roles(serving: System) -> Counter[str]:
    return Counter(each["role"] for each in fresh(serving))


def kill(replica_id: str) -> None:
    """End a replica's process at once."""
    names = [
        named["name"]
        for named in ray.util.list_named_actors(all_namespaces=True)
        if named["namespace"] == "serve" and named["name"].endswith(f"#{replica_id}")
    ]
    (name,) = names
    ray.kill(ray.get_actor(name, namespace="serve"))


class Streamed(NamedTuple):
    """A streamed answer that ended as it should."""

    text: str
    headers: httpx.Headers


def stream(serving: System, prompt: str = PROMPT, after: int = -1) -> Streamed:
    """Stream an answer; after so many events its replica is killed. Checks that nothing is missing
    and nothing there twice."""
    body = {
        "model": "sim",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events: list[dict[str, Any]] = []
    done = False
    url = f"{serving.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            assert not done or not line
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if len(events) == after:
                    kill(answer.headers["x-sluice-replica"])
    assert done and not [event for event in events if "error" in event], events[-2:]
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["usage"]["completion_tokens"] == TOKENS
    choices = [choice for event in events for choice in event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    return Streamed("".join(choice["text"] for choice in choices), answer.headers)


@pytest.fixture(scope="module")
def serving() -> Iterator[System]:
    with system(FIELDS) as running:
        wait_until(lambda: roles(running) == POOLS, "all have reported")
        yield running


@pytest.fixture(scope="module")
def text(serving: System) -> str:
    """The answer when nothing goes wrong, from a mixed replica."""
    body = {"model": "sim", "prompt": PROMPT, "max_tokens": TOKENS}
    with only(serving, "mixed"):
        answer = httpx.post(f"{serving.url}/v1/completions", json=body, timeout=60).json()
    found = answer["choices"][0]["text"]
    assert isinstance(found, str) and len(found.split()) > TOKENS / 4
    return found


@contextmanager
def only(serving: System, *wanted: str) -> Iterator[None]:
    """The replicas of other roles are drained meanwhile."""
    others = [each["replica_id"] for each in fresh(serving) if each["role"] not in wanted]
    drain = serving.controller().drain.remote
    ray.get([drain(replica_id, True) for replica_id in others], timeout=10)
    try:
        yield
    finally:
        ray.get([drain(replica_id, False) for replica_id in others], timeout=10)


def busy(serving: System, role: str) -> list[str]:
    """The replicas of a role that have a request."""
    return [
        each["replica_id"]
        for each in fresh(serving)
        if each["role"] == role and each["waiting"] + each["running"]
    ]


def kill_when(serving: System, role: str, other_idle: str | None = None) -> None:
    """Kill the replica of a role that has a request, once none of another role has one."""

    def ready() -> bool:
        idle = other_idle is None or not busy(serving, other_idle)
        return bool(busy(serving, role)) and idle

    wait_until(ready, f"the request is at a {role} replica", show=serving.snapshot)
    (replica_id,) = busy(serving, role)
    kill(replica_id)


def test_no_request_is_lost_whoever_dies_and_when(serving: System, text: str) -> None:
    with only(serving, "prefill", "decode"), ThreadPoolExecutor(1) as threads:

        def asked() -> Future[Streamed]:
            return threads.submit(stream, serving)

        whole = asked().result()
        assert whole.text == text
        answers, computes = pair_of(serving, whole)
        assert answers["role"] == "decode" and computes["role"] == "prefill"

        while_it_prefills = asked()
        kill_when(serving, "prefill")
        assert while_it_prefills.result().text == text

        before_its_first_token = asked()
        kill_when(serving, "decode", other_idle="prefill")
        assert before_its_first_token.result().text == text

        # After its first tokens: the stream goes on elsewhere.
        assert stream(serving, after=TOKENS // 3).text == text


def pair_of(serving: System, answer: Streamed) -> tuple[dict[str, Any], dict[str, Any]]:
    """The replica that answered, and the one that computed the prompt."""
    known = {each["replica_id"]: each for each in serving.snapshot()["replicas"]}
    headers = answer.headers
    return known[headers["x-sluice-replica"]], known[headers["x-sluice-prefill-replica"]]


def test_every_mode_serves_while_replicas_come_and_go(serving: System) -> None:
    """Clients keep asking, for what can be split and for what cannot, while each pool loses one."""
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)

    def plain(number: int) -> int:
        answer = client.completions.create(
            model="sim", prompt=f"word {number}", max_tokens=TOKENS, n=1 + number % 2
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens // (1 + number % 2)

    wait_until(lambda: min(roles(serving)[role] for role in POOLS) > 0, "each role is there")
    doomed = [next(each for each in fresh(serving) if each["role"] == role) for role in POOLS]
    with ThreadPoolExecutor(12) as threads:
        streams = [
            threads.submit(stream, serving, f"{'word ' * 20}{number}") for number in range(12)
        ]
        for replica in doomed:
            kill(replica["replica_id"])
        answers = list(threads.map(plain, range(12)))
        assert answers == [TOKENS] * 12
        assert all(each.result().text for each in streams)
    wait_until(lambda: roles(serving) == POOLS, "Serve has replaced the dead")
