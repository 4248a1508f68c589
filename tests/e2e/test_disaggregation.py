from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.conftest import ASKING, LENIENT, System, system, wait_until
from tests.e2e.pools import Streamed, fresh, only, roles, stream, wait_until_busy
from tests.injuries import replica

pytestmark = pytest.mark.ray

POOLS = {"prefill": 2, "decode": 2, "mixed": 1}
"""Replicas by role. Those that decode are in two pools, of which one is faster."""
TOKENS = 30
BODY: dict[str, Any] = {"model": "sim", "prompt": "word " * 200, "max_tokens": TOKENS}
# The prompt takes about half a second, so does the hand-over of its KV, and so do the tokens.
FIELDS: dict[str, Any] = {
    "name": "disaggregated",
    "controller": LENIENT,
    "engine": {
        "kind": "simulated",
        "model": "sim",
        "simulated": {
            "step_s": 0.02,
            "token_s": 0.002,
            "context_token_s": 0.0,
            "transfer_s": 0.5,
        },
    },
    "replica": {
        "num_cpus": 0.1,
        "drain_timeout_s": 10,
        "pools": {
            "prefill": {"count": 2},
            "decode": {"count": 1},
            "fast": {"role": "decode", "engine": {"simulated": {"step_s": 0.015}}},
            "mixed": {"count": 1},
        },
    },
    "router": {**ASKING, "classes": {"standard": {"ttft_ms": 60_000, "tpot_ms": 2_000}}},
}


@pytest.fixture(scope="module")
def serving() -> Iterator[System]:
    with system(FIELDS) as running:
        wait_until(lambda: roles(running) == POOLS, "all have reported")
        yield running


@pytest.fixture(scope="module")
def text(serving: System) -> str:
    """The answer when nothing goes wrong, of a mixed replica."""
    with only(serving, "mixed"):
        answer = serving.post(BODY).json()
    found = answer["choices"][0]["text"]
    assert isinstance(found, str) and len(found.split()) > TOKENS / 4
    return found


def test_no_request_is_lost_whoever_dies_and_when(serving: System, text: str) -> None:
    with only(serving, "prefill", "decode"), ThreadPoolExecutor(1) as threads:

        def asked() -> Future[Streamed]:
            return threads.submit(stream, serving, BODY)

        # Where the controller is late, a request goes whole where Serve chooses.
        def is_split() -> bool:
            whole = asked().result()
            assert whole.text == text
            return whole.served_by(serving) == ("decode", "prefill")

        wait_until(is_split, "two replicas serve a request")

        def kill_at(role: str, idle: str | None = None) -> None:
            busy = None
            while busy is None:
                answer = asked()
                busy = wait_until_busy(serving, role, idle, answer.done)
            replica(busy).kill()
            assert answer.result().text == text

        kill_at("prefill")
        kill_at("decode", idle="prefill")

        def kill_midway(events: int, replica_id: str) -> None:
            if events == 3:
                replica(replica_id).kill()

        assert stream(serving, BODY, kill_midway).text == text
    wait_until(lambda: serving.value("sluice_resumes_total") >= 1, "it is counted")
    assert serving.value("sluice_split_decisions_total") >= 3
    wait_until(lambda: serving.value("sluice_kv_transfers_total") >= 1, "so are hand-overs")
    assert serving.value("sluice_replicas", role="mixed") == 1


@pytest.mark.release
def test_every_mode_serves_while_replicas_come_and_go(serving: System) -> None:
    """Clients keep asking, for what can be split and for what cannot, while each pool loses one."""
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)

    def plain(number: int) -> int:
        answer = client.completions.create(
            model="sim", prompt=f"word {number}", max_tokens=TOKENS, n=1 + number % 2
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens // (1 + number % 2)

    wait_until(lambda: set(roles(serving)) == set(POOLS), "each role is there")
    doomed = [next(each for each in fresh(serving) if each["role"] == role) for role in POOLS]
    with ThreadPoolExecutor(12) as threads:
        bodies = [{**BODY, "prompt": f"{'word ' * 20}{number}"} for number in range(12)]
        streams = [threads.submit(stream, serving, body) for body in bodies]
        for each in doomed:
            replica(each["replica_id"]).kill()
        assert list(threads.map(plain, range(12))) == [TOKENS] * 12
        assert all(answer.result().text for answer in streams)
