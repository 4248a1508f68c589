"""Every route of vLLM's own server is served, or listed in docs/clients.md as not served."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.router.config import RouterConfig
from sluice.router.openapi import document
from tests.documents import ROOT

pytestmark = pytest.mark.vllm

TASKS = (
    *("generate", "transcription", "realtime"),
    *("embed", "classify", "token_embed", "token_classify"),
)
OF_SLUICE = {"/"}


class AnyModel:
    """A model of which vLLM's application asks what it pools and scores."""

    hf_config = SimpleNamespace(num_labels=1)
    architecture = "JinaForRanking"

    def get_pooling_task(self, _: object) -> str:
        return "classify"

    def __getattr__(self, name: str) -> Any:
        return None


def routes_of_vllm(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths of vLLM's application with all that flags and variables add to it."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(name, "1")
    given = ["--enable-tokenizer-info-endpoint", "--enable-fault-tolerance"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    app = build_app(args, TASKS, AnyModel())  # type: ignore[arg-type]
    return {route.path for route in app.routes if hasattr(route, "path")}


def listed() -> set[str]:
    """Paths that the document says are not served."""
    text = (ROOT / "docs" / "clients.md").read_text()
    table = text.partition("Not served, of what vLLM's own server has:")[2].partition("\n\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return {path for row in rows for path in re.findall(r"`(/[^`]*)`", row)}


def test_every_route_is_served_or_listed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # vLLM's application sets the level for the whole process; this has it set back.
    caplog.set_level(logging.getLogger().level)
    theirs = routes_of_vllm(monkeypatch)
    assert {"/v1/chat/completions", "/rerank", "/v2/embed", "/sleep"} <= theirs
    ours = set(document(RouterConfig())["paths"]) | OF_SLUICE
    missing = theirs - ours
    assert missing == listed(), "served, or listed with the reason"
