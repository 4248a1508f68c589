"""Agents for a terminal, as their packages install them, with a home and a folder of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.documents import ROOT, marked
from tests.router.scripted_model import asking

PROOF = "proof"
"""The file that the shell's tool writes, a line for each call."""


class AgentClient(NamedTuple):
    """``shell``, ``agent``: names of its tools, and of the argument that each needs, with others
    that it must have. The document says how it is pointed at Sluice, by variables or in
    ``settings_file`` below its home; ``variables`` and ``files`` keep it quiet. ``named``: it says
    which session a request is of."""

    command: str
    package: str
    words: tuple[str, ...]
    shell: tuple[str, str, Mapping[str, Any]]
    agent: tuple[str, str, Mapping[str, Any]]
    variables: Mapping[str, str]
    files: Mapping[str, str] = {}
    settings_file: str = ""
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
        files = dict(self.files)
        if self.settings_file:
            files[self.settings_file] = self._documented(url)
        for name, text in files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        path = {"PATH": os.environ["PATH"], "HOME": str(home)}
        how = {"cwd": work, "env": path | self.settings(url)}
        return [found, *self.words, self.prompt()], how

    def settings(self, url: str) -> dict[str, str]:
        exports = re.findall(r"^export (\w+)=(.*)$", self._documented(url), re.MULTILINE)
        return {**self.variables, **dict(exports)}

    def _documented(self, url: str) -> str:
        (block,) = marked(ROOT / "docs" / "clients.md", f"agent: {self.command}")
        return block.replace("http://127.0.0.1:8000", url)


_SAYS_NOTHING = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"disableAutoUpdate": True},
    "security": {"auth": {"selectedType": "openai"}},
}
_ALLOWED = {"permission": {"*": "allow"}, "autoupdate": False, "share": "disabled"}
_TASK = {"description": "a part", "subagent_type": "general-purpose"}

CLIENTS = (
    AgentClient(
        "claude",
        "@anthropic-ai/claude-code",
        ("--allowedTools=Bash,Agent", "-p"),
        ("Bash", "command", {"description": "note it"}),
        ("Agent", "prompt", _TASK),
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
    ),
    AgentClient(
        "codex",
        "@openai/codex",
        (
            *("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
            *("-c", "analytics.enabled=false", "-c", "check_for_update_on_startup=false"),
        ),
        ("exec_command", "cmd", {}),
        ("multi_agent_v1__spawn_agent", "message", {}),
        {"SLUICE_API_KEY": "none"},
        settings_file=".codex/config.toml",
    ),
    AgentClient(
        "opencode",
        "opencode-ai",
        ("run", "-m", "sluice/local"),
        ("bash", "command", {"description": "note it"}),
        ("task", "prompt", {**_TASK, "subagent_type": "general"}),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_CONFIG_CONTENT": json.dumps(_ALLOWED)},
        settings_file=".config/opencode/opencode.json",
    ),
    AgentClient(
        "qwen",
        "@qwen-code/qwen-code",
        ("--yolo", "-p"),
        ("run_shell_command", "command", {"is_background": False}),
        ("agent", "prompt", _TASK),
        {},
        files={".qwen/settings.json": json.dumps(_SAYS_NOTHING)},
        named=False,
    ),
)
