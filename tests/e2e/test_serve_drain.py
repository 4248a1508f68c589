from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.deploy.commands.options import Exit
from tests.e2e.conftest import wait_until
from tests.e2e.test_start_faults import Start, start
from tests.processes import name_of

pytestmark = [pytest.mark.ray, pytest.mark.own_ray]

STEP_S = 0.05
TOKENS = 400

COMPLETION = {"prompt": "Hello."}
CHAT = {"messages": [{"role": "user", "content": "Hello."}]}


class Stream:
    """A stream that has begun, read by a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor, url: str, path: str, **body: Any) -> None:
        self.lines: list[str] = []
        self.read: Future[None] = pool.submit(self._read, f"{url}{path}", body)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        body = {"model": "local", "stream": True, **body}
        if "max_output_tokens" not in body:
            body.setdefault("max_tokens", TOKENS)
        with httpx.stream("POST", url, json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                self.lines.append(line)

    def wait_begun(self) -> None:
        def begun() -> bool:
            if self.read.done():
                self.read.result()
            return len(self.lines) > 4

        wait_until(begun, "the stream begins", 60, lambda: self.lines)

    def expect_whole(self) -> None:
        self.read.result(timeout=60)
        assert self.lines[-2] == "data: [DONE]"

    def expect_error(self) -> None:
        self.read.result(timeout=60)
        assert self.entries()[-1]["error"]["code"] == "router_stopping"
        assert "data: [DONE]" not in self.lines

    def expect_cut(self) -> None:
        assert self.read.exception(timeout=60) is not None

    def entries(self) -> list[Any]:
        told = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        return [json.loads(each) for each in told if each != "[DONE]"]


SLOW: dict[str, Any] = {"kind": "simulated", "simulated": {"step_s": STEP_S}}
VLLM: dict[str, Any] = {"vllm_args": {"max-model-len": 8192}}


@contextmanager
def serving(
    folder: Path, drain_s: float, engine: dict[str, Any] = SLOW
) -> Iterator[tuple[Start, str, ThreadPoolExecutor]]:
    """A `sluice serve`, its URL, and threads."""
    config = folder / "sluice.yaml"
    config.write_text(json.dumps({"engine": engine}))
    words = ("--config", str(config), "--drain-seconds", str(drain_s))
    with start(folder, *words) as it, ThreadPoolExecutor() as pool:
        it.wait_ready()
        yield it, it.url, pool


def expect_refusal(url: str, model: str = "local") -> None:
    """New requests are refused while others run."""
    refusals: list[httpx.Response] = []

    def refused() -> bool:
        body = {"model": model, "max_tokens": 1, **COMPLETION}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        refusals.extend([answer] if answer.status_code != 200 else [])
        return bool(refusals)

    wait_until(refused, "new requests are refused", 30)
    assert refusals[0].status_code == 503
    assert refusals[0].headers["retry-after"]
    assert refusals[0].json()["error"]["code"] == "router_stopping"


def test_running_streams_end_and_new_requests_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, 60) as (it, url, pool):
        stream = Stream(pool, url, "/v1/completions", **COMPLETION)
        whole = pool.submit(
            httpx.post,
            f"{url}/v1/completions",
            json={"model": "local", "max_tokens": TOKENS, **COMPLETION},
            timeout=120,
        )
        stream.wait_begun()
        it.process.send_signal(signal.SIGTERM)
        expect_refusal(url)
        assert whole.result(timeout=60).json()["usage"]["completion_tokens"] == TOKENS
        stream.expect_whole()
        assert it.wait_end() == Exit.OK
        assert it.err.partition("Ctrl-C stops\n")[2] == "sluice: stopping\n"


@pytest.mark.release
def test_the_end_does_not_wait_for_a_dead_control_store(tmp_path: Path) -> None:
    with serving(tmp_path, 60) as (it, _, _):
        store = next(each for each in it.left() if name_of(each) == "gcs_server")
        it.process.send_signal(signal.SIGTERM)
        store.kill()
        assert it.wait_end() in (Exit.OK, Exit.FAILED)


@pytest.mark.release
def test_streams_that_do_not_end_in_time_get_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, 0.5) as (it, url, pool):
        completion = Stream(pool, url, "/v1/completions", **COMPLETION)
        chat = Stream(pool, url, "/v1/chat/completions", **CHAT)
        completion.wait_begun()
        chat.wait_begun()
        it.process.send_signal(signal.SIGTERM)
        for stream in (completion, chat):
            stream.expect_error()
        assert it.wait_end() == Exit.OK


@pytest.mark.release
@pytest.mark.vllm
def test_every_api_of_vllm_says_that_a_stream_did_not_end_in_time(tmp_path: Path) -> None:
    """Its event and error are those of the API, and nothing says that the answer is whole."""
    many = {"max_tokens": 7_000, "ignore_eos": True}
    with serving(tmp_path, 0.5, VLLM) as (it, url, pool):
        chat = Stream(pool, url, "/v1/chat/completions", **CHAT, **many)
        messages = Stream(pool, url, "/v1/messages", **CHAT, max_tokens=7_000)
        asked = {"input": "Hello.", "max_output_tokens": 7_000}
        responses = Stream(pool, url, "/v1/responses", **asked)
        for stream in (chat, messages, responses):
            stream.wait_begun()
        it.process.send_signal(signal.SIGTERM)
        chat.expect_error()
        for stream in (messages, responses):
            stream.read.result(timeout=60)
        last = messages.entries()[-1]
        assert messages.lines[-3] == "event: error"
        assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
        assert "message_stop" not in "".join(messages.lines)
        last = responses.entries()[-1]
        assert responses.lines[-3] == "event: error"
        assert (last["type"], last["code"]) == ("error", "router_stopping"), last
        assert last["error"]["code"] == "router_stopping"
        assert "response.completed" not in "".join(responses.lines)
        assert it.wait_end() == Exit.OK


@pytest.mark.release
def test_a_second_signal_ends_the_drain(tmp_path: Path) -> None:
    with serving(tmp_path, 3_000) as (it, url, pool):
        stream = Stream(pool, url, "/v1/completions", **COMPLETION)
        stream.wait_begun()
        it.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping" in it.err, "it stops", 30, lambda: it.err)
        it.process.send_signal(signal.SIGINT)
        assert it.wait_end() == Exit.OK
        stream.expect_cut()
