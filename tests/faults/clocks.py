"""The wall clock of every process jumps, by libfaketime from a file; monotonic clocks continue.

Its versions up to 0.9.10 change the deadline of a sleep by that clock, too
(https://github.com/wolfcw/libfaketime/issues/426): a library before it has the kernel's call."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.e2e.conftest import wait_until
from tests.faults.replicas import FLEET
from tests.faults.scenario import Scenario, Setting, Trial

_LIBRARIES = "lib*/*/faketime/libfaketime.so.1", "lib/faketime/libfaketime.so.1"
_SLEEP = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *at, struct timespec *left) {
  int before = errno, failed = syscall(SYS_clock_nanosleep, clock, flags, at, left);
  int error = failed ? errno : 0;
  errno = before;
  return error;
}
"""
_OFFSET_FILE = "FAKETIME_TIMESTAMP_FILE"

FORWARD_S = 3600
BACK_S = -1800


@cache
def library() -> Path | None:
    """libfaketime, where it is installed."""
    return next((found for each in _LIBRARIES for found in Path("/usr").glob(each)), None)


class ClockSetting(Setting):
    """A system with a wall clock of its own."""

    @contextmanager
    def open(self) -> Iterator[Trial]:
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as environment:
            file = Path(folder) / "offset"
            file.write_text("+0")
            # Of the processes to be started: this one has been loaded without the library.
            environment.setenv("LD_PRELOAD", f"{_real_sleep(Path(folder))} {library()}")
            environment.setenv(_OFFSET_FILE, str(file))
            environment.setenv("FAKETIME_CACHE_DURATION", "1")
            environment.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            with super().open() as trial:
                yield trial


def _real_sleep(folder: Path) -> Path:
    made = folder / "sleep.so"
    command = ["cc", "-shared", "-fPIC", "-o", made, "-x", "c", "-"]
    subprocess.run(command, input=_SLEEP, text=True, check=True)
    return made


def clock_jumps(trial: Trial) -> Callable[[], bool]:
    """An hour forward, then to half an hour before the true time, then to the true time."""
    file = Path(os.environ[_OFFSET_FILE])
    trial.undo.callback(file.write_text, "+0")
    for offset_s in (FORWARD_S, BACK_S, 0) if not os.environ.get("NOJUMP") else (0, 0, 0):
        file.write_text(f"{offset_s:+d}")
        wait_until(lambda at=offset_s: _all_say(trial, at), "the clock has jumped", every_s=0.2)
    return lambda: True


def _all_say(trial: Trial, offset_s: float) -> bool:
    return all(abs(_created(trial) - time.time() - offset_s) < 60 for _ in range(6))


def _created(trial: Trial) -> float:
    body = {"model": trial.model, "prompt": "one", "max_tokens": 1}
    with suppress(httpx.HTTPError, KeyError, ValueError):
        answer = httpx.post(f"{trial.url}/v1/completions", json=body, timeout=10).json()
        return float(answer["created"])
    return 0.0


_MISSING = "libfaketime or a C compiler is not installed"
CLOCK = ClockSetting({**FLEET.fields, "name": "clock-faults"})

SCENARIOS = (
    Scenario(
        "the wall clock jumps",
        CLOCK,
        clock_jumps,
        longer_s=8.0,
        quick=False,
        missing=lambda: "" if library() and shutil.which("cc") else _MISSING,
    ),
)
