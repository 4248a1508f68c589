"""Ends the processes of an engine when their parent process ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_ON_PARENTS_DEATH = 1
"""``PR_SET_PDEATHSIG``, prctl(2)."""


def end_with_parent(parent: int | None = None) -> None:
    """Have the system kill this process when its parent ends, for whatever reason. ``parent`` is
    its process id, by default the one that ``multiprocessing`` knows.

    vLLM's engine does not check for its parent, and its workers check only where they can: a worker
    that waits for another worker, or for a GPU that does not answer, would keep the GPU from its
    successor. This works on Linux only; on other systems, and without a known parent, it does
    nothing. The parent must have made this process in a thread that lives as
    long as the parent.
    """
    if parent is None:
        known = multiprocessing.parent_process()
        parent = None if known is None else known.pid
    if sys.platform != "linux" or parent is None:
        return
    ctypes.CDLL(None).prctl(_ON_PARENTS_DEATH, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has ended already
