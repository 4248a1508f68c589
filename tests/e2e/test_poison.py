"""Grammars that would stop engines, and requests whose engine hangs, on real vLLM engines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

from benchmarks import injuries
from tests.e2e.conftest import System, system, wait_until
from tests.replica.test_vllm_grammar import POISON

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

OTHERS = 6


@pytest.fixture(scope="module", params=["tried before", "bounded in the engine"])
def serving(request: pytest.FixtureRequest) -> Iterator[System]:
    engine: dict[str, Any] = {"profile_budget_s": 1, "vllm_args": {"max-model-len": 2048}}
    if request.param == "bounded in the engine":
        engine["grammar_check_s"] = 0
    with system({"name": "poison", "engine": engine, "replica": {"count": 2}}) as started:
        yield started


def ask(serving: System, number: int, **body: Any) -> Any:
    # It repeats what fails, as OpenAI's client does by itself.
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", timeout=300)
    given = {"max_tokens": 4, "temperature": 0, **body}
    return client.chat.completions.create(
        model="local", messages=[{"role": "user", "content": f"Say {number}"}], **given
    )


def conditions(serving: System) -> list[str]:
    return [each["condition"] for each in serving.snapshot()["replicas"]]


def test_a_poisoned_grammar_is_its_senders_alone(serving: System) -> None:
    grammar = {"structured_outputs": {"grammar": POISON}}
    with ThreadPoolExecutor(OTHERS + 1) as threads:
        poison = threads.submit(ask, serving, 0, max_tokens=200, extra_body=grammar)
        others: list[Future[Any]] = []
        seen: set[str] = set()

        def others_go_on() -> bool:
            others.append(threads.submit(ask, serving, len(others) + 1))
            assert others[-1].result().usage.completion_tokens == 4
            seen.update(conditions(serving))
            return poison.done() and len(others) >= OTHERS

        wait_until(others_go_on, "the poisoned request ends", every_s=0.1)
        with pytest.raises(openai.BadRequestError, match="costly"):
            poison.result()
    assert seen == {"fresh"}
    assert conditions(serving) == ["fresh", "fresh"]


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
