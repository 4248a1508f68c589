from __future__ import annotations

from typing import Any

import pytest
import yaml

from sluice.deploy.config import parse_config
from sluice.router.config import RouterConfig
from tests.documents import ROOT, marked
from tests.helm.chart import Document, Release, merged, render, values_with
from tests.helm.schemas import check_native, check_release
from tests.helm.test_chart import SCHEMA, labels_of, selected

DOCUMENT = ROOT / "docs" / "kubernetes.md"
PORT = 9002
GATEWAYS = [{"podSelector": {"matchLabels": {"app": "envoy"}}}]
VALUES: Document = {
    "config": {"router": {"replicas": 2, "picker": {"port": PORT}}},
    "picker": {"workerGroup": "routers"},
    "workers": [
        {"name": "routers", "replicas": 2, "rayLabels": {"zone": "a"}, "resources": {}},
        {"name": "gpu", "replicas": 2, "resources": {}},
    ],
}


def router_of(release: Release) -> RouterConfig:
    (application,) = release.serve_config["applications"]
    return parse_config(application["args"]).router


def policy_of(release: Release) -> list[Document]:
    rules: list[Document] = release.of("NetworkPolicy")[0]["spec"]["ingress"]
    return rules


def test_routers_run_in_one_group_whose_ready_pods_are_the_service() -> None:
    SCHEMA.validate(values_with(VALUES))
    release = render(VALUES)
    (service,) = release.of("Service")
    spec = service["spec"]
    (port,) = spec["ports"]
    pods = [labels_of(pod) for pod in release.pods]
    assert selected({"matchLabels": spec["selector"]}, pods) == [pods[1]]
    assert spec["clusterIP"] == "None" and "publishNotReadyAddresses" not in spec
    # Serve places routers by the labels of Ray nodes, which only this group has.
    nodes = [group.get("labels", {}) for group in release.groups]
    router = router_of(release)
    assert router.node_labels == {"sluice/worker-group": "routers"}
    assert selected({"matchLabels": router.node_labels}, nodes) == [nodes[1]]
    assert nodes[1]["zone"] == "a"
    # A pod is ready if its router says that replicas take requests. Kubernetes asks `grpc` for
    # the status of the service without a name.
    head, routers, others = (pod["spec"]["containers"][0] for pod in release.pods)
    (named,) = (each for each in routers["ports"] if each["name"] == port["targetPort"])
    assert port["port"] == named["containerPort"] == router.picker.port == PORT
    assert routers["readinessProbe"]["grpc"] == {"port": PORT}
    assert router.picker.host == "0.0.0.0"
    for container in (head, others):
        assert "readinessProbe" not in container
        assert PORT not in [each["containerPort"] for each in container["ports"]]
    check_release(release)


def test_what_an_operator_states_of_the_group_stays() -> None:
    probe = {"tcpSocket": {"port": PORT}}
    router = {"node_labels": {"zone": "a"}}
    over = {"config": {"router": router}, "picker": {"annotations": {"a": "b"}}}
    values = merged(VALUES, over)
    values["workers"] = [{**values["workers"][0], "readinessProbe": probe}]
    release = render(values)
    assert release.pods[1]["spec"]["containers"][0]["readinessProbe"] == probe
    assert router_of(release).node_labels == {"zone": "a", "sluice/worker-group": "routers"}
    (service,) = release.of("Service")
    assert service["metadata"]["annotations"] == {"a": "b"}
    # Without a group there is no service.
    for plain in ({}, {"config": {"router": {"picker": {"port": PORT}}}}):
        release = render(plain)
        assert not release.of("Service") and not router_of(release).node_labels
        assert not any("labels" in group for group in release.groups)


@pytest.mark.parametrize("port", [None, PORT])
def test_gateways_reach_the_picker_and_the_streams_of_replicas(port: int | None) -> None:
    values = merged(VALUES if port else {}, {"networkPolicy": {"gateways": GATEWAYS}})
    SCHEMA.validate(values_with(values))
    release = render(values)
    check_native(*release.of("NetworkPolicy"))
    (rule,) = (each for each in policy_of(release) if each.get("from") == GATEWAYS)
    # A network namespace begins with this range of Linux for ports that the system chooses.
    ports = [(each["port"], each.get("endPort")) for each in rule["ports"]]
    assert ports == ([(port, None)] if port else []) + [(32768, 60999)]
    assert not any(str(PORT) in str(each) for each in policy_of(render(VALUES)))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"config": {"router": {"picker": {"port": None}}}}, "set config.router.picker.port"),
        ({"picker": {"workerGroup": "router"}}, '"router" is none of .*: routers, gpu'),
        ({"config": {"router": {"picker": {"host": "::"}}}}, "host is the chart's"),
        (
            {
                "upgrade": {
                    "strategy": "NewClusterWithIncrementalUpgrade",
                    "clusterUpgradeOptions": {"gatewayClassName": "istio"},
                },
                "autoscaling": {"enabled": True},
                "apiKeys": {"existingSecret": "keys"},
            },
            "through the Gateway that KubeRay makes",
        ),
    ],
)
def test_the_templates_refuse(over: Document, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(merged(VALUES, over))


def test_the_document_s_pool_names_the_service() -> None:
    found: list[Any] = [yaml.safe_load(text) for text in marked(DOCUMENT, "check: values")]
    (values,) = (each for each in found if "picker" in each)
    release = render(values)
    (service,), (pool,) = release.of("Service"), release.of("InferencePool")
    spec = pool["spec"]
    assert spec["endpointPickerRef"] == {
        "name": service["metadata"]["name"],
        "port": {"number": service["spec"]["ports"][0]["port"]},
        "failureMode": "FailClose",
    }
    pods = [labels_of(pod) for pod in release.pods]
    assert selected(spec["selector"], pods) == pods[1:]
