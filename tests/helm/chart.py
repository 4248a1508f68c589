"""The chart, rendered: by the renderer in this folder, which does what `helm template` does."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sluice.deploy.chart import CHART, package
from tests.documents import ROOT
from tests.lacking import lacking

Document = dict[str, Any]

SOURCES = Path("/usr/share/gocode")
"""Where Debian puts the sources of Go libraries."""

CUSTOM_RESOURCES = ROOT.parent / "shared" / "schemas" / "ray.io_rayservices.yaml"
"""KubeRay's definition of a RayService, where it lies beside the project."""


class Release(NamedTuple):
    """What the chart makes of values."""

    documents: list[Document]
    notes: str

    def of(self, kind: str) -> list[Document]:
        return [each for each in self.documents if each["kind"] == kind]

    @property
    def service(self) -> Document:
        (found,) = self.of("RayService")
        spec: Document = found["spec"]
        return spec

    @property
    def groups(self) -> list[Document]:
        cluster = self.service["rayClusterConfig"]
        return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]

    @property
    def pods(self) -> list[Document]:
        return [group["template"] for group in self.groups]

    @property
    def serve_config(self) -> Document:
        config: Document = yaml.safe_load(self.service["serveConfigV2"])
        return config


def read(path: Path) -> Document:
    return next(parsed(path.read_text(encoding="utf-8")), {})


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Document:
    """Values over values, as Helm lays them: mappings merge, null removes."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(below, Mapping):
            result[name] = merged(below, value)
        else:
            result[name] = value
    return result


def values_with(over: Mapping[str, Any]) -> Document:
    return merged(read(CHART / "values.yaml"), over)


def render(over: Mapping[str, Any], chart: Path | None = None) -> Release:
    """The ``chart`` with ``over`` on its values. Raises ValueError: a template refuses them."""
    about = read(CHART / "Chart.yaml")
    context = {
        "Values": values_with(over),
        "Chart": {name[0].upper() + name[1:]: value for name, value in about.items()},
        "Release": {"Name": "demo", "Namespace": "llm", "Service": "Helm"},
    }
    command = [_renderer(), str(chart or packaged())]
    done = subprocess.run(command, input=json.dumps(context), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    texts: dict[str, str] = json.loads(done.stdout)
    notes = texts.pop("templates/NOTES.txt")
    return Release([each for text in texts.values() for each in parsed(text)], notes)


def parsed(text: str) -> Iterator[Document]:
    """The documents in rendered YAML; empty ones are not documents."""
    yield from (document for document in yaml.load_all(text, yaml.CSafeLoader) if document)


@functools.cache
def packaged() -> Path:
    """The chart as it is installed, packaged once for the tests of this process."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-chart-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return package(folder)


@functools.cache
def _renderer() -> str:
    go = shutil.which("go")
    if go is None or not (SOURCES / "src/github.com/Masterminds/sprig").is_dir():
        lacking("Debian's golang-go and golang-github-masterminds-sprig-dev are not installed")
    built = Path(tempfile.mkdtemp(prefix="sluice-renderer-")) / "renderer"
    atexit.register(shutil.rmtree, built.parent, ignore_errors=True)
    offline = {"GO111MODULE": "off", "GOPATH": str(SOURCES), "GOFLAGS": "", "CGO_ENABLED": "0"}
    subprocess.run(
        [go, "build", "-o", str(built), str(Path(__file__).parent / "renderer" / "main.go")],
        env={**os.environ, **offline},
        check=True,
    )
    return str(built)
