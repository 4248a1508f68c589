"""Strict validation of what the chart makes: unknown fields are errors."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.helm.chart import CUSTOM_RESOURCES, Document, Release
from tests.lacking import lacking

KUBERNETES = ("1.28", kubernetes_validate.latest_version())
"""The oldest Kubernetes that the chart is for, and the newest that there are schemas of."""

NATIVE = ("v1", "apps/v1", "networking.k8s.io/v1", "policy/v1", "scheduling.k8s.io/v1")

OPERATORS = {
    "keda.sh/v1alpha1": "keda.v1alpha1",
    "monitoring.coreos.com/v1": "prometheus_operator.v1",
}
"""Models of the custom resources of KEDA and the Prometheus operator, from their definitions."""


def check_native(document: Document) -> None:
    """Hold an object of Kubernetes to its schema. Raises ValidationError."""
    for version in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


def check_release(release: Release) -> None:
    """Hold all that is rendered to its schema. Raises ValidationError."""
    for document in release.documents:
        if document["apiVersion"] in NATIVE:
            check_native(document)
        elif document["apiVersion"] in OPERATORS:
            check_operators(document)
    for pod in release.pods:
        named = {**pod["metadata"], "name": "pod"}
        check_native({"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": pod["spec"]})
    if CUSTOM_RESOURCES.exists():
        check_ray_service(*release.of("RayService"))


def check_operators(document: Document) -> None:
    """Hold a custom resource of KEDA or of the Prometheus operator to its definition. Raises
    ValueError."""
    try:
        module = importlib.import_module(f"cloudcoil.models.{OPERATORS[document['apiVersion']]}")
    except ModuleNotFoundError as missing:
        lacking(f"{missing.name} is not installed: it is in the extra `test`")
    model = getattr(module, document["kind"]).model_validate(document)
    known = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if known != document:
        raise ValueError(f"unknown fields: {document}, known are {known}")


def check_ray_service(document: Document) -> None:
    """Hold a RayService to KubeRay's definition. Raises ValidationError."""
    _ray_service().validate(document)


@functools.cache
def _ray_service() -> jsonschema.Draft7Validator:
    definition = yaml.load(CUSTOM_RESOURCES.read_text(encoding="utf-8"), yaml.CSafeLoader)
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    return jsonschema.Draft7Validator(_strict(version["schema"]["openAPIV3Schema"]))


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: _strict(value) for name, value in schema.items()}
    if result.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    names = isinstance(result.get("properties"), dict) and result.get("type") == "object"
    if names and not result.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result
