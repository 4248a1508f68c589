from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from tests.e2e.conftest import ASKING, LENIENT, System, system, wait_until
from tests.e2e.poisoned import check_poison
from tests.e2e.pools import (
    Streamed,
    fresh,
    only,
    roles,
    stream,
    there,
)
from tests.injuries import Process, replica
from tests.known_profile import known_profile
from tests.replica.attentive import attentive_model

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.release]

PAIR = {"prefill": 1, "decode": 1}
PREFILL = {
    "policy": "slidebatching",
    "preemption": True,
}
TOKENS = 24
FIELDS: dict[str, Any] = {
    "name": "disaggregated-vllm",
    "controller": LENIENT,
    "engine": {
        "transfer": {"connector": "tcp"},
        "vllm_args": {
            "max-model-len": 2048,
            "max-num-batched-tokens": 512,
            "dtype": "float32",
            "kv-cache-memory-bytes": 64 << 20,
        },
    },
    "replica": {
        "num_cpus": 0.1,
        "drain_timeout_s": 10,
        # Engines stand still here until others have come to where they are to be, and are not left.
        "hung_after_s": 600,
        "pools": {
            "prefill": {"count": PAIR["prefill"], "engine": PREFILL},
            "decode": {"count": PAIR["decode"]},
        },
    },
    "router": {**ASKING, "classes": {"standard": {"ttft_ms": 60_000, "tpot_ms": 2_000}}},
}


def body(stage: str) -> dict[str, Any]:
    """A request whose long prompt no other stage has: what lies in caches needs no hand-over."""
    prompt = f"{stage}: " + "please write a story about a school, a mill and a garden. " * 110
    return {"model": "local", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}


def whole(serving: System, stage: str, by: str) -> str:
    """The text of the engine of a role alone, computed anew."""
    with only(serving, by):
        answer = stream(serving, {**body(stage), "cache_salt": f"{stage} anew"})
    assert answer.served_by(serving) == (by, None)
    return answer.text


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("model")
    own = {"model": str(attentive_model(directory)), "served_model_name": "local"}
    profile = {"latency_profile": str(known_profile(directory))}
    engine = {**FIELDS["engine"], **own, **profile}
    with system({**FIELDS, "engine": engine}) as started:
        yield started


@pytest.fixture
def pair(serving: System) -> dict[str, Process]:
    """Both replicas, once both are there."""
    wait_until(lambda: roles(serving) == PAIR, "both serve")

    def used() -> bool:
        answer = stream(serving, body(str(uuid4())))
        return answer.served_by(serving) == ("decode", "prefill")

    # A new replica says hello before Serve tells routers where it is.
    wait_until(used, "both are used together")
    return {each["role"]: replica(each["replica_id"]) for each in fresh(serving)}


@pytest.fixture
def asked(serving: System) -> Iterator[Any]:
    """Asks in the background."""
    with ThreadPoolExecutor(2) as threads:

        def ask(stage: str) -> Future[Streamed]:
            return threads.submit(stream, serving, body(stage))

        yield ask


def at(serving: System, role: str) -> int:
    """API calls at the replica of a role, whether or not its engine knows."""
    (found,) = there(serving, role)
    return int(serving.value("sluice_replica_live_requests", replica=found["replica_id"]))


def test_two_engines_give_the_text_of_one(serving: System, pair: dict[str, Process]) -> None:
    before = serving.value("sluice_kv_transfers_total")
    answer = stream(serving, body("undisturbed"))
    assert answer.served_by(serving) == ("decode", "prefill")
    assert answer.text == whole(serving, "undisturbed", by="decode")
    wait_until(lambda: serving.value("sluice_kv_transfers_total") > before, "it is counted")
    assert serving.value("sluice_kv_transfer_failures_total") == 0


def test_a_grammar_that_would_stop_engines_is_refused_before_they_see_it(
    serving: System, pair: dict[str, Process]
) -> None:
    check_poison(serving)


def test_decode_dies_before_a_first_token_and_in_mid_stream(
    serving: System, pair: dict[str, Process], asked: Any
) -> None:
    started: list[Future[Streamed]] = []

    def then(events: int, _: str) -> None:
        # Early: an event may hold several tokens, so nobody knows how many events there will be.
        if events == 2:
            pair["decode"].engine().freeze()
            started.append(asked("begun"))
            wait_until(lambda: at(serving, "decode") == 2, "another prompt is computed")
            pair["decode"].kill()

    midway = stream(serving, body("midway"), then)
    assert midway.served_by(serving) == ("decode", "prefill")
    assert midway.text == whole(serving, "midway", by="prefill")
    assert started[0].result().text == whole(serving, "begun", by="prefill")
