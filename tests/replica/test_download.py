"""A start says how much of a model has come, with the hub's own client and a hub of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from huggingface_hub import HfApi

from sluice.replica.vllm import download as module
from sluice.replica.vllm.download import in_phase
from sluice.telemetry.phases import FILE_VARIABLE, Phases
from tests.replica.waiting import until

COMMIT = "a" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"x" * 30_000_000}


class Hub(BaseHTTPRequestHandler):
    """Serves one model; of a long file the second half when ``go_on`` is set."""

    go_on = Event()

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        self.send_response(200)
        if "/resolve/" in path:
            body = FILES[name]
            self.send_header("etag", f'"{len(body):040}"')
            self.send_header("x-repo-commit", COMMIT)
        elif "/tree/" in path:
            rows = [
                {"type": "file", "path": name, "size": len(body), "oid": f"{len(body):040}"}
                for name, body in FILES.items()
            ]
            body = json.dumps(rows).encode()
        else:
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode()
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if with_body:
            half = len(body) // 2
            self.wfile.write(body[:half])
            if half > 1_000_000:
                assert self.go_on.wait(60)
            self.wfile.write(body[half:])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_a_download_says_how_much_has_come(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = Phases(tmp_path / "phases", zero_s=0.0)
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "phases"))
    monkeypatch.setattr(module, "_PERIOD_S", 0.0)
    download = in_phase(HfApi.snapshot_download)
    arguments = HfApi(endpoint=hub), "some/model"
    thread = Thread(target=lambda: download(*arguments, cache_dir=tmp_path / "cache"))
    thread.start()

    def running() -> str:
        assert phases.news() == []
        return phases.running()

    await until(lambda: running() == "engine: download 0.01 of at least 0.03 GB")
    Hub.go_on.set()
    thread.join(60)
    (ended,) = phases.news()
    assert (ended.name, ended.how, phases.running()) == ("engine: download", "", "")
    assert len([*(tmp_path / "cache").rglob("model.safetensors")]) == 1
    phases.close()
