from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from math import hypot
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.replica.config import EngineConfig
from sluice.replica.vllm.local_model import local_model
from tests.documents import ROOT, marked
from tests.e2e.conftest import ASKING, PATIENT, System, system, wait_until
from tests.known_profile import known_profile
from tests.lora_adapter import write_adapter

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

DOCUMENT = ROOT / "docs" / "clients.md"
_LENGTH = {"max-model-len": 4096}
_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)
"""What ``vllm bench serve`` runs; the command does not start in the CPU build."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of adapters that are loaded while serving."""
    return tmp_path_factory.mktemp("loaded")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[System]:
    model = local_model(EngineConfig().cache_dir.expanduser())
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "tuned", model)
    chat = {
        **_LENGTH,
        # The model is noise: between the marks of JSON it would write blanks for ever.
        "structured-outputs-config": {
            "backend": "xgrammar",
            "disable_any_whitespace": True,
        },
        "enable-lora": True,
        "max-lora-rank": 8,
        "max-loras": 2,
        "lora-modules": [{"name": "local-tuned", "path": str(adapter)}],
    }
    profile = str(known_profile(tmp_path_factory.mktemp("profile")))
    engine = {"latency_profile": profile, "grammar_check_s": 0}
    fields = {
        "controller": PATIENT,
        "replica": {"count": 1},
        "models": {
            "local": {"engine": {**engine, "vllm_args": chat, "adapters_dir": str(adapters)}},
            "embedder": {"engine": {**engine, "vllm_args": {**_LENGTH, "runner": "pooling"}}},
        },
    }
    fields["router"] = {
        **ASKING,
        "classes": {
            "standard": {
                "ttft_ms": 60_000,
                "tpot_ms": 1_000,
                "service_tiers": ["auto", "default"],
            },
            "interactive": {"ttft_ms": 60_000},  # the documents name it
            "batch": {"service_tiers": ["flex"]},
        },
    }
    with system(fields) as started:
        # A model whose replica does not answer in time is not listed for a moment.
        url = f"{started.url}/v1/models"
        wait_until(lambda: len(httpx.get(url, timeout=120).json()["data"]) == 3, "all are listed")
        yield started


@pytest.fixture
def http(serving: System) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.url, timeout=120) as client:
        yield client


def test_the_documents_examples_run(serving: System) -> None:
    names: dict[str, Any] = {}
    printed = []
    for block in marked(DOCUMENT, "run: client"):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(block.replace("http://127.0.0.1:8000", serving.url), names)
        printed.append(output.getvalue().strip())
    models, streamed, mood, tool, response, embeddings, ranked, message, count = printed
    assert models.splitlines()[0] == "['local', 'local-tuned', 'embedder']"
    assert streamed.endswith(" 8 tokens")
    assert json.loads(mood)["mood"] in ("good", "bad")
    name, _, arguments = tool.partition(" ")
    assert name == "weather"
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    assert response.endswith(" 8 tokens")
    (first, score), (second, _) = eval(ranked)
    assert {first, second} == {0, 1}
    assert -1 < score <= 1
    assert message.endswith(" 8 tokens")
    assert int(count.removesuffix(" tokens")) > 8
    size, likeness = embeddings.split()
    assert int(size) > 100
    assert -1 < float(likeness) < 1


def test_the_documents_tokens(serving: System) -> None:
    (block,) = marked(DOCUMENT, "run: curl")
    command = block.replace("http://127.0.0.1:8000", serving.url).replace("curl ", "curl -s ")
    done = subprocess.run(
        ["bash", "-euc", command], capture_output=True, text=True, timeout=120, check=True
    )
    tokens, text = re.findall(r"\{.*?\}", done.stdout)
    assert json.loads(tokens)["count"] == len(json.loads(tokens)["tokens"]) > 0
    assert json.loads(text)["prompt"]


@pytest.mark.release
def test_vllms_load_generator(serving: System, tmp_path: Path) -> None:
    (block,) = marked(DOCUMENT, "run: bench")
    command = block.replace("http://127.0.0.1:8000", serving.url).replace("\\\n", " ")
    words = shlex.split(command)
    assert words[:3] == ["vllm", "bench", "serve"]
    model = local_model(EngineConfig().cache_dir.expanduser())
    arguments = [str(model) if word.endswith("/MODEL") else word for word in words[3:]]
    arguments += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    done = subprocess.run(
        [sys.executable, "-c", _BENCH, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 64


def test_an_adapter_answers_by_its_name_on_its_models_replicas(http: httpx.Client) -> None:
    listed = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
    assert listed["local-tuned"]["parent"] == "local"
    body = {"prompt": "The river was quiet and", "max_tokens": 12, "temperature": 0}
    base, tuned, again = (
        http.post("/v1/completions", json={**body, "model": model})
        for model in ("local", "local-tuned", "local")
    )
    assert tuned.json()["model"] == "local-tuned"
    assert tuned.headers["x-sluice-replica"] == base.headers["x-sluice-replica"]
    texts = [answer.json()["choices"][0]["text"] for answer in (base, tuned, again)]
    assert texts[0] == texts[2] != texts[1]
    # With adapters on CPUs vLLM would end.
    for fields in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        refused = http.post("/v1/completions", json={**body, "model": "local", **fields})
        assert refused.status_code == 400 and "LoRA" in refused.json()["error"]["message"]


def test_an_adapter_comes_and_goes_with_its_folder(
    http: httpx.Client, adapters: Path, tmp_path: Path
) -> None:
    body = {"prompt": "The river was quiet and", "max_tokens": 12, "temperature": 0}

    def ask(model: str) -> httpx.Response:
        return http.post("/v1/completions", json={**body, "model": model})

    def listed() -> bool:
        return "later" in [each["id"] for each in http.get("/v1/models").json()["data"]]

    assert ask("later").status_code == 404
    model = local_model(EngineConfig().cache_dir.expanduser())
    write_adapter(tmp_path / "later", model, seed=1).rename(adapters / "later")
    wait_until(listed, "the adapter is loaded")
    texts = {name: ask(name).json()["choices"][0]["text"] for name in ("local", "local-tuned")}
    later = ask("later").json()
    assert later["model"] == "later"
    assert later["choices"][0]["text"] not in texts.values()
    # A stream that uses it is whole, though its folder goes when it has begun.
    pieces: list[str] = []
    left = {**body, "model": "later", "max_tokens": 200, "ignore_eos": True, "stream": True}
    left["stream_options"] = {"include_usage": True}
    with http.stream("POST", "/v1/completions", json=left) as answer:
        for line in answer.iter_lines():
            pieces += [line.removeprefix("data: ")] if line.startswith("data: {") else []
            if len(pieces) == 1 and (adapters / "later").exists():
                (adapters / "later").rename(tmp_path / "gone")
    # On a busy machine a piece has several tokens.
    assert json.loads(pieces[-1])["usage"]["completion_tokens"] == 200
    wait_until(lambda: not listed(), "it is not listed any more")
    wait_until(lambda: ask("later").status_code == 404, "new requests are refused")
    assert ask("local-tuned").json()["choices"][0]["text"] == texts["local-tuned"]


def test_embeddings_are_scheduled_and_promised(serving: System, http: httpx.Client) -> None:
    before = _promises(http, "embedder")
    inputs = ["a red car", [40, 41, 42], "the of and to in a " * 400]
    alone = [
        http.post("/v1/embeddings", json={"model": "embedder", "input": each}) for each in inputs
    ]
    vectors = [answer.json()["data"][0]["embedding"] for answer in alone]
    for answer, vector in zip(alone, vectors, strict=True):
        assert answer.headers["x-sluice-admission"] == "guaranteed"
        assert hypot(*vector) == pytest.approx(1, rel=0.02)
    texts = [text for text in inputs if isinstance(text, str)]
    body = {"model": "embedder", "input": texts}
    together = http.post("/v1/embeddings", json=body).json()
    assert together["usage"]["prompt_tokens"] == sum(
        alone[i].json()["usage"]["prompt_tokens"] for i in (0, 2)
    )
    for entry, vector in zip(together["data"], (vectors[0], vectors[2]), strict=True):
        # In batches of another shape.
        assert entry["embedding"] == pytest.approx(vector, abs=0.02)

    wait_until(
        lambda: _promises(http, "embedder") == {**before, "kept": before.get("kept", 0) + 4},
        "four promises kept",
        show=lambda: _promises(http, "embedder"),
    )


def _promises(http: httpx.Client, model: str) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        sample.labels["outcome"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "sluice_promises_total" and sample.labels["model"] == model
    }


def test_a_model_offers_what_it_is_made_for(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    refused = [
        http.post("/v1/chat/completions", json={"model": "embedder", "messages": messages}),
        http.post("/v1/embeddings", json={"model": "local", "input": "hi"}),
        http.post("/v1/chat/completions", json={"model": "gpt-4", "messages": messages}),
    ]
    assert [answer.status_code for answer in refused] == [404] * 3
    told = [answer.json()["error"] for answer in refused]
    assert (
        "it offers detokenize, embeddings, pooling, rerank, score, tokenize" in told[0]["message"]
    )
    assert "does not offer embeddings" in told[1]["message"]
    assert [each["code"] for each in told[:2]] == ["endpoint_not_offered"] * 2
    assert told[2]["code"] == "model_not_found"
    assert not [answer for answer in refused if "x-sluice-admission" in answer.headers]


def test_an_answer_of_anthropics_api_may_be_sent_back(serving: System) -> None:
    client = anthropic.Anthropic(base_url=serving.url, api_key="none", max_retries=0)
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    # Strict, so that the model of noise writes nothing else.
    tool: Any = {"name": "f", "input_schema": schema, "strict": True}
    asked: Any = {"model": "local", "max_tokens": 64, "tools": [tool]}
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    called = client.messages.create(
        **asked,
        messages=turns,
        tool_choice={"type": "tool", "name": "f"},
        extra_body={"temperature": 0},
    )
    (block,) = called.content
    assert block.type == "tool_use"
    # Exactly what the API has: the SDK keeps keys that it does not know.
    assert block.model_dump(exclude_unset=True).keys() == {"type", "id", "name", "input"}
    turns.append({"role": "assistant", "content": called.content})
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "1"}
    turns.append({"role": "user", "content": [result]})
    answered = client.messages.create(**asked, messages=turns, service_tier="standard_only")
    text = client.messages.create(model="local", max_tokens=4, messages=turns[:1]).content[0]
    assert text.model_dump(exclude_unset=True).keys() == {"type", "text"}
    counted = client.messages.count_tokens(model="local", messages=turns, tools=[tool])
    assert counted.input_tokens == answered.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="gpt-4", max_tokens=4, messages=turns[:1])
    assert unknown.value.type == "not_found_error"


def test_responses_plain_and_what_they_refuse(serving: System) -> None:
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
    response = client.responses.create(
        model="local", input=[{"role": "user", "content": "hi"}], max_output_tokens=6, temperature=0
    )
    assert response.usage is not None
    assert response.usage.output_tokens == 6
    chat = client.chat.completions.create(
        model="local", messages=[{"role": "user", "content": "hi"}], max_tokens=6, temperature=0
    )
    assert response.output_text == chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="no response is kept"):
        client.responses.create(model="local", input="hi", previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError, match="not kept"):
        client.responses.retrieve(response.id)


def test_the_model_may_call_tools_without_any_setting(serving: System) -> None:
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked: Any = {
        "model": "local",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
    }
    plain = client.chat.completions.create(**asked)
    free = client.chat.completions.create(**asked, tools=[tool], tool_choice="auto")
    assert plain.usage and free.usage
    assert free.usage.prompt_tokens > plain.usage.prompt_tokens


def test_the_tier_that_served_comes_back(serving: System) -> None:
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    for asked, told in (("flex", "flex"), ("auto", "default"), (None, None)):
        tier: Any = {} if asked is None else {"service_tier": asked}
        chat = {"model": "local", "messages": messages, "max_tokens": 4, **tier}
        assert client.chat.completions.create(**chat).service_tier == told
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**chat, **usage))
        assert len(chunks) > 1 and {each.service_tier for each in chunks} == {told}
        response = {"model": "local", "input": "hi", "max_output_tokens": 4, **tier}
        assert client.responses.create(**response).service_tier == (told or "auto")
        events = list(client.responses.create(**response, stream=True))
        tiers = {each.response.service_tier for each in events if hasattr(each, "response")}
        assert tiers == {told or "auto"}


def test_the_page_of_metrics_tells_the_models_apart(http: httpx.Client) -> None:
    def seen() -> bool:
        page = http.get("/metrics").text
        return all(
            f'sluice_requests_total{{model="{model}"' in page for model in ("local", "embedder")
        ) and re.search(r'sluice_refusals_total|sluice_requests_total\{[^}]*model="none"', page)

    wait_until(lambda: bool(seen()), "lines of every model", show=lambda: http.get("/metrics").text)
    families = re.findall(r"^# TYPE (\S+)", http.get("/metrics").text, re.MULTILINE)
    assert len(families) == len(set(families))
