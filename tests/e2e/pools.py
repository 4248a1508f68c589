"""What tests of prefill and decode pools share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import ray

from tests.e2e.conftest import System, wait_until


def fresh(serving: System) -> list[dict[str, Any]]:
    """The replicas that take requests, as the controller knows."""
    return [each for each in serving.snapshot()["replicas"] if each["condition"] == "fresh"]


def roles(serving: System) -> Counter[str]:
    """Their number by role."""
    return Counter(each["role"] for each in fresh(serving))


def there(serving: System, role: str) -> list[dict[str, Any]]:
    """The replicas of a role that nobody has seen leave, also such as are slow to report."""
    return [
        each
        for each in serving.snapshot()["replicas"]
        if each["role"] == role and each["condition"] != "gone"
    ]


def busy(serving: System, role: str) -> list[str]:
    """The replicas of a role that have a request."""
    return [
        each["replica_id"] for each in there(serving, role) if each["waiting"] + each["running"]
    ]


def wait_until_busy(
    serving: System,
    role: str,
    idle: str | None = None,
    over: Callable[[], bool] = lambda: False,
) -> str | None:
    """The replica of a role with a request once ``idle`` has none; ``None`` if it was ``over``."""
    found: list[str] = []

    def look() -> bool:
        found[:] = busy(serving, role)
        return over() or (bool(found) and (idle is None or not busy(serving, idle)))

    wait_until(look, f"a request is at a {role} replica", show=serving.snapshot, every_s=0.03)
    if over():
        return None
    (replica_id,) = found
    return replica_id


@contextmanager
def only(serving: System, *wanted: str) -> Iterator[None]:
    """The replicas of other roles are drained meanwhile."""
    others = [each["replica_id"] for each in fresh(serving) if each["role"] not in wanted]
    drain = serving.controller().drain.remote
    ray.get([drain(replica_id, True) for replica_id in others], timeout=120)
    try:
        yield
    finally:
        ray.get([drain(replica_id, False) for replica_id in others], timeout=120)


class Streamed(NamedTuple):
    """A streamed answer that ended as it should."""

    text: str
    headers: httpx.Headers

    def served_by(self, serving: System) -> tuple[str, str | None]:
        known = {each["replica_id"]: each["role"] for each in serving.snapshot()["replicas"]}
        first = self.headers.get("x-sluice-prefill-replica")
        return known[self.headers["x-sluice-replica"]], known[first] if first else None


def stream(
    serving: System, body: dict[str, Any], then: Callable[[int, str], None] = lambda *_: None
) -> Streamed:
    """A completion, checked to be whole; ``then`` gets the number of events and the replica."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
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
                then(len(events), answer.headers["x-sluice-replica"])
    assert done and not [event for event in events if "error" in event], events[-2:]
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["usage"]["completion_tokens"] == body["max_tokens"]
    choices = [choice for event in events for choice in event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    return Streamed("".join(choice["text"] for choice in choices), answer.headers)
