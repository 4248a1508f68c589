"""A request whose replica is killed as soon as the request is in its engine. One router, as each
keeps its own list of what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx

from sluice.benchmarks.live.client import prompt_text
from tests import injuries
from tests.e2e.conftest import wait_until
from tests.faults.load import Load
from tests.faults.replicas import FLEET
from tests.faults.scenario import RECOVERY_S, Scenario, Setting, Trial

_POISON_TOKENS = 7_000
_POISON_BLOCKS = 300
"""KV blocks in use that only the poisoned request needs: the load keeps some 10 for each of its."""

_LOAD = Load(output_tokens=(10, 30))


def _fleet(replicas: int) -> Setting:
    fields: dict[str, Any] = {
        **FLEET.fields,
        "name": f"poison-{replicas}",
        "replica": {"count": replicas, "num_cpus": 0.1},
        "router": {**FLEET.fields["router"], "replicas": 1},
    }
    return Setting(fields)


def poisoned(trial: Trial) -> Callable[[], bool]:
    """It ends with an error after two replicas, or three among many; its repeat is refused."""
    body = {
        "model": trial.config.fleets[0].model,
        "prompt": prompt_text(10**6, _POISON_TOKENS),
        "max_tokens": 200,
    }
    lost: list[str] = []

    def send() -> httpx.Response:
        answers: list[httpx.Response] = []

        def taken() -> bool:
            answers.append(httpx.post(f"{trial.url}/v1/completions", json=body, timeout=300))
            return _code(answers[-1]) not in ("no_replica", "model_starting")

        # On a busy machine the next replica may take longer to start than a request waits for it.
        wait_until(taken, "there is a replica", RECOVERY_S)
        return answers[-1]

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(send)

        def takes_what_it_is_at() -> bool:
            for row in trial.snapshot()["replicas"]:
                used = row["kv_blocks_total"] - row["kv_blocks_free"]
                if used >= _POISON_BLOCKS and row["replica_id"] not in lost:
                    with suppress(injuries.MissingError):
                        injuries.replica(row["replica_id"]).kill()
                        lost.append(row["replica_id"])
            return asked.done()

        wait_until(takes_what_it_is_at, "the poisoned request ends", show=lambda: lost)
        answers = [asked.result(), send()]
    told = [(each.status_code, _code(each)) for each in answers]
    assert told == [(500, "request_suspected"), (422, "request_quarantined")], (told, lost)
    assert len(lost) in (2, 3), lost
    return trial.replaced(*lost)


def _code(answer: httpx.Response) -> str | None:
    code: str | None = answer.json().get("error", {}).get("code")
    return code


SCENARIOS = tuple(
    Scenario(
        f"poison request, {replicas} replicas",
        _fleet(replicas),
        poisoned,
        _LOAD,
        may_fail=True,
        may_refuse=True,
        longer_s=10.0,
        quick=False,
    )
    for replicas in (2, 3)
)
