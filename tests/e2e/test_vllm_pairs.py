from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from numba import njit
from numba.core import event

from sluice.replica.config import EngineConfig
from sluice.replica.vllm.local_model import local_model
from tests.e2e.conftest import ASKING, PATIENT, System, system, wait_until
from tests.known_profile import known_profile

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.release]

THINK, END = "<think>", "</think>"
JUDGED = ("slo_requests", "attained")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The local model, two of whose tokens are the marks of reasoning."""
    folder = tmp_path_factory.mktemp("model") / "thinks"
    shutil.copytree(local_model(EngineConfig().cache_dir.expanduser()), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for mark, word in zip((THINK, END), sorted(words, key=words.get)[-2:], strict=True):
        number = words.pop(word)
        merges[:] = [pair for pair in merges if "".join(pair) != word]
        words[mark] = number
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": number, "content": mark, **plain})
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[System]:
    fields = {
        "controller": {**PATIENT, "admission": "slos_serve"},
        "engine": {
            "model": str(model),
            "served_model_name": "local",
            "grammar_check_s": 0,
            "latency_profile": str(known_profile(tmp_path_factory.mktemp("profile"))),
            "vllm_args": {
                "dtype": "float32",
                "max-model-len": 4096,
                "reasoning-parser": "deepseek_r1",
                "worker-cls": "tests.e2e.open_worker.OpenWorker",
            },
        },
        "replica": {"count": 2},
        "router": {
            **ASKING,
            "classes": {
                "standard": {"ttft_ms": 60_000, "tpot_ms": 1_000},
                "batch": {"ttft_ms": None},
                "staged": {"ttft_ms": 60_000, "tpot_ms": 1_000},
                "strict": {"ttft_ms": 400, "tpot_ms": 60, "when_unattainable": "reject"},
            },
        },
    }
    with system(fields) as started:
        yield started


def replicas(serving: System) -> dict[str, Any]:
    """The actors of the engines by their ids."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    ids = [row["replica_id"] for row in serving.snapshot()["replicas"]]
    (found,) = ({each: name for each in ids for name in names if name.endswith(each)},)
    return {each: ray.get_actor(name, "serve") for each, name in found.items()}


def listen(_: object) -> None:
    """Count what numba compiles in a controller from now on."""
    sys.compiled = event.RecordingListener()  # type: ignore[attr-defined]
    event.register("numba:compile", sys.compiled)  # type: ignore[attr-defined]


def compiled(_: object) -> int:
    return len(sys.compiled.buffer)  # type: ignore[attr-defined]


def compile_one(_: object) -> None:
    njit(lambda value: value + 1)(1)


def in_engine(replica: Any, method: str, *args: Any) -> Any:
    """What a method of the worker returns, in the process of a replica's engine."""

    def asked() -> list[Any]:
        found: list[Any] = ray.get(replica.__ray_call__.remote(answer), timeout=60)
        return found

    ray.get(replica.__ray_call__.remote(ask_engine, method, *args), timeout=60)
    wait_until(lambda: bool(asked()), "the engine answers")
    return asked()[0]


def ask_engine(replica: Any, method: str, *args: Any) -> None:
    """In a replica's process, on the event loop that the engine's client needs, too."""
    ours = replica._replica_impl._user_callable_wrapper._callable
    llm = ours._ranks.replicas[0].engine._llm
    call, loop = llm.collective_rpc(method, args=args), llm.output_handler.get_loop()
    sys.answer = asyncio.run_coroutine_threadsafe(call, loop)  # type: ignore[attr-defined]


def answer(_: object) -> list[Any]:
    """One for each worker, once they have answered."""
    call = sys.answer  # type: ignore[attr-defined]
    return list(call.result()) if call.done() else []


def test_a_burst_compiles_nothing(serving: System) -> None:
    """Of which not all can be promised, with every kind of objective."""
    controller, engines = serving.controller(), replicas(serving).values()
    assert len(engines) == 2
    ray.get(controller.__ray_call__.remote(listen))

    def in_engines() -> list[int]:
        return [in_engine(each, "compilations")[1] for each in engines]

    before = in_engines()

    def ask(number: int) -> int:
        stages = [{"until": {"tokens": 4}, "ttft_ms": 5_000, "tpot_ms": 500}]
        slo: list[dict[str, Any]] = [
            {"class": "strict"},
            {"class": "standard", "priority": 5},
            {"class": "batch"},
            {"class": "standard", "e2e_ms": 3_000},
            {"class": "staged", "stages": [*stages, {"until": "end", "e2e_ms": 9_000}]},
            {"class": "strict", "ttft_ms": 250.5},
        ]
        body = {
            "model": "local",
            "prompt": "word " * (20 + 90 * (number % 7)),
            "max_tokens": 10 + number % 40,
            "stream": number % 3 > 0,
            "slo": slo[number % len(slo)],
        }
        return serving.post(body).status_code

    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(ask, range(96)))
    assert set(answers) == {200, 429}, answers
    assert in_engines() == before
    assert ray.get(controller.__ray_call__.remote(compiled)) == 0
    # Both counts can rise.
    ray.get(controller.__ray_call__.remote(compile_one))
    assert ray.get(controller.__ray_call__.remote(compiled)) > 0
    for each in engines:
        in_engine(each, "compile_one")
    assert all(now > then for now, then in zip(in_engines(), before, strict=True))


def test_the_first_token_after_the_reasoning_is_judged_in_a_stream(serving: System) -> None:
    """The token that ends it has no text of its own."""

    def staged(name: str) -> float:
        return serving.value(f"sluice_{name}_total", **{"class": "staged"})

    def attained(ttft_ms: float) -> float:
        stages = [
            {"until": "reasoning_end", "ttft_ms": 60_000, "tpot_ms": 1_000},
            {"until": "end", "ttft_ms": ttft_ms, "tpot_ms": 1_000},
        ]
        body = {
            "model": "local",
            "messages": [{"role": "user", "content": f"Think. {THINK}"}],
            "max_tokens": 30,
            "ignore_eos": True,
            "thinking_token_budget": 12,
            "stream": True,
            "slo": {"class": "staged", "stages": stages},
        }
        before = [staged(name) for name in JUDGED]
        answer = httpx.post(f"{serving.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        check_reasoned(answer)

        def ended() -> bool:
            return staged(JUDGED[0]) == before[0] + 1

        wait_until(ended, "it is counted")
        return staged(JUDGED[1]) - before[1]

    assert [attained(ttft_ms) for ttft_ms in (60_000, 0.01) * 2] == [1, 0, 1, 0]


def check_reasoned(answer: httpx.Response) -> None:
    """It has reasoning and an answer."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    for part in ("reasoning", "content"):
        assert any(delta.get(part) for delta in deltas), (part, answer.text)
