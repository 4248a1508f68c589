from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS

from tests.helm.chart import Document, Release, merged, render, values_with
from tests.helm.schemas import check_native, check_release
from tests.helm.test_chart import SCHEMA


def containers(release: Release) -> list[Document]:
    """The Ray container of every pod."""
    return [pod["spec"]["containers"][0] for pod in release.pods]


def environment(container: Document) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


# The token of the Hugging Face Hub.


def test_the_hub_s_token_is_in_a_secret_and_nowhere_else() -> None:
    release = render({"hfToken": {"value": "hf_not_to_be_seen"}})
    (secret,) = release.of("Secret")
    assert base64.b64decode(secret["data"]["token"]) == b"hf_not_to_be_seen"
    reference = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "token"}}
    for container in containers(release):
        assert environment(container)["HF_TOKEN"] == reference
    others = [each for each in release.documents if each["kind"] != "Secret"]
    assert "hf_not_to_be_seen" not in json.dumps(others) + release.notes


def test_the_hub_s_token_may_be_in_a_secret_of_the_operator_s() -> None:
    release = render({"hfToken": {"existingSecret": "hub", "key": "read"}})
    assert not release.of("Secret")
    for container in containers(release):
        reference = environment(container)["HF_TOKEN"]
        assert reference == {"secretKeyRef": {"name": "hub", "key": "read"}}
    assert "HF_TOKEN" not in environment(containers(render({}))[0])


# Pods.


def written(container: Document, pod: Document) -> dict[str, str]:
    """The kind of volume of each folder in which a container may write."""
    kinds = {
        each["name"]: kind for each in pod["spec"]["volumes"] for kind in each.keys() - {"name"}
    }
    mounts = (each for each in container["volumeMounts"] if not each.get("readOnly"))
    return {each["mountPath"]: kinds[each["name"]] for each in mounts}


def test_what_is_written_is_on_volumes() -> None:
    """The root file system is read-only. KubeRay adds `/dev/shm`, and starts the autoscaler."""
    release = render({"autoscaling": {"enabled": True}, "modelCache": {"existingClaim": "models"}})
    autoscaler = release.service["rayClusterConfig"]["autoscalerOptions"]
    assert autoscaler["securityContext"]["readOnlyRootFilesystem"] is True
    own = {"/tmp": "emptyDir", "/home/sluice": "emptyDir"}
    shared = {"/home/sluice/.cache": "persistentVolumeClaim"}
    for pod in release.pods:
        (container,) = pod["spec"]["containers"]
        assert written(container, pod) == own | shared
        assert written(autoscaler, pod) == own


def test_a_startup_probe_waits_for_the_ray_node_only() -> None:
    """Not for a model. Ray answers it without its token."""
    group = {"name": "w", "resources": {}}
    moved = {"dashboard-agent-listen-port": "52000"}
    workers = [
        {**group, "rayStartParams": moved},
        {**group, "name": "x", "startupProbe": {}},
        {**group, "name": "y", "startupProbe": {"tcpSocket": {"port": 6379}}},
    ]
    head, *others = containers(render({"workers": workers}))
    probe = head["startupProbe"]
    assert probe["httpGet"] == {"path": "/api/healthz", "port": 52365}
    assert probe["httpGet"]["path"] in PUBLIC_EXACT_PATHS
    assert probe["periodSeconds"] * probe["failureThreshold"] == 900
    assert others[0]["startupProbe"]["httpGet"]["port"] == 52000
    assert "startupProbe" not in others[1]
    assert others[2]["startupProbe"] == workers[2]["startupProbe"]


def test_init_containers_run_before_the_others_and_without_rights() -> None:
    own = {"name": "copy", "image": "b", "securityContext": {"runAsUser": 1}}
    fetch = {"name": "fetch", "image": '{{ include "sluice.image" . }}'}
    workers = [{"name": "w", "resources": {}, "initContainers": [fetch, own]}]
    SCHEMA.validate(values_with({"workers": workers, "head": {"initContainers": [own]}}))
    release = render({"workers": workers})
    check_release(release)
    head, worker = (pod["spec"] for pod in release.pods)
    (container,) = worker["containers"]
    given = {"image": container["image"], "securityContext": container["securityContext"]}
    assert worker["initContainers"] == [{**fetch, **given}, own]
    assert "initContainers" not in head


@pytest.mark.parametrize(
    ("stated", "grace_s"), [({}, 900), ({"terminationGracePeriodSeconds": 5}, 5)]
)
def test_a_worker_has_its_grace_to_hand_over(stated: Document, grace_s: int) -> None:
    """Ray is told of an end that is sooner, but not in the past."""
    release = render({"workers": [{"name": "w", "resources": {}, **stated}]})
    head, worker = (pod["spec"] for pod in release.pods)
    assert worker["terminationGracePeriodSeconds"] == grace_s
    (*_, script) = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert f"--deadline-remaining-seconds {max(0, grace_s - 10)} " in script
    assert "terminationGracePeriodSeconds" not in head and "lifecycle" not in head["containers"][0]


def test_a_digest_takes_the_place_of_the_tag() -> None:
    digest = "sha256:" + "0f" * 32
    release = render({"image": {"repository": "r.example/sluice", "tag": "1", "digest": digest}})
    (test,) = release.of("Pod")
    for container in (*containers(release), *test["spec"]["containers"]):
        assert container["image"] == f"r.example/sluice@{digest}"


# More manifests.


def test_extra_objects_are_templates() -> None:
    labels = {"labels": {"release": "{{ .Release.Name }}"}}
    as_object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", **labels}}
    as_text = """
apiVersion: v1
kind: Secret
metadata: {name: {{ include "sluice.fullname" . }}-b}
"""
    values: Document = {"extraObjects": [as_object, as_text]}
    SCHEMA.validate(values_with(values))
    made = render(values).documents
    plain = {json.dumps(each) for each in render({}).documents}
    one, two = (each for each in made if json.dumps(each) not in plain)
    check_native(one)
    check_native(two)
    assert one["metadata"]["labels"]["release"] == "demo"
    assert two["metadata"]["name"] == "demo-sluice-b"


# Upgrades in steps.

IN_STEPS: Document = {
    "upgrade": {
        "strategy": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {"gatewayClassName": "istio"},
    },
    "autoscaling": {"enabled": True},
    "apiKeys": {"existingSecret": "keys"},
}


def test_an_upgrade_in_steps_is_kuberay_s() -> None:
    SCHEMA.validate(values_with(IN_STEPS))
    release = render(IN_STEPS)
    assert release.service["upgradeStrategy"] == {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {
            "gatewayClassName": "istio",
            "stepSizePercent": 10,
            "intervalSeconds": 60,
            "maxSurgePercent": 20,
        },
    }
    assert release.service["rayClusterConfig"]["enableInTreeAutoscaling"] is True
    assert render({}).service["upgradeStrategy"] == {"type": "NewCluster"}
    check_release(release)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"upgrade": {"clusterUpgradeOptions": {"gatewayClassName": ""}}}, "gatewayClassName"),
        ({"upgrade": {"clusterUpgradeOptions": {"stepSizePercent": 21}}}, "at most maxSurge"),
        ({"autoscaling": {"enabled": False}}, "set autoscaling.enabled"),
        ({"ingress": {"enabled": True, "hosts": ["a.example"]}}, "through the Gateway"),
        ({"apiKeys": {"existingSecret": ""}}, "a Gateway would let"),
    ],
)
def test_an_upgrade_in_steps_is_refused(change: Document, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(merged(IN_STEPS, change))


# `helm test`.


@contextmanager
def service(admission: str | None, key: str | None) -> Iterator[str]:
    """Address of a service that answers as Sluice does; clients need ``key``, if it is given."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "local"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert body["model"] == "local" and body["slo"]["ttft_ms"] > 0
            self.answer({"choices": []})

        def answer(self, body: Document) -> None:
            opened = self.path == "/health" or key in (None, self.bearer())
            self.send_response(200 if opened else 401)
            if admission is not None:
                self.send_header("x-sluice-admission", admission)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def bearer(self) -> str:
            return self.headers.get("authorization", "").removeprefix("Bearer ")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run_test_pod(release: Release, url: str, key: str) -> subprocess.CompletedProcess[str]:
    """The container of `helm test`, run on this machine; what it takes from a Secret is ``key``."""
    (pod,) = release.of("Pod")
    (container,) = pod["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "python"
    given = environment(container)
    assert given["SLUICE_URL"] == "http://demo-sluice:8000"
    texts = {name: value if isinstance(value, str) else key for name, value in given.items()}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **texts, "SLUICE_URL": url},
        capture_output=True,
        text=True,
    )


KEYS = {"apiKeys": {"existingSecret": "keys"}}
TEST_KEY = {**KEYS, "test": {"apiKey": {"existingSecret": "client"}}}


@pytest.mark.parametrize(
    ("values", "needed", "admission", "said"),
    [
        ({}, None, "guaranteed", "ok: x-sluice-admission is guaranteed"),
        ({}, None, None, "FAILED: x-sluice-admission is none"),
        (TEST_KEY, "a-client-s-key", "best-effort", "ok: x-sluice-admission is best-effort"),
        (TEST_KEY, "another-key", "best-effort", "FAILED: /v1/models answers 401"),
        (KEYS, "a-client-s-key", None, "ok: without a key /v1/models answers 401"),
        (KEYS, None, None, "FAILED: without a key /v1/models answers 200"),
    ],
)
def test_the_test_pod_is_a_client(
    values: Document, needed: str | None, admission: str | None, said: str
) -> None:
    release = render(values)
    with service(admission, needed) as url:
        done = run_test_pod(release, url, "a-client-s-key")
    assert done.stdout.splitlines()[-1].startswith(said), done.stderr
    assert (done.returncode == 0) == said.startswith("ok")
    assert "a-client-s-key" not in done.stdout + done.stderr
