"""Agents for a terminal, as their packages install them, with a home and a folder of their own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.router.scripted_model import asking

PROOF = "proof"
"""The file that the shell's tool writes, a line for each call."""


class AgentClient(NamedTuple):
    """``shell``, ``agent``: names of its tools, and of the argument that each needs, with others
    that it must have. ``files``: its settings, below its home; ``<url>`` stands
    for Sluice's. ``named``: it says which session a request is of."""

    command: str
    package: str
    words: tuple[str, ...]
    shell: tuple[str, str, Mapping[str, Any]]
    agent: tuple[str, str, Mapping[str, Any]]
    variables: Mapping[str, str]
    files: Mapping[str, str] = {}
    named: bool = True

    def prompt(self) -> str:
        """A sub-agent that calls the shell once, and two calls of the shell when it has."""
        inner = asking(self._call(self.shell, f"echo sub >> {PROOF}"))
        # Codex does not wait for its sub-agents.
        outer = f"until grep -qs sub {PROOF}; do sleep 0.1; done; echo main >> {PROOF}"
        shell = self._call(self.shell, outer)
        return f"Please: {asking(self._call(self.agent, inner), shell, shell)}"

    def _call(self, tool: tuple[str, str, Mapping[str, Any]], value: str) -> tuple[str, Any]:
        name, argument, others = tool
        return name, {argument: value, **others}

    def start(self, folder: Path, url: str) -> tuple[list[str], dict[str, Any]]:
        """A command, and how to run it; skips if it is not there."""
        found = shutil.which(self.command)
        if found is None:
            pytest.skip(f"{self.command} is not installed: npm install -g {self.package}")
        home, work = folder / "home", folder / "work"
        work.mkdir(parents=True)
        for name, text in self.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text.replace("<url>", url))
        path = {"PATH": os.environ["PATH"], "HOME": str(home)}
        how = {"cwd": work, "env": path | self.settings(url)}
        return [found, *self.words, self.prompt()], how

    def settings(self, url: str) -> dict[str, str]:
        return {name: value.replace("<url>", url) for name, value in self.variables.items()}


_CODEX = """
model = "local"
model_provider = "sluice"
check_for_update_on_startup = false
[model_providers.sluice]
name = "Sluice"
base_url = "<url>/v1"
env_key = "SLUICE_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
_OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "permission": {"*": "allow"},
    "provider": {
        "sluice": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Sluice",
            "options": {"baseURL": "<url>/v1", "apiKey": "none"},
            "models": {"local": {"limit": {"context": 131_072, "output": 4096}}},
        }
    },
}
_QWEN = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"disableAutoUpdate": True},
    "security": {"auth": {"selectedType": "openai"}},
}
_TASK = {"description": "a part", "subagent_type": "general-purpose"}

CLIENTS = (
    AgentClient(
        "claude",
        "@anthropic-ai/claude-code",
        ("--allowedTools=Bash,Agent", "-p"),
        ("Bash", "command", {"description": "note it"}),
        ("Agent", "prompt", _TASK),
        {
            "ANTHROPIC_BASE_URL": "<url>",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "local",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "local",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    AgentClient(
        "codex",
        "@openai/codex",
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
        ("exec_command", "cmd", {}),
        ("multi_agent_v1__spawn_agent", "message", {}),
        {"SLUICE_API_KEY": "none"},
        {".codex/config.toml": _CODEX},
    ),
    AgentClient(
        "opencode",
        "opencode-ai",
        ("run", "-m", "sluice/local"),
        ("bash", "command", {"description": "note it"}),
        ("task", "prompt", {**_TASK, "subagent_type": "general"}),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {".config/opencode/opencode.json": json.dumps(_OPENCODE)},
    ),
    AgentClient(
        "qwen",
        "@qwen-code/qwen-code",
        ("--yolo", "-p"),
        ("run_shell_command", "command", {"is_background": False}),
        ("agent", "prompt", _TASK),
        {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "<url>/v1", "OPENAI_MODEL": "local"},
        {".qwen/settings.json": json.dumps(_QWEN)},
        named=False,
    ),
)
