"""A model that cannot be had is named in one sentence, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest
from click.testing import CliRunner

from sluice.deploy.cli import main
from sluice.deploy.config import check_model
from sluice.deploy.ray_start import free_port
from sluice.replica.config import EngineConfig


def checked(model: str | Path, **more: Any) -> None:
    check_model(EngineConfig(model=str(model), **more))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A hub that answers everything with ``hub.answer``: a status and the error code of the hub."""

    class Hub(BaseHTTPRequestHandler):
        answer = (200, "")

        def do_GET(self) -> None:
            status, code = Hub.answer
            body = b'{"id": "some/model", "modelId": "some/model", "siblings": []}'
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            if code:
                self.send_header("x-error-code", code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.__init__", _with_endpoint(address))
    yield Hub
    server.shutdown()
    server.server_close()


def _with_endpoint(address: str) -> Callable[..., None]:
    init = huggingface_hub.HfApi.__init__

    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "endpoint": address})

    return patched


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "~/no-such-model"])
def test_a_folder_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(ValueError, match=f"there is no folder {model}"):
        checked(model)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no model: no config\.json"):
        checked(tmp_path)
    (tmp_path / "config.json").touch()
    checked(tmp_path)


def test_a_latency_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        checked("local", latency_profile=tmp_path / "no.json")


def test_what_needs_no_files_is_not_looked_for() -> None:
    checked("local")
    checked("/no/such/model", kind="simulated")
    checked("s3://bucket/model")  # vLLM's loaders know where that is


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "the hub has no model some/model"),
        (401, "", "the hub has no model some/model, or needs HF_TOKEN"),
        (403, "GatedRepo", "granted access: set HF_TOKEN"),
        (404, "RevisionNotFound", "has no revision v9"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_named(
    hub: Any, status: int, code: str, message: str
) -> None:
    hub.answer = (status, code)
    with pytest.raises(ValueError, match=message) as caught:
        checked("some/model", vllm_args={"revision": "v9"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [200, 500])
def test_a_model_of_the_hub_is_left_to_vllm(hub: Any, status: int) -> None:
    hub.answer = (status, "")
    checked("some/model")


def test_a_copy_in_the_cache_needs_no_hub(hub: Any, tmp_path: Path) -> None:
    hub.answer = (404, "RepoNotFound")
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    checked("some/model", vllm_args={"download_dir": str(tmp_path)})


def test_without_the_hub_a_model_that_is_not_here_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids"):
        checked("some/model", vllm_args={"download-dir": str(tmp_path)})


def test_sluice_serve_says_so_before_it_starts_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_ray(*_: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("sluice.deploy.local._start_ray", no_ray)
    config = tmp_path / "sluice.yaml"
    config.write_text(
        "models:\n  one: {engine: {kind: simulated}}\n  two: {engine: {model: /no/such}}\n"
    )
    for arguments in (["--model", "/no/such"], ["--config", str(config)]):
        result = CliRunner().invoke(main, ["serve", "--port", str(free_port()), *arguments])
        assert result.exit_code == 1
        assert "there is no folder /no/such" in result.output
        assert "Traceback" not in result.output
