"""The cluster files are ones that `ray up` takes, and start Ray as Sluice needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from sluice.deploy.ray_start import TUNED
from tests.documents import ROOT

FILES = sorted((ROOT / "deploy" / "ray").glob("*.yaml"))
_NOT_SERVE = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


def read(path: Path) -> dict[str, Any]:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def starts(config: dict[str, Any]) -> dict[str, str]:
    """The command that starts Ray, on the head and on workers."""
    found = {}
    for kind in ("head", "worker"):
        (command,) = [each for each in config[f"{kind}_start_ray_commands"] if "ray start" in each]
        found[kind] = command
    return found


@cache
def environment(before: str) -> dict[str, str]:
    """What ``before`` the start of Ray sets, as the shell of a node has it then. It is the same
    text in most of the files."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-euc", f"{before} env"],
        env={"PATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = (line.split("=", 1) for line in done.stdout.splitlines())
    return {name: value for name, value in pairs if name.startswith("RAY_")}


def test_there_is_a_file_for_each_provider() -> None:
    assert [path.stem for path in FILES] == ["aws", "gcp", "local"]
    assert all(read(path)["provider"]["type"] == path.stem for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rays_own_loader_accepts_it(path: Path) -> None:
    validate_config(prepare_config(read(path)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rays_own_loader_sees_a_typo(path: Path) -> None:
    with pytest.raises(ValidationError, match="head_start_ray_comands"):
        validate_config(prepare_config({**read(path), "head_start_ray_comands": []}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_node_has_the_settings(path: Path) -> None:
    for command in starts(read(path)).values():
        before, _, _ = command.partition("ulimit")
        assert environment(before) == {**TUNED, **_NOT_SERVE}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_head_takes_no_work_and_its_dashboard_is_not_on_the_network(path: Path) -> None:
    head = starts(read(path))["head"]
    assert "--num-cpus=0" in head
    assert "--dashboard-host=127.0.0.1" in head
    assert "--autoscaling-config=" in head


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_token_reaches_every_node_and_is_not_in_the_file(path: Path) -> None:
    assert "~/.ray/auth_token" in read(path)["file_mounts"]
    assert "RAY_AUTH_TOKEN=" not in path.read_text(encoding="utf-8")


def test_its_image_is_linted_and_ends_without_root() -> None:
    path = ROOT / "deploy" / "ray" / "Dockerfile"
    users = [
        line.split()[1] for line in path.read_text("utf-8").splitlines() if line[:5] == "USER "
    ]
    base = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert users[0] == "0:0"
    assert f"USER {users[-1]}\n" in base, "the user is not that of the image below"
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists() and not os.environ.get("CI"):
        pytest.skip("hadolint is not installed")
    assert subprocess.run([linter, path], check=False).returncode == 0
