from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.deploy.ray_start import TRIES, start_ray

SLOW = "The current node timed out during startup. This could happen because"


class SlowRay:
    """What Ray does on a machine that is too busy: so many starts leave processes and fail."""

    def __init__(self, failures: int, words: str = SLOW) -> None:
        self.failures = failures
        self.words = words
        self.given: list[dict[str, Any]] = []
        self.left: list[subprocess.Popen[bytes]] = []

    def init(self, **options: Any) -> None:
        self.given.append(options)
        if len(self.given) <= self.failures:
            code = "import time; time.sleep(600)"
            folder = f"--session-dir={options['_temp_dir']}/session_1"
            self.left.append(subprocess.Popen([sys.executable, "-c", code, folder]))
            raise Exception(self.words)


def replace(monkeypatch: pytest.MonkeyPatch, slow: SlowRay) -> None:
    monkeypatch.setattr("ray.init", slow.init)
    monkeypatch.setattr("ray.shutdown", lambda: None)


def test_a_start_that_took_too_long_is_tried_again_without_its_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowRay(TRIES - 1)
    replace(monkeypatch, slow)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        start_ray(tmp_path, num_cpus=2)
        assert other.poll() is None, "somebody else's"
        other.kill()
    expected = {"address": "local", "_temp_dir": str(tmp_path), "num_cpus": 2}
    for given in slow.given:
        assert expected.items() <= given.items()
    assert len(slow.given) == TRIES
    assert len(slow.left) == TRIES - 1
    assert not any(psutil.pid_exists(process.pid) for process in slow.left)


@pytest.mark.parametrize(
    ("words", "tries"),
    [
        (SLOW, TRIES),
        ("Timed out waiting for file /tmp/gcs_server_port", TRIES),
        ("Failed to start GCS. Last 0 lines", TRIES),
        ("no such folder", 1),
    ],
)
def test_what_does_not_pass_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, tries: int
) -> None:
    slow = SlowRay(TRIES, words)
    replace(monkeypatch, slow)
    with pytest.raises(Exception, match=words):
        start_ray(tmp_path)
    assert len(slow.given) == tries
    assert not any(psutil.pid_exists(process.pid) for process in slow.left)
