from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.benchmarks.live.client import End, Json, replay, stream_body
from sluice.router.config import RouterConfig
from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival, Workload
from tests import injuries
from tests.e2e.best_effort_stream import BLOCKS, check_best_effort
from tests.e2e.conftest import ASKING, PATIENT, System, system, wait_until
from tests.e2e.poisoned import ask, conditions
from tests.e2e.urgent import BATCH_TOKENS, check_urgent
from tests.known_profile import known_profile
from tests.replica.preemption.waits import random_prompt
from tests.test_metrics_document import documented

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

_PROMPT = "The river was quiet and"


@pytest.fixture(scope="module")
def batch_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, batch_log: Path) -> Iterator[System]:
    # Besides the usual classes, one that can be promised and two that no engine can hold.
    classes = {name: entry.model_dump() for name, entry in RouterConfig().classes.items()} | {
        "easy": {"ttft_ms": 60_000, "tpot_ms": 1_000, "priority": 2},
        "staged": {"ttft_ms": 60_000, "tpot_ms": 1_000},
        "hopeless": {"ttft_ms": 0.01},
        "strict": {"ttft_ms": 0.01, "when_unattainable": "reject"},
    }
    fields = {
        "controller": PATIENT,
        "engine": {
            "policy": "slidebatching",
            "grammar_check_s": 0,
            "latency_profile": str(known_profile(tmp_path_factory.mktemp("profile"))),
            "batch_log": str(batch_log),
            "vllm_args": {
                "max-model-len": 4096,
                "max-num-batched-tokens": BATCH_TOKENS,
                "num-gpu-blocks-override": BLOCKS,
                "block-size": 32,
            },
        },
        "router": {**ASKING, "classes": classes},
    }
    with system(fields) as started:
        yield started


@pytest.fixture
def client(serving: System) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("slo", [None, {"ttft_ms": 5_000, "tpot_ms": 500, "priority": 3}])
def test_chat_and_completions_streamed_and_plain(
    client: openai.OpenAI, slo: dict[str, Any] | None
) -> None:
    extra = {"slo": slo} if slo else {}
    messages: Any = [{"role": "user", "content": "Say hello."}]
    chat = client.chat.completions.create(
        model="local", messages=messages, max_tokens=8, temperature=0, extra_body=extra
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 8
    chat_stream = client.chat.completions.create(
        model="local", messages=messages, max_tokens=8, temperature=0, stream=True, extra_body=extra
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat_stream if chunk.choices]
    assert "".join(pieces) == chat.choices[0].message.content

    plain = client.completions.create(
        model="local", prompt=_PROMPT, max_tokens=8, temperature=0, extra_body=extra
    )
    stream = client.completions.create(
        model="local",
        prompt=_PROMPT,
        max_tokens=8,
        temperature=0,
        stream=True,
        extra_body=extra,
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text


def test_answers_name_replica_request_and_class(serving: System) -> None:
    loop = {"id": "six turns", "deadline_ms": 3_600_000}
    body = {"model": "local", "prompt": "one two", "max_tokens": 4, "slo": {"loop": loop}}
    answers = [serving.post(body, x_slo_class="interactive") for _ in range(6)]
    assert {answer.headers["x-sluice-class"] for answer in answers} == {"interactive"}
    left_ms = [float(answer.headers["x-sluice-loop-remaining-ms"]) for answer in answers]
    assert 3_600_000 > left_ms[0] > left_ms[-1] > 0
    assert left_ms == sorted(left_ms, reverse=True)
    assert len({answer.headers["x-sluice-request-id"] for answer in answers}) == 6
    known = {replica["replica_id"] for replica in serving.snapshot()["replicas"]}
    assert {answer.headers["x-sluice-replica"] for answer in answers} <= known


def _send(serving: System, service_class: str) -> httpx.Response:
    body = {"model": "local", "prompt": "one two three", "max_tokens": 4}
    return serving.post(body, x_slo_class=service_class)


def test_a_promise_is_said_with_its_time_and_kept(serving: System) -> None:
    for _ in range(5):
        answer = _send(serving, "easy")
        assert answer.status_code == 200
        assert answer.headers["x-sluice-admission"] == "guaranteed"
        assert 0 < float(answer.headers["x-sluice-predicted-ttft-ms"]) < 60_000
    missed = {"class": "easy", "outcome": "missed"}
    assert serving.value("sluice_promises_total", **missed) == 0


@pytest.mark.parametrize(
    ("second", "admission"),
    [({"ttft_ms": 30_000, "tpot_ms": 1_000}, "guaranteed"), ({"tpot_ms": 0.01}, "best-effort")],
)
def test_a_promise_covers_every_stage(
    serving: System, second: dict[str, Any], admission: str
) -> None:
    """The first stage is easy for any engine: what is promised depends on the second one."""
    stages = [{"until": {"tokens": 4}, "ttft_ms": 60_000, "tpot_ms": 1_000}]
    stages.append({"until": "end", **second})
    body = {
        "model": "local",
        "prompt": "one two three",
        "max_tokens": 12,
        "slo": {"stages": stages},
    }

    def judged(outcome: str) -> float:
        name = "sluice_promises_total"
        return serving.value(name, **{"class": "staged", "outcome": outcome})

    before = judged("kept")
    answer = serving.post(body, x_slo_class="staged")
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 12
    assert answer.headers["x-sluice-admission"] == admission
    kept = float(admission == "guaranteed")
    wait_until(
        lambda: judged("kept") - before == kept,
        "the promise is on the page",
    )
    assert judged("missed") == 0.0


def test_what_cannot_be_promised_is_best_effort_or_refused_as_its_class_says(
    serving: System, client: openai.OpenAI
) -> None:
    for service_class in ("hopeless", "batch"):
        answer = _send(serving, service_class)
        assert answer.status_code == 200
        assert answer.headers["x-sluice-admission"] == "best-effort"
        assert "x-sluice-predicted-ttft-ms" not in answer.headers
    refused = _send(serving, "strict")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "slo_unattainable"
    with pytest.raises(openai.RateLimitError):
        client.completions.create(
            model="local", prompt="one", max_tokens=1, extra_headers={"x-slo-class": "strict"}
        )


def tokens_body(model: str, number: int, arrival: Arrival) -> Json:
    """A completion whose prompt has exactly the tokens of ``arrival``."""
    prompt = random_prompt(random.Random(number), arrival.prompt_tokens)
    return stream_body(model, prompt, arrival.output_tokens, temperature=0, ignore_eos=True)


def test_prompts_of_tokens_are_answered_through_the_whole_path(serving: System) -> None:
    slo = SLO(ttft_s=60.0, service_class="easy")
    arrivals = tuple(Arrival(0.05 * index, 40 + 60 * index, 1, slo) for index in range(4))
    url, workload = f"{serving.url}/v1/completions", Workload("few", arrivals)
    outcomes = asyncio.run(replay(url, "local", workload, body=tokens_body, exact=False))
    assert [(each.end, each.attained) for each in outcomes] == [(End.ANSWERED, True)] * 4


def test_concurrent_requests_use_both_replicas(serving: System) -> None:
    """More prompt tokens at once than one replica can take before the other is the better one."""

    async def send() -> list[str]:
        async with httpx.AsyncClient(base_url=serving.url, timeout=120) as http:
            body = {"model": "local", "prompt": "the of and to in a " * 100, "max_tokens": 2}
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json=body) for _ in range(12))
            )
        assert [answer.status_code for answer in answers] == [200] * 12
        return [answer.headers["x-sluice-replica"] for answer in answers]

    assert len(set(asyncio.run(send()))) == 2


def test_large_requests_and_answers_come_through_once(serving: System) -> None:
    """Each is above the 4 MiB that gRPC allows by itself, or would be if it were served."""
    text = "the river was quiet, and the mill stood still. " * 32_000  # 1.5 MB
    with httpx.Client(base_url=serving.url, timeout=120) as http:

        def blamed() -> float:
            notices = serving.value("sluice_failure_notices_total", reason="failed")
            return notices + serving.value("sluice_retries_total")

        before = blamed()
        answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
        assert answer.status_code == 200
        assert len(answer.content) > 4 << 20
        tokens = answer.json()["tokens"]
        assert answer.json()["count"] == len(tokens) == len(answer.json()["token_strs"])
        answer = http.post("/detokenize", json={"tokens": tokens})
        assert answer.status_code == 200
        assert text in answer.json()["prompt"]

        def complete(prompt: list[int], **fields: Any) -> httpx.Response:
            body = {"model": "local", "prompt": prompt, "max_tokens": 1, **fields}
            return http.post("/v1/completions", json=body)

        answer = complete(tokens)
        assert answer.status_code == 400
        assert "this model takes at most 4096 tokens" in answer.json()["error"]["message"]
        answer = complete(tokens[:4000], prompt_logprobs=20)
        assert answer.status_code == 400
        assert "allowed are 32768" in answer.json()["error"]["message"]
        answer = complete(tokens[:1500], prompt_logprobs=20)
        assert answer.status_code == 200
        assert len(answer.json()["choices"][0]["prompt_logprobs"]) == 1500
        assert blamed() == before


@pytest.mark.parametrize(
    ("change", "status", "names"),
    [
        ({"slo": {"ttft_ms": -1}}, 400, "ttft_ms"),
        ({"slo": {"class": "platinum"}}, 400, "interactive"),
        ({"model": "another"}, 404, "another"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "word " * 9000}, 400, "4096"),
        ({"temperature": -3}, 400, "temperature"),
    ],
)
def test_wrong_input_is_refused_by_name(
    serving: System, change: dict[str, Any], status: int, names: str
) -> None:
    body = {"model": "local", "prompt": "one two", "max_tokens": 4, **change}
    answer = serving.post(body)
    assert answer.status_code == status
    assert names in answer.json()["error"]["message"]


def test_disconnect_cancels_the_work_in_the_engine(serving: System) -> None:
    body = {
        "model": "local",
        "prompt": "one",
        "max_tokens": 3500,
        "min_tokens": 3500,
        "stream": True,
    }
    with httpx.stream("POST", f"{serving.url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()  # kept: the connection closes with it
        assert next(lines).startswith("data: ")
        wait_until(lambda: serving.live() == 1, "the engine works on it", show=serving.snapshot)
    wait_until(lambda: serving.live() == 0, "the engine dropped it")


def test_disconnect_during_prefill_cancels(serving: System) -> None:
    """The client leaves before any byte came back."""
    body = {"model": "local", "prompt": ["the of and to in a " * 300] * 8, "max_tokens": 500}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{serving.url}/v1/completions", json=body, timeout=0.5)
    wait_until(lambda: serving.live() == 0, "the engine dropped it")


def test_the_accounts_of_engines_have_all_of_their_batches_time(
    serving: System, batch_log: Path
) -> None:
    """After requests that ended and that were cut off, and the engines' own at their start."""
    serving.post({"model": "local", "prompt": _PROMPT, "max_tokens": 8}, x_slo_class="easy")

    def seconds() -> tuple[float, float, float]:
        logs = [path.read_text().splitlines() for path in batch_log.glob("*.jsonl")]
        batches = [json.loads(line) for lines in logs for line in lines]
        logged = sum(batch["end_s"] - batch["now_s"] for batch in batches if batch["ran"])
        names = "sluice_engine_busy_seconds_total", "sluice_engine_seconds_total"
        busy, accounts = (serving.value(name) for name in names)
        return logged, busy, accounts

    def agree() -> bool:
        logged, busy, accounts = seconds()
        return logged == pytest.approx(busy, rel=0.01) and busy == pytest.approx(accounts, rel=0.01)

    wait_until(agree, "the accounts agree with the logs of batches", show=seconds)
    parts = [
        serving.value("sluice_engine_seconds_total", client=client, **{"class": name})
        for client, name in (("unnamed", "easy"), ("unnamed", "standard"), ("unattributed", "none"))
    ]
    assert min(parts) > 0
    assert serving.value("sluice_engine_kv_block_seconds_total", client="unnamed") > 0


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


def test_metrics_are_one_page_that_prometheus_reads(serving: System) -> None:
    body = {
        "model": "local",
        "prompt": "one",
        "max_tokens": 4,
        "stream": True,
        "slo": {"class": "interactive"},
    }
    serving.post(body)

    def samples() -> dict[str, float]:
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(serving.metrics()):
            assert {family.name, f"{family.name}_total"} & documented().keys(), family.name
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    expected = (
        "sluice_requests_total",
        "sluice_ttft_seconds_count",
        "sluice_tpot_seconds_count",
        "sluice_attained_total",
        "sluice_tdg_gain_total",
        "sluice_decision_seconds_count",
        "sluice_plan_seconds_count",
        "sluice_step_time_ratio_count",
        "sluice_replica_waiting_requests",
        "sluice_replica_kv_blocks_free",
    )
    wait_until(
        lambda: all(name in samples() for name in expected),
        f"all of {expected}",
    )
    found = samples()
    assert found["sluice_requests_total"] >= 1
    assert found["sluice_plan_seconds_count"] > 0
    ways = (("sluice_replica_calls_total", "connection"), ("sluice_streams_total", "router"))
    wait_until(lambda: all(serving.value(name, way=way) for name, way in ways), "not by Serve")


def test_a_stopped_replica_loses_nothing(serving: System) -> None:
    """Serve stops one of two replicas while both stream; every stream ends whole."""

    async def stream(http: httpx.AsyncClient, number: int) -> tuple[int, bool]:
        body = {
            "model": "local",
            "prompt": f"request {number}",
            "max_tokens": 120,
            "min_tokens": 120,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens, done = 0, False
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    usage = json.loads(line[6:]).get("usage")
                    tokens = usage["completion_tokens"] if usage else tokens
        return tokens, done

    async def load() -> list[tuple[int, bool]]:
        async with httpx.AsyncClient(base_url=serving.url, timeout=180) as http:
            first = [asyncio.create_task(stream(http, number)) for number in range(12)]
            await asyncio.to_thread(wait_until, lambda: serving.live() == 12, "all stream")
            await asyncio.to_thread(serving.scale, 1)
            second = [asyncio.create_task(stream(http, number)) for number in range(12, 24)]
            return await asyncio.gather(*first, *second)

    assert asyncio.run(load()) == [(120, True)] * 24
    wait_until(lambda: len(serving.snapshot()["replicas"]) == 1, "one replica left")


def test_an_urgent_request_passes_long_prefills_at_one_replica(
    serving: System, batch_log: Path
) -> None:
    check_urgent(serving, batch_log)


@pytest.mark.release
def test_a_best_effort_stream_survives_promised_work_at_one_replica(serving: System) -> None:
    check_best_effort(serving)
