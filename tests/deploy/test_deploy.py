from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from sluice.deploy.app import deployment_name
from sluice.deploy.cli import main
from sluice.deploy.commands.deploy import application_of, ray_token, state_of, submit
from sluice.deploy.commands.options import Exit
from sluice.deploy.config import ModelFleet, parse_config
from sluice.deploy.json_http import JsonServer, UnreachableError
from sluice.router.tenancy.auth import KeyRing
from tests.deploy.far_server import Answer, far_server

CONFIG = "engine: {kind: simulated, model: sim}\nreplica: {count: 1}\n"
NO_NEWS: list[Answer] = [(503, "the GCS may be down"), (0, None), (502, "<html>bad gateway</html>")]


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deploy", "admin"):
        monkeypatch.setattr(f"sluice.deploy.commands.{name}.POLL_S", 0.01)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token-of-the-tests")


def application(name: str, **fields: Any) -> dict[str, Any]:
    """One application as Serve shows it."""
    return {
        "name": name,
        "status": "RUNNING",
        "message": "",
        "last_deployed_time_s": 1.0,
        "source": "declarative",
        "deployed_app_config": {"name": name, "import_path": "a:b"},
        "deployments": {},
        **fields,
    }


class Dashboard:
    """Serve's API: after the PUT, each look gets the next answer, the last again and again."""

    def __init__(self, *looks: Answer, **serve: Any) -> None:
        self.looks = list(looks)
        self.serve = {"applications": {}, "proxies": {}, "target_capacity": None, **serve}
        self.put: dict[str, Any] | None = None
        self.asked = 0

    def answer(self, method: str, path: str, body: Any) -> Answer:
        assert path == "/api/serve/applications/"
        if method == "PUT":
            self.put = body
            return 200, ""
        if self.put is None:
            return 200, self.serve
        self.asked += 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def run(self, folder: Path, *words: str, config: str = CONFIG) -> Result:
        path = folder / "sluice.yaml"
        path.write_text(config)
        with far_server(self.answer) as address:
            command = ["deploy", "--address", address, "--config", str(path), *words]
            return CliRunner().invoke(main, command)


def runs(**serve: Any) -> Answer:
    ours = application("sluice", last_deployed_time_s=2.0)
    return 200, {"applications": {"sluice": ours}, "proxies": {}, **serve}


def test_deploy_waits_through_answers_that_fail(tmp_path: Path) -> None:
    dashboard = Dashboard(*NO_NEWS, runs())
    result = dashboard.run(tmp_path)
    assert result.exit_code == Exit.OK, result.output
    assert dashboard.asked == len(NO_NEWS) + 1
    assert result.stderr.count("no answer for now") == 1
    assert dashboard.put is not None and "target_capacity" not in dashboard.put


def test_deploy_says_in_the_end_why_it_could_not_look(tmp_path: Path) -> None:
    result = Dashboard((503, "the GCS may be down")).run(tmp_path, "--timeout", "0.05")
    assert result.exit_code == Exit.TIMED_OUT
    assert "the last query failed" in result.stderr and "GCS may be down" in result.stderr


def test_deploy_says_what_a_replica_needs_that_finds_no_place(tmp_path: Path) -> None:
    config = """
      engine:
        kind: simulated
        vllm_args: {tensor-parallel-size: 6, distributed-executor-backend: ray}
      replica: {count: 1, num_gpus: 6, placement_strategy: STRICT_PACK, node_labels: {rack: a}}
    """
    part = {"status": "UPDATING", "target_num_replicas": 1, "replicas": [{"state": "STARTING"}]}
    deployments = {"Replica": part, "Router": {**part, "replicas": [{"state": "RUNNING"}]}}
    ours = application(
        "sluice", status="DEPLOYING", last_deployed_time_s=2.0, deployments=deployments
    )
    looks = (200, {"applications": {"sluice": ours}, "proxies": {}})
    result = Dashboard(looks).run(tmp_path, "--timeout", "0.05", config=config)
    assert result.exit_code == Exit.TIMED_OUT
    said = " ".join(result.stderr.split())
    assert "replica 0/1, router 1/1; a replica of Replica needs 6 GPUs on one node" in said
    assert "with the labels rack=a; it may still start" in said


def test_deploy_says_why_a_part_has_failed(tmp_path: Path) -> None:
    """The message of the application only names the part."""
    part = {
        "status": "DEPLOY_FAILED",
        "message": "It failed 3 times. Error:\nTraceback:\nOSError: cannot listen on port 80\n",
        "target_num_replicas": 1,
        "replicas": [],
    }
    ours = application(
        "sluice",
        status="DEPLOY_FAILED",
        message="Failed to update the deployments ['Router'].",
        last_deployed_time_s=2.0,
        deployments={"Router": part},
    )
    result = Dashboard((200, {"applications": {"sluice": ours}, "proxies": {}})).run(tmp_path)
    assert result.exit_code == Exit.FAILED
    assert "failed to start: OSError: cannot listen on port 80" in " ".join(result.stderr.split())


@pytest.mark.parametrize("status", [401, 403, 404])
def test_deploy_ends_at_once_where_waiting_does_not_help(tmp_path: Path, status: int) -> None:
    dashboard = Dashboard((status, "no"))
    result = dashboard.run(tmp_path)
    assert result.exit_code == (Exit.FAILED if status == 404 else Exit.REFUSED)
    assert dashboard.asked == 1


def test_others_are_sent_along_as_they_were_deployed(tmp_path: Path) -> None:
    others = {
        "chat": application("chat"),
        # Deployed by a configuration once, and by a program since.
        "tried": application("tried", source="imperative"),
        "leaving": application("leaving", status="DELETING", deployed_app_config=None),
    }
    dashboard = Dashboard(runs(), applications=others, target_capacity=40.0)
    assert dashboard.run(tmp_path).exit_code == Exit.OK
    assert dashboard.put is not None
    assert [each["name"] for each in dashboard.put["applications"]] == ["chat", "sluice"]
    assert dashboard.put["target_capacity"] == 40.0


def test_nothing_is_deployed_where_another_application_would_be_deleted(tmp_path: Path) -> None:
    other = application("chat", status="DEPLOYING", deployed_app_config=None)
    dashboard = Dashboard(runs(), applications={"chat": other})
    result = dashboard.run(tmp_path)
    assert result.exit_code == Exit.FAILED
    assert "'chat'" in result.stderr and dashboard.put is None


@pytest.mark.parametrize(
    "body",
    [
        "<!doctype html><html>Ray</html>",
        [],
        {"detail": "no"},
        {"applications": {"a": 1}},
        "[" * 9999,
    ],
)
def test_deploy_says_that_this_is_no_dashboard(tmp_path: Path, body: Any) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(CONFIG)
    with far_server(lambda *_: (200, body)) as address:
        result = CliRunner().invoke(main, ["deploy", "--address", address, "--config", str(path)])
    assert result.exit_code == Exit.FAILED, result.output
    assert result.stderr.count("\n") == 1 and address in result.stderr


def test_a_token_that_is_none_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "first-line\nsecond-line")
    result = Dashboard(runs()).run(tmp_path)
    assert result.exit_code == Exit.FAILED
    assert "RAY_AUTH_TOKEN" in result.stderr and "line" not in result.stderr


class Admin:
    """An application whose replica `one` has two requests, and then what each look says."""

    def __init__(self, *looks: Answer) -> None:
        self.looks = list(looks)

    def answer(self, method: str, path: str, body: Any) -> Answer:
        if method == "POST":
            told = {"model": "m", "replica_id": "one", "left": 2}
            return 200, {**told, "draining": True, "remembered": True}
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def drain(self, *words: str) -> Result:
        with far_server(self.answer) as address:
            return CliRunner().invoke(main, ["drain", "one", "--address", address, *words])


def fleet(left: int | None, unavailable: tuple[str, ...] = ()) -> Answer:
    row = {
        **dict.fromkeys(("waiting", "reserved", "preemptions", "report_age_ms"), 0),
        **dict.fromkeys(("prefill_ms", "kv_usage", "pab_tokens"), 0.0),
        **dict.fromkeys(("last_step_ms", "predicted_step_ms"), 0.0),
        **{"replica_id": "one", "model": "m", "condition": "draining", "drain": "operator"},
        **{"running": left, "quarantine": None},
    }
    rows = [] if left is None else [row]
    return 200, {"models": {}, "unavailable": [*unavailable], "replicas": rows, "classes": []}


def test_drain_waits_through_answers_that_fail() -> None:
    result = Admin(*NO_NEWS, fleet(1), fleet(0)).drain()
    assert result.exit_code == Exit.OK, result.output
    assert "one is empty" in result.stdout


def test_drain_says_in_the_end_why_it_could_not_look() -> None:
    result = Admin((503, {"error": {"message": "it is away"}})).drain("--timeout", "0.05")
    assert result.exit_code == Exit.TIMED_OUT
    assert "still has 2 requests" in result.stderr and "it is away" in result.stderr


@pytest.mark.parametrize("status", [401, 404])
def test_drain_ends_at_once_where_waiting_does_not_help(status: int) -> None:
    result = Admin((status, {"error": {"message": "no"}}), fleet(0)).drain()
    assert result.exit_code == (Exit.FAILED if status == 404 else Exit.REFUSED)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"models": {}, "unavailable": [], "replicas": [{"replica_id": "one"}], "classes": []},
        {"models": {"m": {"up": True}}, "unavailable": [], "replicas": [], "classes": []},
        {"replica_id": "one"},
    ],
)
@pytest.mark.parametrize("words", [("status",), ("usage",), ("drain", "one")], ids=" ".join)
def test_an_answer_of_another_kind_is_a_line(words: tuple[str, ...], body: Any) -> None:
    with far_server(lambda *_: (200, body)) as address:
        result = CliRunner().invoke(main, [*words, "--address", address])
    assert result.exit_code == Exit.FAILED, result.output
    assert result.stderr.count("\n") == 1 and "--address" in result.stderr


def test_a_replica_has_not_ended_because_its_controller_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.deploy.commands.admin.GONE_AFTER_S", 0.02)
    away = [fleet(None, ("m",))] * 5
    result = Admin(*away, fleet(1), fleet(0)).drain("--json")
    assert result.exit_code == Exit.OK, result.output
    assert "unknown now" not in result.stderr
    assert json.loads(result.stdout)["left"] == 0


# Submission.


SUBMISSION_CONFIG: dict[str, Any] = {
    "engine": {"kind": "simulated", "model": "sim"},
    "replica": {"count": 3, "num_cpus": 0.1},
    "router": {"api_keys": ["first-secret-of-many", {"key": "second-secret", "name": "team"}]},
}
MODELS: dict[str, Any] = {
    "engine": {"kind": "simulated"},
    "models": {"small": {"replica": {"count": 4}}, "large": None},
}
POOLS: dict[str, Any] = {
    "engine": {"kind": "simulated"},
    "replica": {"pools": {"prefill": {"count": 2}, "decode": {"count": 3}, "mixed": {}}},
}


def version(application: dict[str, Any]) -> str:
    """What Serve compares to tell whether it must build the application anew."""
    code_version = get_app_code_version(ServeApplicationSchema.model_validate(application))
    assert isinstance(code_version, str)
    return code_version


def changed(section: str, **fields: Any) -> dict[str, Any]:
    return {**SUBMISSION_CONFIG, section: {**SUBMISSION_CONFIG[section], **fields}}


def test_serve_and_sluice_accept_it() -> None:
    for data in (SUBMISSION_CONFIG, MODELS, POOLS, {}):
        before = json.dumps(data)
        application = application_of(data, "chat")
        assert json.dumps(data) == before, "what was given stays"
        ServeDeploySchema.model_validate({"applications": [application]})
        parse_config(application["args"])


def test_only_another_number_of_replicas_builds_nothing_anew() -> None:
    before = application_of(SUBMISSION_CONFIG, "sluice")
    after = application_of(changed("replica", count=5), "sluice")
    assert version(before) == version(after)
    assert [each["num_replicas"] for each in before["deployments"]] == [3]
    assert [each["num_replicas"] for each in after["deployments"]] == [5]
    assert version(before) != version(application_of(changed("engine", policy="fcfs"), "sluice"))
    models = application_of(MODELS, "sluice")["deployments"]
    assert {each["name"]: each["num_replicas"] for each in models} == {
        "Replica-small": 4,
        "Replica-large": 2,
    }


def test_each_pool_has_its_own_number_of_replicas() -> None:
    before = application_of(POOLS, "sluice")
    assert {each["name"]: each["num_replicas"] for each in before["deployments"]} == {
        "Replica": 1,
        "Prefill": 2,
        "Decode": 3,
    }
    more = {"prefill": {"count": 5}, "decode": {"count": 3}, "mixed": {}}
    after = application_of({**POOLS, "replica": {"pools": more}}, "sluice")
    assert version(before) == version(after)
    assert {"name": "Prefill", "num_replicas": 5} in after["deployments"]
    fewer = {"prefill": {"count": 2}, "decode": {"count": 3}}
    assert version(before) != version(
        application_of({**POOLS, "replica": {"pools": fewer}}, "sluice")
    )


def test_a_model_with_a_number_of_its_own_has_none_of_the_pools_that_are_shared() -> None:
    data = {**POOLS, "models": {"a": {}, "b": {"replica": {"count": 4}}}}
    application = application_of(data, "sluice")
    names = {each["name"] for each in application["deployments"]}
    assert {"Prefill-a", "Decode-a", "Replica-b"} <= names and "Prefill-b" not in names
    built = {name for fleet in parse_config(application["args"]).fleets for name in _names(fleet)}
    assert names == built


def _names(fleet: ModelFleet) -> list[str]:
    return [deployment_name(fleet.key, pool.role, pool.name) for pool in fleet.pools]


def test_no_key_is_handed_over_but_its_digest_is() -> None:
    data = changed("router", admin={"keys": ["admin-secret"]}, metrics={"keys": ["page-secret"]})
    application = application_of(data, "sluice")
    assert "secret" not in json.dumps(application)
    config = parse_config(application["args"]).router
    assert len(config.api_keys) == 2
    assert len(config.admin.keys) == 1
    assert len(config.metrics.keys) == 1
    ring = KeyRing(config.api_keys)
    assert ring.check([(b"authorization", b"Bearer second-secret")]).name == "team"


def test_a_cluster_may_take_its_time_to_start_serve() -> None:
    """The answer to the PUT comes later than the answer to anything else may."""
    short_s = 0.05

    def answer(method: str, path: str, _body: Any) -> Answer:
        if path == "/silence":
            silence.wait()
        elif method == "PUT":
            with pytest.raises(UnreachableError, match="timed out"):
                JsonServer(address, timeout_s=short_s).ask("GET", "/silence")
        return 200, {"applications": {}}

    silence = Event()
    with far_server(answer) as address:
        try:
            server = JsonServer(address, timeout_s=short_s)
            assert submit(server, application_of(SUBMISSION_CONFIG, "sluice")) == 0.0
        finally:
            silence.set()


@pytest.mark.parametrize(
    ("router", "addresses"),
    [
        ({"host": "0.0.0.0", "port": 80}, ("http://10.0.0.2:80/v1", "http://[fd00::1]:80/v1")),
        ({"host": "127.0.0.1", "port": 80}, ("http://127.0.0.1:80/v1",)),
        (
            {"host": "0.0.0.0", "tls": {"certificate": "/a", "key": "/b"}},
            ("https://10.0.0.2:8000/v1", "https://[fd00::1]:8000/v1"),
        ),
        ({"port": 0}, ()),
    ],
)
def test_addresses_are_those_of_running_routers(
    router: dict[str, Any], addresses: tuple[str, ...]
) -> None:
    replicas = [
        {"node_ip": "10.0.0.2", "state": "RUNNING"},
        {"node_ip": "10.0.0.2", "state": "RUNNING"},
        {"node_ip": "fd00::1", "state": "RUNNING"},
        {"node_ip": "10.0.0.3", "state": "STARTING"},
        {"node_ip": None, "state": "RUNNING"},
    ]
    routers = {"status": "HEALTHY", "target_num_replicas": 5, "replicas": replicas}
    ours = {
        "status": "RUNNING",
        "deployments": {"Router": routers},
        "deployed_app_config": {"args": {"router": router}},
    }
    with far_server(lambda *_: (200, {"applications": {"chat": ours}})) as address:
        state = state_of(JsonServer(address), "chat")
    assert state is not None and state.addresses == addresses


def test_the_token_is_found_where_rays_tools_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ray_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("usual\n")
    assert ray_token() == "usual"
    named = tmp_path / "named"
    named.write_text("named\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(named))
    assert ray_token() == "named"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert ray_token() == "given"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert ray_token() is None
