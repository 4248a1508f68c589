from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from sluice.deploy.cli import main
from sluice.deploy.commands.options import Exit, Failure
from sluice.deploy.config import SluiceConfig
from sluice.deploy.local import StartError, curl_line, own_sigterm, running, stop_signals
from sluice.deploy.ray_start import TUNED, free_port
from sluice.scheduling import admission, autoscaling, batching, routing


def test_the_command_line_imports_a_command_when_asked_and_none_imports_ray() -> None:
    code = """
import sys
from sluice.deploy.cli import main
assert not {"numpy", "pydantic", "sluice.deploy.config"} & sys.modules.keys(), "its version waits"
for name in main.list_commands(None):
    main.get_command(None, name)
assert "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_policies_lists_every_policy_with_source_and_options() -> None:
    result = CliRunner().invoke(main, ["policies", "--json"])
    assert result.exit_code == 0, result.output
    listed = json.loads(result.output)
    names = {(entry["kind"], entry["name"]) for entry in listed}
    assert names == {
        *(("batch", name) for name in batching.POLICIES),
        *(("routing", name) for name in routing.POLICIES),
        *(("admission", name) for name in admission.POLICIES),
        *(("autoscaling", name) for name in autoscaling.POLICIES),
    }
    assert all(entry["source"] for entry in listed)
    assert all(option["description"] for entry in listed for option in entry["options"].values())


def test_env_is_what_a_shell_sets_for_ray() -> None:
    told = CliRunner().invoke(main, ["env", "--json"])
    assert json.loads(told.stdout) == dict(TUNED)
    commands = CliRunner().invoke(main, ["env"]).stdout
    done = subprocess.run(
        ["bash", "-euc", f"{commands} env"], env={}, capture_output=True, text=True, check=True
    )
    assert dict(line.split("=", 1) for line in done.stdout.splitlines()).items() >= TUNED.items()


def test_config_prints_what_it_accepts_again(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["config", "show"])
    assert result.exit_code == 0, result.output
    path = tmp_path / "full.yaml"
    path.write_text(result.output)
    again = CliRunner().invoke(main, ["config", "show", str(path)])
    assert yaml.safe_load(again.output) == yaml.safe_load(result.output)


def test_config_check_says_what_is_wrong_and_shows_no_value(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text("replica: {count: 2}\n")
    good = CliRunner().invoke(main, ["config", "check", str(path)])
    assert (good.exit_code, good.stdout) == (Exit.OK, f"{path}: valid\n")
    path.write_text("replica: {count: 0}\nrouter: {port: 99999, api_keys: ['my secret']}\n")
    bad = CliRunner().invoke(main, ["config", "check", str(path)])
    assert bad.exit_code == Exit.FAILED
    assert {line.split(": ")[1] for line in bad.stderr.splitlines()} >= {
        "replica.count",
        "router.port",
    }
    told = json.loads(CliRunner().invoke(main, ["config", "check", str(path), "--json"]).stdout)
    assert not told["valid"] and len(told["problems"]) == len(bad.stderr.splitlines())
    assert "my secret" not in bad.stderr + json.dumps(told)


def test_a_failure_is_one_line() -> None:
    failure = Failure(Exit.FAILED, "it is not valid:\none\n  two\n\n")
    assert failure.format_message() == "it is not valid: one; two"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--policy", "best"], "fairbatching"),
        (["serve", "--replicas", "0"], "replica.count"),
        (["serve", "--engine", "magic"], "simulated"),
        (["serve", "--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_serve_refuses_by_name(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert says in result.output


def test_serve_says_when_the_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = SluiceConfig.model_validate({"router": {"port": port}})
        with (
            pytest.raises(StartError, match=str(port)),
            stop_signals() as stop,
            running(config, stop, report=print),
        ):
            pytest.fail("it started")


def test_ray_s_handler_of_sigterm_does_not_stay() -> None:
    with stop_signals() as stop:
        with own_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray sets one when it starts
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()


@pytest.mark.parametrize("router", [{"api_keys": ["secret"]}, {"api_keys_file": "/keys.yaml"}])
def test_the_shown_command_takes_a_key_from_the_shell_where_one_is_needed(
    router: dict[str, Any],
) -> None:
    assert "authorization" not in curl_line(SluiceConfig())
    line = curl_line(SluiceConfig.model_validate({"router": router}))
    assert "secret" not in line
    echo = f"curl() {{ printf '%s\\n' \"$@\"; }}; {line}"
    shown = subprocess.run(
        ["sh", "-c", echo], env={"SLUICE_KEY": "my-key"}, capture_output=True, text=True, check=True
    )
    assert "authorization: Bearer my-key" in shown.stdout.splitlines()


@pytest.mark.parametrize("ring", ["api", "metrics", "admin"])
@pytest.mark.parametrize(("text", "why"), [(None, "No such file"), ("- {nmae: a}", "entry 0")])
def test_a_key_file_that_cannot_be_used_is_found_before_ray_starts(
    ring: str, text: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone_on = "sluice.deploy.supervisor.make_private_dir"
    monkeypatch.setattr(gone_on, lambda: pytest.fail("it went on"))
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)
    rings = {"api": {"api_keys_file": str(path)}, "admin": {"admin": {"keys_file": str(path)}}}
    fields = rings.get(ring, {"metrics": {"keys_file": str(path)}})
    config = tmp_path / "sluice.yaml"
    config.write_text(yaml.safe_dump({"router": {"port": free_port(), **fields}}))
    result = CliRunner().invoke(main, ["serve", "--config", str(config)])
    assert result.exit_code == Exit.FAILED
    (line,) = result.stderr.splitlines()
    assert str(path) in line and why in line


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ("replicas: {count: 2}", "replicas: there is no such key; did you mean replica?"),
        ("router: {prot: 1}", "router.prot: there is no such key; did you mean port?"),
        (
            "router: {classes: {x: {ttft: 3}}}",
            "x.ttft: there is no such key; did you mean ttft_ms?",
        ),
        ("models: {a: {engine: {polcy: x}}}", "polcy: there is no such key; did you mean policy?"),
        ("replica: {autoscaling: {min_replica: 3}}", "did you mean min_replicas?"),
        ("router: {quite_another: 1}", "router.quite_another: there is no such key"),
    ],
)
def test_an_unknown_key_of_a_configuration_suggests_the_nearest(
    fields: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(fields)
    for words in (["config", "check", str(path)], ["serve", "--config", str(path)]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == Exit.FAILED
        assert says in result.stderr


@pytest.mark.own_ray  # the Ray that tests share has ended: this process has joined none
def test_a_start_that_fails_touches_no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cluster the environment names, neither Ray nor Serve is asked to join it."""
    import ray
    from ray import serve

    asked: list[str | None] = []

    def refuse(address: str | None = None, **_: object) -> None:
        asked.append(address)
        raise RuntimeError("no Ray today")

    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(serve, "shutdown", lambda: asked.append("serve.shutdown"))
    config = SluiceConfig.model_validate({"router": {"port": free_port()}})
    with (
        pytest.raises(RuntimeError, match="no Ray today"),
        stop_signals() as stop,
        running(config, stop, report=print),
    ):
        pytest.fail("it started")
    assert asked == ["local"]
