"""Agents that people run, from their packages, in loops with real tools, against vLLM with a model
that asks for these. They are not installed with the tests: `npm install -g`, and they are found."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.replica.config import EngineConfig
from sluice.replica.vllm.local_model import local_model
from tests.agent_clients import CLIENTS, PROOF, AgentClient
from tests.e2e.conftest import ASKING, PATIENT, System, system
from tests.known_profile import known_profile
from tests.router.scripted_model import DONE

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.release]

TEMPLATE = (
    # What Sluice knows the format of the calls by: "arguments".
    "{% if tools %}\x1etools\x1f<tool_call>{% endif %}"
    "{% for message in messages %}\x1e{{ message['role'] }}\x1f"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}\n{% endfor %}"
    "{% endif %}"
    "{% endfor %}\x1eassistant\x1f{# arguments #}"
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    cache = EngineConfig().cache_dir.expanduser()
    engine = {
        "model": str(local_model(cache, layers=1, hidden=64, max_positions=131_072)),
        "served_model_name": "local",
        "latency_profile": str(known_profile(tmp_path_factory.mktemp("profile"))),
        "grammar_check_s": 0,
        "vllm_args": {
            "dtype": "float32",
            "max-model-len": 131_072,
            "chat-template": TEMPLATE,
            "logits-processors": ["tests.replica.scripted_tokens:Scripted"],
        },
    }
    fields = {
        "controller": PATIENT,
        "replica": {"count": 1},
        "engine": engine,
        "router": {**ASKING, "classes": {"standard": {"ttft_ms": 60_000, "tpot_ms": 1_000}}},
    }
    with system(fields) as started:
        yield started


@pytest.mark.parametrize("agent", CLIENTS, ids=[each.command for each in CLIENTS])
def test_a_loop_with_a_sub_agent(serving: System, agent: AgentClient, tmp_path: Path) -> None:
    command, how = agent.start(tmp_path, serving.url)
    refused = serving.value("sluice_refusals_total")
    done = subprocess.run(
        command,
        **how,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and DONE in done.stdout, done.stdout + done.stderr
    proof = (how["cwd"] / PROOF).read_text().split()
    assert sorted(proof) == ["main", "main", "sub"], done.stdout + done.stderr
    assert serving.value("sluice_refusals_total") == refused
