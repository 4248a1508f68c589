from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from sluice.deploy.chart import CHART
from sluice.deploy.config import SluiceConfig, parse_config
from sluice.router.tenancy.auth import parse_keys
from tests.documents import ROOT, marked
from tests.helm.chart import Document, merged, read, render, values_with
from tests.helm.schemas import check_release
from tests.helm.test_chart import SCHEMA
from tests.metrics_catalogue import catalogue
from tests.promql import metrics_in

DOCUMENT = ROOT / "docs" / "kubernetes.md"
COMMANDS = [
    shlex.split(line) for block in marked(DOCUMENT, "check: command") for line in block.splitlines()
]


def commands(program: str) -> list[list[str]]:
    found = [words[1:] for words in COMMANDS if words[0] == program]
    assert found
    return found


@pytest.mark.parametrize("text", marked(DOCUMENT, "check: values"))
def test_the_values_are_accepted(text: str) -> None:
    values = yaml.safe_load(text)
    SCHEMA.validate(values_with(values))
    release = render(values)
    check_release(release)
    (application,) = release.serve_config["applications"]
    parse_config(application["args"])


def test_keda_asks_for_metrics_that_exist() -> None:
    """And what it scales is there."""
    found: list[Any] = [yaml.safe_load(text) for text in marked(DOCUMENT, "check: values")]
    (values,) = (each for each in found if "ScaledObject" in str(each))
    release = render(values)
    (scaled,), (deployment,) = release.of("ScaledObject"), release.of("Deployment")
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (trigger,) = scaled["spec"]["triggers"]
    known = catalogue()
    asked = list(metrics_in(promql_parser.parse(trigger["metadata"]["query"])))
    assert len(asked) == 3
    for name, labels in asked:
        assert labels <= known[name].labels


def test_helm_is_options_of_things_that_exist() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--namespace", "-n")
    parser.add_argument("--create-namespace", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--values", "-f", action="append", default=[])
    parser.add_argument("--version")
    assert ["chart"] in commands("make")
    make = (ROOT / "Makefile").read_text("utf-8")
    (folder,) = re.findall(r"\(BIN\)/python -m sluice.deploy.chart --package (\S+)", make)
    for words in commands("helm"):
        options = parser.parse_args(words)
        if "install" in options.words and "kuberay-operator" not in options.words:
            about = read(CHART / "Chart.yaml")
            archive = f"{CHART.name}-{about['version']}.tgz"
            assert options.words[-1] in (f"{folder}/{CHART.name}", archive)
            values: Document = {}
            for path in set(options.values) - {"values.yaml"}:  # which the page has
                values = merged(values, read(ROOT / path))
            for name, value in (each.split("=", 1) for each in options.set):
                values = merged(values, _nested(name, value))
            SCHEMA.validate(values_with(values))


def _nested(name: str, value: Any) -> Document:
    for part in reversed(name.split(".")):
        value = {part: value}
    result: Document = value
    return result


def test_the_images_are_built_from_files_that_exist() -> None:
    built = [words[words.index("--file") + 1] for words in commands("docker") if "build" in words]
    assert {ROOT / path for path in built} == set((ROOT / "deploy").glob("Dockerfile*"))


def test_the_names_are_those_of_the_release() -> None:
    (service,) = render({}).of("RayService")
    name = service["metadata"]["name"]
    said = set(re.findall(r"(?:rayservice|service|svc)/([\w-]+)", DOCUMENT.read_text("utf-8")))
    assert said == {name, f"{name}-head-svc"}


def test_the_keys_are_keys() -> None:
    (text,) = marked(DOCUMENT, "check: keys")
    entries = parse_keys(text.encode(), SluiceConfig().router.classes)
    assert [entry.name for entry in entries] == ["web", "nightly"]


def test_the_files_of_values_are_the_examples() -> None:
    named = set(re.findall(r"`(\w+-values\.yaml)`", DOCUMENT.read_text("utf-8")))
    assert named == {path.name for path in (CHART / "ci").iterdir()}


def test_the_configuration_is_where_the_document_says() -> None:
    (path,) = set(re.findall(r"/etc/sluice/[\w./-]+", DOCUMENT.read_text("utf-8")))
    release = render({})
    (given,) = (each for each in release.of("ConfigMap") if "sluice.yaml" in each["data"])
    (container,) = release.pods[0]["spec"]["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert str(Path(mounts["config"]) / "sluice.yaml") == path
    assert given["data"]["sluice.yaml"]
