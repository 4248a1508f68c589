from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from sluice.deploy.app import deployment_name
from sluice.deploy.commands.deploy import application_of, ray_token, state_of, submit
from sluice.deploy.config import ModelFleet, parse_config
from sluice.deploy.json_http import JsonServer, UnreachableError
from sluice.router.tenancy.auth import KeyRing
from tests.deploy.far_server import Answer, far_server

CONFIG: dict[str, Any] = {
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
    return {**CONFIG, section: {**CONFIG[section], **fields}}


def test_serve_and_sluice_accept_it() -> None:
    for data in (CONFIG, MODELS, POOLS, {}):
        application = application_of(data, "chat")
        ServeDeploySchema.model_validate({"applications": [application]})
        parse_config(application["args"])


def test_another_number_of_replicas_builds_nothing_anew() -> None:
    before = application_of(CONFIG, "sluice")
    after = application_of(changed("replica", count=5), "sluice")
    assert version(before) == version(after)
    assert [each["num_replicas"] for each in before["deployments"]] == [3]
    assert [each["num_replicas"] for each in after["deployments"]] == [5]


def test_another_setting_does() -> None:
    before = application_of(CONFIG, "sluice")
    assert version(before) != version(application_of(changed("engine", policy="fcfs"), "sluice"))


def test_each_model_has_its_own_number_of_replicas() -> None:
    deployments = application_of(MODELS, "sluice")["deployments"]
    assert [each["num_replicas"] for each in deployments] == [4, 2]
    assert len({each["name"] for each in deployments}) == 2


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


def test_replicas_that_scale_by_themselves_are_given_no_number() -> None:
    data = changed("replica", autoscaling={"min_replicas": 1, "max_replicas": 4})
    assert application_of(data, "sluice")["deployments"] == []


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


def test_what_was_given_is_left_as_it_is() -> None:
    before = json.dumps(CONFIG)
    application_of(CONFIG, "sluice")
    assert json.dumps(CONFIG) == before


def test_an_invalid_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"replica\.count"):
        application_of({"replica": {"count": 0}}, "sluice")


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
            assert submit(server, application_of(CONFIG, "sluice")) == 0.0
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
