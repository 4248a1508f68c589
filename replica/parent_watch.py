"""Ends the processes of an engine with the process that made them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_ON_PARENTS_DEATH = 1
"""``PR_SET_PDEATHSIG``, prctl(2)."""


def end_with_parent() -> None:
    """Have the system kill this process when the one that made it ends, however that ends.

    vLLM's engine does not look for its parent, and its workers look where they can: one that waits
    for another worker, or for a GPU that does not answer, would keep the GPU from its successor.
    Only Linux can do so; elsewhere, and where ``multiprocessing`` did not make this process,
    nothing is done. To be called in a process whose parent made it in a thread that stays.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    ctypes.CDLL(None).prctl(_ON_PARENTS_DEATH, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)  # it ended before
