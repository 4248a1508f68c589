"""Ends the processes of a local Ray instance and removes its files, however the instance ended.

``python leftovers.py FOLDER`` does so when its standard input ends: that of ``Cleaner`` ends
with the process that started it, also where that was killed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_END_S = 20.0
"""How long killed processes get to end, seconds."""

_CLEAN_S = 25.0


class Cleaner:
    """A process that kills every process of the instance with files in ``folder``, and removes the
    folder, when this one has ended."""

    def __init__(self, folder: Path) -> None:
        # A session of its own: Ctrl-C on the terminal is not for it.
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

        self._folder = folder

    def clean(self) -> None:
        """Clean up now, and wait until that is done."""
        try:
            self._process.communicate(timeout=_CLEAN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _clean(self._folder)


def _clean(folder: Path) -> None:
    end_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes(folder: Path) -> None:
    """Kill every process of the instance until there is none: one may have started another
    meanwhile."""
    deadline = time.monotonic() + _END_S
    while (found := list(_processes(folder))) and time.monotonic() < deadline:
        for process in found:
            process.kill()
        psutil.wait_procs(found, timeout=1)


def _processes(folder: Path) -> Iterator[psutil.Process]:
    """Descendants with the folder on their command line, and every process that writes a file
    there (one whose parent has ended is no descendant), but not this process and its parent."""
    me = psutil.Process()
    family = set(me.children(recursive=True))
    spared = (me.pid, me.ppid())
    # Nothing of the instance is older than this process; other programs may have many files open.
    since_s = me.create_time() - 1
    for process in psutil.process_iter():
        try:
            if process.pid in spared or process.create_time() < since_s:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            named = process in family and any(str(folder) in word for word in process.cmdline())
            if named or _writes_in(process, folder):
                yield process
        except psutil.Error:
            continue  # it has ended, or is another user's


def _writes_in(process: psutil.Process, folder: Path) -> bool:
    return any(
        getattr(file, "mode", "w") != "r" and Path(file.path).is_relative_to(folder)
        for file in process.open_files()
    )


if __name__ == "__main__":
    sys.stdin.read()
    _clean(Path(sys.argv[1]))
