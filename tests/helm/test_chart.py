from __future__ import annotations

import base64
import json
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.serve.schema import ServeDeploySchema

from sluice.deploy import ray_start
from sluice.deploy.chart import CHART, contents
from sluice.deploy.config import parse_config
from sluice.router.tenancy.auth import parse_keys
from tests.documents import ROOT
from tests.examples import examples
from tests.helm.chart import (
    CUSTOM_RESOURCES,
    Document,
    Release,
    packaged,
    parsed,
    read,
    render,
    values_with,
)
from tests.helm.schemas import check_native, check_operators, check_ray_service, check_release

EXAMPLES = {path.name.removesuffix("-values.yaml"): path for path in (CHART / "ci").iterdir()}
SCHEMA = jsonschema.Draft7Validator(
    json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
)
DIGEST = "b6d81b360a5672d80c27430f39153e2c4b8b5a4a8a3a5a2f2b2e1d0c9f8e7d6c"


@pytest.fixture(params=sorted(EXAMPLES))
def example(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def release(example: str) -> Release:
    return render(read(EXAMPLES[example]))


def test_what_follows_from_the_code_is_as_the_code_has_it() -> None:
    for path, content in contents().items():
        held = path.read_text(encoding="utf-8") if path.exists() else None
        assert held == content, f"{path.name} of the chart is out of date: `make docs` writes it"


def test_the_versions_are_the_project_s() -> None:
    about = read(CHART / "Chart.yaml")
    assert about["appVersion"] == about["version"] == metadata.version("sluice-serve")
    ray = read(CHART / "values.yaml")["rayVersion"].split(".")
    assert ray[:2] == metadata.version("ray").split(".")[:2]


# What is rendered.


def test_the_schema_kubernetes_and_kuberay_accept_it(example: str, release: Release) -> None:
    SCHEMA.validate(values_with(read(EXAMPLES[example])))
    check_release(release)


@pytest.mark.skipif(not CUSTOM_RESOURCES.exists(), reason="KubeRay's definition is not there")
def test_the_checks_see_a_wrong_field() -> None:
    release = render({})
    (service,) = release.of("RayService")
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group["rayStartParms"] = group.pop("rayStartParams")
    with pytest.raises(jsonschema.ValidationError, match="rayStartParms"):
        check_ray_service(service)
    (budget,) = release.of("PodDisruptionBudget")
    budget["spec"]["minAvailabel"] = budget["spec"].pop("minAvailable")
    with pytest.raises(jsonschema.ValidationError, match="minAvailabel"):
        check_native(budget)


def test_the_checks_see_a_wrong_field_of_an_operator_s() -> None:
    monitor = {"podMonitor": {"enabled": True}}
    (document,) = render({"monitoring": monitor}).of("PodMonitor")
    check_operators(document)
    document["spec"]["podMetricsEndpoints"][0]["intervall"] = "15s"
    with pytest.raises(ValueError, match="unknown fields"):
        check_operators(document)


def test_serve_and_sluice_accept_the_configuration(release: Release) -> None:
    (application,) = ServeDeploySchema.model_validate(release.serve_config).applications
    config = parse_config(application.args)
    (given,) = (each for each in release.of("ConfigMap") if "sluice.yaml" in each["data"])
    assert parse_config(yaml.safe_load(given["data"]["sluice.yaml"])) == config
    assert (config.router.host, config.router.port) == ("0.0.0.0", 8000)
    assert release.serve_config["proxy_location"] == "Disabled"


def test_every_ray_node_has_the_tuned_environment(release: Release) -> None:
    for pod in release.pods:
        (container,) = pod["spec"]["containers"]
        environment = {each["name"]: each.get("value") for each in container["env"]}
        tuned = {name: environment.pop(name) for name in ray_start.TUNED}
        assert tuned == ray_start.TUNED
        assert not [name for name in environment if name.startswith("RAY_SERVE_")]


def test_ray_start_knows_its_options(release: Release) -> None:
    from ray.scripts.scripts import start

    known = {name for each in start.params for name in each.opts}
    for group in release.groups:
        assert {f"--{name}" for name in group["rayStartParams"]} <= known


def test_replicas_fit_the_workers(release: Release) -> None:
    """Those of the examples are all placed once every group has as many workers as it may have."""
    (fleet,) = parse_config(release.serve_config["applications"][0]["args"]).fleets
    for pool in fleet.pools:
        replica, room = pool.replica, 0
        for group in release.groups[1:]:
            if not replica.node_labels.items() <= group.get("labels", {}).items():
                continue
            (container,) = group["template"]["spec"]["containers"]
            limits = container["resources"]["limits"]
            by_cpu = int(limits["cpu"]) // (replica.num_cpus + 0.1)
            gpus = replica.num_gpus or 0
            by_gpu = int(limits.get("nvidia.com/gpu", 0)) // gpus if gpus else by_cpu
            room += int(group["maxReplicas"] * min(by_cpu, by_gpu))
        assert room >= replica.most, pool.role


def labels_of(document: Document) -> Document:
    labels: Document = document["metadata"]["labels"]
    return labels


def selected(selector: Document, labels: list[Document]) -> list[Document]:
    wanted = selector["matchLabels"].items()
    return [each for each in labels if wanted <= each.items()]


def test_selectors_find_what_they_are_for(release: Release) -> None:
    pods = [labels_of(pod) for pod in release.pods]
    services = [labels_of(release.service["serveService"])]
    for document in release.documents:
        spec = document.get("spec", {})
        match document["kind"]:
            case "PodDisruptionBudget":
                (one,) = selected(spec["selector"], pods)
                assert one["app.kubernetes.io/component"] == "worker"
            case "NetworkPolicy":
                assert selected(spec["podSelector"], pods) == pods
                peers = spec["ingress"][0]["from"]
                assert [selected(peer["podSelector"], pods) for peer in peers] == [pods]
            case "PodMonitor":
                assert selected(spec["selector"], pods) == pods
            case "ServiceMonitor":
                assert selected(spec["selector"], services) == services
            case "Pod":
                assert not selected({"matchLabels": labels_of(document)}, pods)
    # KubeRay's service of the head selects by this one, which KubeRay sets.
    assert not any("app.kubernetes.io/name" in labels for labels in pods)


def test_monitors_scrape_ports_that_are_there(release: Release) -> None:
    for pod in release.pods:
        ports = {
            each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]
        }
        assert ports["serve"] == 8000
        for monitor in release.of("PodMonitor"):
            assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports.keys()
    (port,) = release.service["serveService"]["spec"]["ports"]
    for monitor in release.of("ServiceMonitor"):
        assert [each["port"] for each in monitor["spec"]["endpoints"]] == [port["name"]]


def test_what_pods_mount_is_made_or_is_the_operator_s_own(release: Release, example: str) -> None:
    made = {(each["kind"], each["metadata"]["name"]) for each in release.documents}
    own = yaml.safe_dump(read(EXAMPLES[example]))
    for pod in release.pods:
        spec = pod["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in made
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes.keys() == {each["name"] for each in spec["containers"][0]["volumeMounts"]}
        for volume in volumes.values():
            for kind, reference, name in (
                ("ConfigMap", "configMap", "name"),
                ("Secret", "secret", "secretName"),
                ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
            ):
                wanted = volume.get(reference, {}).get(name)
                assert wanted is None or (kind, wanted) in made or wanted in own


def routed(release: Release) -> list[tuple[str, str, Any]]:
    """Path, service and port of everything that is let in from outside."""
    found: list[tuple[str, str, Any]] = []
    for ingress in release.of("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                to = path["backend"]["service"]
                found.append((path["path"], to["name"], to["port"]["name"]))
    for route in release.of("HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for match in rule["matches"]:
                (to,) = rule["backendRefs"]
                found.append((match["path"]["value"], to["name"], to["port"]))
    return found


def test_routes_lead_to_the_service_and_not_to_the_operator_s_part(
    release: Release, example: str
) -> None:
    service = release.service["serveService"]
    (port,) = service["spec"]["ports"]
    routes = routed(release)
    assert bool(routes) == (example in ("pd", "ha"))
    for path, name, to in routes:
        assert name == service["metadata"]["name"]
        assert to in port.values()
        assert not any(each.startswith(path) for each in ("/admin/v1/fleet", "/ui", "/metrics"))


def test_rules_and_dashboards_are_given_to_the_operators(release: Release, example: str) -> None:
    rules = [each["spec"] for each in release.of("PrometheusRule")]
    boards = {
        name: json.loads(text)
        for each in release.of("ConfigMap")
        for name, text in each["data"].items()
        if name.endswith(".json")
    }
    if example in ("gpu", "ha"):
        text = (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text("utf-8")
        if example == "gpu":
            text = text.replace(
                "https://sluice.example.com/docs", "https://wiki.example.org/sluice"
            )
        assert rules == [yaml.safe_load(text)]
        paths = (ROOT / "deploy" / "grafana").glob("*.json")
        assert boards == {path.name: json.loads(path.read_text("utf-8")) for path in paths}
    else:
        assert not rules and not boards


@pytest.mark.parametrize("part", ["prometheusRule", "dashboards"])
def test_a_chart_that_was_not_packaged_says_how_it_is(part: str) -> None:
    with pytest.raises(ValueError, match="`make chart` writes build/chart/sluice"):
        render({"monitoring": {part: {"enabled": True}}}, CHART)


def test_containers_run_without_rights(release: Release) -> None:
    for pod in [*release.pods, *release.of("Pod")]:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_only_an_autoscaled_head_gets_the_token_of_kubernetes(release: Release) -> None:
    cluster = release.service["rayClusterConfig"]
    head, *workers = release.pods
    autoscaled = cluster["enableInTreeAutoscaling"]
    assert head["spec"]["automountServiceAccountToken"] is autoscaled
    assert cluster.get("autoscalerOptions", {}).get("version") == ("v2" if autoscaled else None)
    assert not any(pod["spec"]["automountServiceAccountToken"] for pod in workers)


# Keys.


def test_keys_are_in_their_secret_and_nowhere_else() -> None:
    secret = "a-key-that-must-not-be-seen"
    entries = [secret, {"name": "web", "sha256": DIGEST}]
    release = render({"apiKeys": {"entries": entries}, "adminKeys": {"entries": ["another-key"]}})
    api, admin = release.of("Secret")
    held = [base64.b64decode(each["data"]["keys.yaml"]) for each in (api, admin)]
    assert list(map(yaml.safe_load, held)) == [entries, ["another-key"]]
    assert [len(parse_keys(raw, ())) for raw in held] == [2, 1]
    others = [each for each in release.documents if each["kind"] != "Secret"]
    for text in (json.dumps(others), release.notes):
        assert secret not in text and "another-key" not in text and DIGEST not in text


def test_the_key_files_are_where_the_configuration_says() -> None:
    kinds = ("api", "admin", "metrics")
    release = render({f"{kind}Keys": {"entries": [f"some-{kind}-key"]} for kind in kinds})
    secrets = [each["metadata"]["name"] for each in release.of("Secret")]
    router = release.serve_config["applications"][0]["args"]["router"]
    files = [router["api_keys_file"], router["admin"]["keys_file"], router["metrics"]["keys_file"]]
    for pod in release.pods:
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        (container,) = pod["spec"]["containers"]
        mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        for file, secret in zip(map(Path, files), secrets, strict=True):
            assert mounts[str(file.parent)]["secret"]["secretName"] == secret
            assert file.name == "keys.yaml"


def test_tokens_close_the_application_as_keys_do() -> None:
    issuer = {"issuer": "https://login.example", "audience": ["sluice"], "default_limits": {}}
    values: Document = {
        "config": {"router": {"issuers": {"corp": issuer}}},
        "ingress": {"enabled": True, "hosts": ["a.example"]},
    }
    release = render(values)
    assert release.of("Ingress") and "no API keys" not in release.notes
    values["monitoring"] = {"serviceMonitor": {"enabled": True}}
    with pytest.raises(ValueError, match="asks for a key"):
        render(values)


def test_the_notes_say_what_is_open() -> None:
    assert "no API keys" in render({}).notes
    assert "no API keys" not in render({"apiKeys": {"existingSecret": "keys"}}).notes
    assert "Ray's token is off" in render({"rayAuth": {"enabled": False}}).notes


# Workers.


@pytest.mark.parametrize(
    ("counts", "bounds", "kept"),
    [
        ({}, (1, 1, 1), None),
        ({"replicas": 3}, (3, 3, 3), 2),
        ({"replicas": 0, "maxReplicas": 4}, (0, 0, 4), None),
        ({"replicas": 4, "minReplicas": 0, "maxReplicas": 8}, (4, 0, 8), None),
        ({"replicas": 4, "minReplicas": 2, "minAvailable": 0}, (4, 2, 4), None),
        ({"replicas": 4, "minAvailable": 3}, (4, 4, 4), 3),
    ],
)
def test_numbers_of_workers(
    counts: dict[str, int], bounds: tuple[int, int, int], kept: int | None
) -> None:
    release = render({"workers": [{"name": "w", "resources": {}, **counts}]})
    group = release.groups[1]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == bounds
    budgets = [each["spec"] for each in release.of("PodDisruptionBudget")]
    assert [each["minAvailable"] for each in budgets] == ([] if kept is None else [kept])
    assert all(each["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for each in budgets)


# What is refused.


@pytest.mark.parametrize(
    "values",
    [
        {"imag": {"tag": "1"}},
        {"image": {"repo": "sluice"}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"config": {"routr": {}}},
        {"config": {"router": {"defualt_class": "standard"}}},
        {"config": {"replica": {"count": 0}}},
        {"config": {"models": {"one": {"engin": {}}}}},
        {"head": {"resource": {}}},
        {"workers": []},
        {"workers": [{"name": "w"}]},
        {"workers": [{"name": "W", "resources": {}}]},
        {"workers": [{"name": "w", "resources": {}, "replica": 2}]},
        {"workers": [{"name": "w", "resources": {}, "rayStartParams": {"num-cpus": 2}}]},
        {"autoscaling": {"enabled": "yes"}},
        {"upgrade": {"strategy": "Recreate"}},
        {"upgrade": {"clusterUpgradeOptions": {"stepSizePercent": 0}}},
        {"upgrade": {"clusterUpgradeOptions": {"maxSurgePercent": 101}}},
        {"upgrade": {"clusterUpgradeOptions": {"intervalSeconds": "60s"}}},
        {"hfToken": {"secret": "huggingface"}},
        {"image": {"digest": "b6d81b36"}},
        {"extraObjects": [{"kind": "ConfigMap"}]},
        {"ingress": {"paths": ["v1"]}},
        {"apiKeys": {"keys": ["a"]}},
        {"monitoring": {"serviceMonitor": {"interval": "often"}}},
    ],
    ids=json.dumps,
)
def test_the_schema_refuses(values: Document) -> None:
    with pytest.raises(jsonschema.ValidationError):
        SCHEMA.validate(values_with(values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ingress": {"enabled": True, "hosts": ["a.example"]}}, "set apiKeys"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}]}}, "set apiKeys"),
        ({"ingress": {"enabled": True}, "apiKeys": {"anonymous": True}}, "ingress.hosts"),
        ({"httpRoute": {"enabled": True}, "apiKeys": {"anonymous": True}}, "parentRefs"),
        ({"apiKeys": {"existingSecret": "a", "entries": ["b"]}}, "not both"),
        ({"hfToken": {"existingSecret": "a", "value": "b"}}, "hfToken: set"),
        ({"config": {"router": {"api_keys": ["a"]}}}, "use apiKeys"),
        ({"config": {"router": {"admin": {"keys": ["a"]}}}}, "use adminKeys"),
        ({"config": {"router": {"metrics": {"keys_file": "/a"}}}}, "use metricsKeys"),
        (
            {
                "monitoring": {"serviceMonitor": {"enabled": True}},
                "apiKeys": {"existingSecret": "a"},
            },
            "asks for a key",
        ),
        ({"config": {"router": {"port": 80}}}, "are the chart's"),
        (
            {"config": {"router": {"tls": {"certificate": "/a", "key": "/b"}}}},
            "probes routers by plain HTTP",
        ),
        ({"gcsFaultTolerance": {"enabled": True}}, "host:port of your Redis"),
        ({"workers": [{"name": "w", "resources": {}}] * 2}, 'named "w"'),
        (
            {"workers": [{"name": "w", "resources": {}, "replicas": 2, "maxReplicas": 1}]},
            "minReplicas <= replicas <= maxReplicas",
        ),
    ],
)
def test_the_templates_refuse(values: Document, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(values)


# Any values.

SWITCHES = {
    "config": {
        "engine": {"kind": "simulated"},
        "models": {"small": {}, "large": {"replica": {"count": 4}}},
        "router": {"metrics": {"access": "open"}, "batches": {"directory": "/batches"}},
    },
    "autoscaling": {"enabled": True},
    "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"},
    "ingress": {"enabled": True, "hosts": ["a.example", "b.example"]},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    "modelCache": {"create": True, "storageClassName": "shared"},
    "networkPolicy": {"clients": [{"podSelector": {}}], "operator": [], "monitoring": []},
    "podDisruptionBudget": {"enabled": False},
    "serviceAccount": {"create": False},
    "rayAuth": {"enabled": False},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "image": {"digest": f"sha256:{DIGEST}", "pullSecrets": [{"name": "registry"}]},
    "adminKeys": {"existingSecret": "operators"},
    "fullnameOverride": "a-name-that-is-so-long-that-kuberay-would-not-take-it",
    "upgrade": {"strategy": "None"},
    "monitoring": {
        "serviceMonitor": {"enabled": True, "authorization": {"existingSecret": "scrape"}},
        "dashboards": {"enabled": True, "annotations": {"folder": "llm"}},
        "prometheusRule": {"enabled": True, "labels": {"a": "b"}},
        "podMonitor": {"enabled": True},
    },
    "volumes": [{"name": "batches", "persistentVolumeClaim": {"claimName": "batches"}}],
    "volumeMounts": [{"name": "batches", "mountPath": "/batches"}],
    "envFrom": [{"secretRef": {"name": "huggingface"}}],
    "hfToken": {"value": "hf_some_token"},
    "scratchSize": "1Gi",
}


@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(st.sampled_from(sorted(SWITCHES))))
def test_any_mix_of_options_is_accepted(chosen: set[str]) -> None:
    values: Document = {name: SWITCHES[name] for name in sorted(chosen)}
    values["apiKeys"] = {"existingSecret": "clients"}
    SCHEMA.validate(values_with(values))
    release = render(values)
    for document in release.documents:
        assert len(document["metadata"]["name"]) <= 63
    check_release(release)
    (application,) = ServeDeploySchema.model_validate(release.serve_config).applications
    parse_config(application.args)


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on the path")
def test_helm_renders_the_same(example: str, release: Release) -> None:
    chart, values = str(packaged()), str(EXAMPLES[example])
    command = ["helm", "template", "demo", chart, "-n", "llm", "-f", values]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def name(document: Document) -> tuple[str, str]:
        return document["kind"], document["metadata"]["name"]

    assert sorted(parsed(text), key=name) == sorted(release.documents, key=name)
