from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.experiments import EXPERIMENTS
from sluice.deploy.cli import main
from sluice.deploy.commands import admin
from sluice.deploy.commands.offline import all_policies
from sluice.deploy.commands.options import Exit
from sluice.deploy.commands.serve import with_batches_folder
from sluice.deploy.config import SluiceConfig, parse_config
from sluice.deploy.local import (
    LocalRun,
    StartError,
    check,
    curl_line,
    local_runs,
    noted,
    own_sigterm,
    start_ray_for,
    stop_signals,
)
from sluice.deploy.ray_start import TUNED, free_port
from sluice.deploy.tables import print_table
from sluice.router.tenancy.auth import KeyRing
from sluice.scheduling import admission, autoscaling, batching, routing
from tests.documents import ROOT, rows, section


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
    shown = CliRunner().invoke(main, ["env", "--json"])
    assert json.loads(shown.stdout) == dict(TUNED)
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
    found = json.loads(CliRunner().invoke(main, ["config", "check", str(path), "--json"]).stdout)
    assert not found["valid"] and len(found["problems"]) == len(bad.stderr.splitlines())
    assert "my secret" not in bad.stderr + json.dumps(found)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--policy", "best"], "fairbatching"),
        (["serve", "--replicas", "0"], "replica.count"),
        (["serve", "--engine", "magic"], "simulated"),
        (["serve", "--config", "missing.yaml"], "missing.yaml"),
        (["serve", "missing.yaml"], "missing.yaml"),
        (["serve", "m", "--scheduler-cls", "x"], "--scheduler-cls: set engine.policy"),
        (["serve", "--served-model-name", "a", "b"], "--served-model-name b: one name"),
        (["serve", "--police", "fcfs"], "--policy"),
        (["serve", "m", "n"], "'n' belongs to no flag"),
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
        with pytest.raises(StartError, match=str(port)):
            check(config)


def test_ray_s_handler_of_sigterm_does_not_stay() -> None:
    with stop_signals() as stop:
        with own_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray sets one when it starts
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()


_SIGNALLED = """
import multiprocessing, signal, time
from sluice.deploy import local, supervisor

with local.stop_signals() as stop:
    handler = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 2e-3, 2e-3)
while stop._count < 300:  # some come within a wait
    stop.wait(0.0)
signal.setitimer(signal.ITIMER_REAL, 0)
assert stop.is_set() and stop.again

signal.signal(signal.SIGALRM, lambda *_: time.sleep(2 * supervisor._POLL_S))
waits = supervisor.Supervised.__new__(supervisor.Supervised)
waits._connection, other = multiprocessing.Pipe()
signal.setitimer(signal.ITIMER_REAL, supervisor._POLL_S / 2)
assert waits._next_message() is None
other.send(("report", "text"))
assert waits._next_message() == ("report", "text")
other.close()
assert waits._next_message() is None
"""


def test_no_wait_hangs_when_a_signal_comes_at_a_bad_moment() -> None:
    subprocess.run([sys.executable, "-c", _SIGNALLED], check=True, timeout=300)


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
def test_a_start_that_fails_touches_no_other_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(RuntimeError, match="no Ray today"):
        start_ray_for(config, tmp_path, print)
    assert asked == ["local"]


# Cli document.


CLI = ROOT / "docs" / "cli.md"


def paths(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command below ``command``, by its words."""
    if not isinstance(command, click.Group):
        yield words
        return
    for name, each in children(command).items():
        yield from paths(each, (*words, name))


def children(group: click.Group) -> dict[str, click.Command]:
    """The commands of a group, also those that it imports where they are asked for."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


COMMANDS = list(paths(main))


def test_every_command_is_in_the_table() -> None:
    assert set(rows(section(CLI, "The command line"))) == set(children(main))


def test_every_exit_code_is_in_the_table() -> None:
    table = section(CLI, "For scripts")
    listed = [
        (int(code), name) for code, name in re.findall(r"(?m)^\| (\d+) \| ([\w ]+) \|", table)
    ]
    assert listed == [(code.value, code.name.lower().replace("_", " ")) for code in Exit]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_examples_of_the_command(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"])
    assert shown.exit_code == Exit.OK
    assert "Example" in shown.output
    assert f"sluice {' '.join(words)}" in shown.output.partition("Example")[2]


TAKE_FLAGS_OF_VLLM = {("serve",), ("config", "from-vllm")}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("serve", "--engine", "simulated"),
        *(each for each in COMMANDS if each not in TAKE_FLAGS_OF_VLLM),
    ],
    ids=" ".join,
)
def test_an_unknown_option_is_a_matter_of_usage(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(main, [*words, "--no-such-option"]).exit_code == Exit.USAGE


# Keys command.


def accepts(path: Path, key: str) -> str:
    client = KeyRing([], path).check([(b"authorization", b"Bearer " + key.encode())])
    return client.name


def test_a_new_key_opens_with_the_entry_that_came_with_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    made = [CliRunner().invoke(main, ["keys", "new", "--name", name]) for name in ("a", "b")]
    path.write_text("".join(result.stderr for result in made))
    keys = [result.stdout.strip() for result in made]
    assert [accepts(path, key) for key in keys] == ["a", "b"]
    assert len(set(keys)) == 2 and min(map(len, keys)) > 40
    assert not any(key in path.read_text() for key in keys)
    checked = CliRunner().invoke(main, ["keys", "check", str(path), "--json"])
    assert json.loads(checked.stdout) == {"valid": True, "accepted": 2, "problem": None}


def test_the_digest_of_a_key_from_standard_input(tmp_path: Path) -> None:
    path, key = tmp_path / "keys.yaml", "a-key-of-more-than-20-characters"
    for line in (key, f"{key}\n", f"{key}\r\nsomething else"):
        result = CliRunner().invoke(main, ["keys", "hash", "--name", "acme"], input=line)
        assert result.exit_code == 0, result.output
        assert key not in result.output
        path.write_text(result.stdout)
        assert accepts(path, key) == "acme"
    short = CliRunner().invoke(main, ["keys", "hash"], input="short")
    assert short.exit_code == 0 and "this key is short" in short.stderr


@pytest.mark.parametrize(
    ("line", "options", "says"),
    [
        ("", [], "not empty"),
        ("two words", [], "without spaces"),
        ("clé", [], "printable ASCII"),
        ("****", [], "asterisks"),
        ("good-key", ["--name", "two words"], "must match"),
        ("good-key", ["--name", "unnamed"], "must match"),
    ],
)
def test_what_is_no_key_has_no_digest(line: str, options: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["keys", "hash", *options], input=line)
    assert result.exit_code != 0
    assert says in result.stderr
    assert result.stdout == ""
    assert "good-key" not in result.output


def test_a_wrong_file_is_told_with_an_exit_code(tmp_path: Path) -> None:
    path, config = tmp_path / "keys.yaml", tmp_path / "sluice.yaml"
    path.write_text("- {key: s3cret-s3cret-s3cret, limits: {classes: [gold]}}\n")
    result = CliRunner().invoke(main, ["keys", "check", str(path)])
    assert result.exit_code == Exit.FAILED
    assert "['gold']" in result.stderr and "s3cret" not in result.output
    config.write_text("router: {default_class: gold, classes: {gold: {}}}\n")
    result = CliRunner().invoke(main, ["keys", "check", str(path), "--config", str(config)])
    assert result.exit_code == 0, result.output
    assert "valid, 1 keys are accepted" in result.stdout
    result = CliRunner().invoke(main, ["keys", "check", str(path), "--opens", "admin"])
    assert result.exit_code == Exit.FAILED
    assert "may have only key or sha256, and name" in result.stderr
    path.write_text("- {key: s3cret-s3cret-s3cret, name: me}\n")
    result = CliRunner().invoke(main, ["keys", "check", str(path), "--opens", "admin"])
    assert result.exit_code == 0, result.output


# Local runs.


KEPT = LocalRun(address="http://127.0.0.1:8123", key="a-key")
KILLED = """
import os, signal
from sluice.deploy.local import LocalRun, noted
with noted(LocalRun(address="http://127.0.0.1:8124", key="old")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "sluice"


def test_a_run_is_found_while_it_lasts_by_its_user_only(state: Path) -> None:
    assert local_runs() == []
    with noted(KEPT):
        assert local_runs() == [KEPT]
        (note,) = state.iterdir()
        assert note.stat().st_mode & 0o777 == 0o600
        assert state.stat().st_mode & 0o777 == 0o700
        note.chmod(0o644)  # somebody else may have written or read it
        assert local_runs() == []
        note.chmod(0o600)
        note.write_text(json.dumps({"address": 8123}))
        assert local_runs() == []
    assert list(state.iterdir()) == []


def test_the_note_of_a_killed_run_is_removed(state: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], check=False, env=dict(os.environ))
    assert len(list(state.iterdir())) == 1
    assert local_runs() == []
    assert list(state.iterdir()) == []


class Asked:
    """In place of a server: what it is asked with."""

    given: tuple[str, str | None] = ("", None)

    def __init__(self, address: str, key: str | None) -> None:
        type(self).given = (address, key)
        self.address = address

    def ask(self, *_: object) -> object:
        return {}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], (KEPT.address, "a-key")),
        (["--address", "http://localhost:8123"], ("http://localhost:8123", "a-key")),
        (["--key", "mine"], (KEPT.address, "mine")),
        (["--address", "http://elsewhere:8123"], ("http://elsewhere:8123", None)),
    ],
)
def test_commands_find_the_address_and_the_key_of_this_users_run_only(
    words: list[str], given: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "JsonServer", Asked)
    for name in ("SLUICE_ADDRESS", "SLUICE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    with noted(KEPT):
        CliRunner().invoke(main, ["status", *words])
    assert Asked.given == given


def test_of_several_runs_the_user_has_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    other = LocalRun(address="http://127.0.0.1:8125", key=None)
    monkeypatch.setattr(admin, "local_runs", lambda: [KEPT, other])
    monkeypatch.delenv("SLUICE_ADDRESS", raising=False)
    result = CliRunner().invoke(main, ["status"])
    assert result.exit_code == Exit.USAGE
    assert KEPT.address in result.output and other.address in result.output


# Batches folder.


def test_without_a_folder_that_can_be_written_neither_notes_nor_batches_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no-such-folder")
    with noted(KEPT):
        assert local_runs() == []
    assert with_batches_folder(SluiceConfig()) == SluiceConfig()


def test_it_is_private_and_found_again_on_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = parse_config({"router": {"port": 8123}})
    folder = tmp_path / "state" / "sluice" / "batches" / "8123"
    for _ in range(2):
        assert with_batches_folder(config).router.batches.directory == folder
    assert [each.stat().st_mode & 0o777 for each in (folder, *folder.parents[:2])] == [0o700] * 3


def test_what_is_configured_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    own = parse_config({"router": {"batches": {"directory": str(tmp_path / "own")}}})
    without_class = parse_config({"router": {"classes": {"chat": {}}, "default_class": "chat"}})
    for config in (own, without_class):
        assert with_batches_folder(config) == config
    assert list(tmp_path.iterdir()) == []


# Tables.


WIDTH = 80


def row(replica_id: str, model: str, **fields: Any) -> dict[str, Any]:
    """A replica as the admin API has it, with large figures."""
    return {
        **{"replica_id": replica_id, "model": model, "role": "prefill", "condition": "quarantined"},
        **{"drain": None, "report_age_ms": 120_000.0, "waiting": 2_048, "running": 256},
        "quarantine": {"reason": "failed", "state": "open", "since_ms": 9.0, "retry_in_ms": None},
        **{"reserved": 0, "prefill_ms": 98_765.4, "kv_usage": 0.987, "pab_tokens": 98_765.0},
        **{"last_step_ms": 432.1, "predicted_step_ms": 431.9, "preemptions": 12_345},
        **fields,
    }


def of_class(name: str, model: str) -> dict[str, Any]:
    return {
        **{"class": name, "model": model, "requests": 1_234_567, "attainment": 0.9876},
        **{"tdg": 0.9876, "ttft_ms": {"p50": 12_345.6, "p95": 123_456.7}},
        "admission": {"guaranteed": 1_234_567, "best_effort": 123_456, "refused": 12_345},
    }


MODELS = ("m", "meta-llama/Llama-3.3-70B-Instruct-with-a-long-name")
FLEET = {
    "models": {
        model: {"up": True, "policy": "most_gain", "admission": "pab", "decision_ms": {"p99": 1.25}}
        for model in MODELS
    },
    "unavailable": [],
    "replicas": [
        each
        for model in MODELS
        for each in (
            row("k3jx8w2p", model),
            row("w81qz0sd", model, role="decode", condition="fresh", quarantine=None),
        )
    ],
    "classes": [of_class("interactive", model) for model in MODELS],
}


class Answers:
    """In place of a server."""

    address = "http://127.0.0.1:8000"

    def __init__(self, *_: object) -> None:
        pass

    def ask(self, *_: object) -> object:
        return FLEET


def lines_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.setattr(admin, "JsonServer", Answers)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_tables_of_a_fleet_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(monkeypatch, "status")
    shown = " ".join(lines).split()
    for text in (
        *("k3jx8w2p", "w81qz0sd", "prefill", "decode", "quarantined", "failed", "2048", "12345"),
        *("98,765", "99%", "432.1", "431.9", "1,234,567", "98.8%", "12,346", "123,457"),
        *("interactive", "123,456", "12,345", MODELS[1]),
    ):
        assert text in shown
    assert all(cell_len(line) <= WIDTH for line in lines[lines.index("m") :])


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("policies",), [each.name for each in all_policies()]),
        (("bench", "list"), [*EXPERIMENTS, "replay", "causes", "walk", "usage", "batch"]),
    ],
    ids=["policies", "bench list"],
)
def test_lists_fit_and_name_everything(
    words: tuple[str, ...], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = lines_of(monkeypatch, *words)
    assert [line.split("\t")["policies" in words] for line in piped] == names
    assert len({line.count("\t") for line in piped}) == 1 and "\x1b" not in "".join(piped)
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes it a terminal
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines_of(monkeypatch, *words)]
    assert set(names) <= set(" ".join(lines).split())
    assert "…" not in " ".join(lines)
    assert all(cell_len(line) <= WIDTH for line in lines)


@pytest.mark.parametrize("words", [(), ("bench",), ("config",), ("keys",)], ids=" ".join)
def test_a_list_of_commands_says_the_purpose_of_each_in_one_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(monkeypatch, *words, "--help")
    listed = dict(line.split(maxsplit=1) for line in lines[lines.index("Commands:") + 1 :])
    group: click.Command = main
    for word in words:
        assert isinstance(group, click.Group)
        group = children(group)[word]
    assert isinstance(group, click.Group)
    purposes = {
        name: (command.help or "").partition("\n\n")[0]
        for name, command in children(group).items()
        if not command.hidden
    }
    assert listed == purposes


def test_bench_lists_six_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(monkeypatch, "bench", "--help")
    assert len(lines[lines.index("Commands:") + 1 :]) == 6


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell])
    assert script.exit_code == 0 and f"_SLUICE_COMPLETE={shell}_complete" in script.stdout


def test_the_completion_names_commands_and_options() -> None:
    def completed(line: str) -> set[str]:
        variables = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        environment = {"_SLUICE_COMPLETE": "bash_complete", **variables}
        found = CliRunner().invoke(main, prog_name="sluice", env=environment)
        return {each.partition(",")[2] for each in found.output.splitlines()}

    assert completed("sluice p") == {"policies", "profile"}
    assert completed("sluice policies --j") == {"--json"}


@pytest.mark.parametrize("width", [20, 80, 200])
def test_no_word_is_cut_whatever_the_width(width: int) -> None:
    table = Table("a name", "another, %")
    table.add_row("interactive-with-a-long-name", "[red]123,456.7 ± 0.3")
    out = io.StringIO()
    print_table(table, Console(file=out, width=width))
    assert {"interactive-with-a-long-name", "123,456.7", "0.3", "another,"} <= set(
        out.getvalue().split()
    )
