"""Grammars that would stop engines, and requests whose engine hangs, on real vLLM engines that try
no grammar before. Those that do are in test_vllm_serving.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests import injuries
from tests.e2e.conftest import PATIENT, System, system, wait_until
from tests.e2e.poisoned import ask, check_poison, conditions
from tests.known_profile import known_profile

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    fields = {
        "name": "poison",
        "controller": PATIENT,
        "engine": {
            "latency_profile": str(known_profile(tmp_path_factory.mktemp("profile"))),
            "grammar_check_s": 0,
            "vllm_args": {"max-model-len": 2048},
        },
        "replica": {"count": 2},
    }
    with system(fields) as started:
        yield started


def test_a_poisoned_grammar_is_its_senders_alone(serving: System) -> None:
    check_poison(serving)


def test_structured_output_is_not_tried_again_after_a_hang(serving: System) -> None:
    wanted = {"structured_outputs": {"regex": "[a-z]{1500}"}}

    def busy() -> list[str]:
        rows = serving.snapshot()["replicas"]
        return [row["replica_id"] for row in rows if row["running"]]

    found: list[str] = []
    wait_until(lambda: not busy(), "earlier requests have ended")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, serving, 0, max_tokens=1500, extra_body=wanted)
        wait_until(lambda: bool(found.extend(busy()) or found), "an engine has it", every_s=0.02)
        with injuries.replica(found[0]).engine().frozen():
            with pytest.raises(openai.InternalServerError) as error:
                asked.result()
            assert error.value.code == "request_suspected"
            assert error.value.response.headers["x-should-retry"] == "false"
            assert ask(serving, 1).usage.completion_tokens == 4

    def both_serve() -> bool:
        # A replica leaves quarantine by a request that it answers.
        ask(serving, 2)
        return conditions(serving) == ["fresh"] * 2

    wait_until(both_serve, "both serve again", every_s=0.2)
