"""A grammar that would stop engines, sent to an application of two vLLM replicas."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.conftest import System, wait_until
from tests.replica.test_vllm_grammar import POISON

OTHERS = 6


def ask(serving: System, number: int, **body: Any) -> Any:
    """A short chat, or what ``body`` makes of it."""
    # It repeats what fails, as OpenAI's client does by itself.
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", timeout=300)
    given = {"max_tokens": 4, "temperature": 0, **body}
    return client.chat.completions.create(
        model="local", messages=[{"role": "user", "content": f"Say {number}"}], **given
    )


def conditions(serving: System) -> list[str]:
    """Of the replicas, as the controller knows."""
    return [each["condition"] for each in serving.snapshot()["replicas"]]


def check_poison(serving: System) -> None:
    """The request is refused as costly; others are answered meanwhile, and no replica is blamed."""
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
