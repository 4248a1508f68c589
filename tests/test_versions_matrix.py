from __future__ import annotations

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
