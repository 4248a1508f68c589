"""The order in which one process sees another's writes to shared memory.

x86 makes writes visible, and executes reads, in program order. Other machines, such as ARM, may
reorder both. There a reader *fences*: Linux's ``membarrier`` has all cores that run a registered
process pass a full barrier. So if the reader has seen a write, all earlier writes are visible after
the fence; and if the reader has seen part of a write before the fence, it sees the beginning of
that write after it. The reader pays some microseconds and the writer nothing, which matters, as the
writer is an engine between two steps. See membarrier(2); Python has no fence of its own.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from typing import Final

_IN_ORDER: Final = ("x86_64", "AMD64", "i686")

# Its number by machine, and its commands: linux/membarrier.h.
_SYSCALLS: Final = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365}
_EXPEDITED, _REGISTER = 1 << 1, 1 << 2


def reader_fence(machine: str | None = None) -> Callable[[], None]:
    """The function that a reader of shared memory calls between two reads that must not be
    reordered. Both processes must have called this before: that registers them.

    Args:
        machine: machine type, as of :func:`platform.machine`; default: this machine.

    Raises:
        RuntimeError: this machine may reorder reads and writes, and its kernel has no fence.
    """
    machine = machine or platform.machine()
    return _nothing if machine in _IN_ORDER else membarrier(machine)


def membarrier(machine: str) -> Callable[[], None]:
    """The fence of Linux, on any machine.

    Raises:
        RuntimeError: the kernel does not have it.
    """
    call = ctypes.CDLL(None, use_errno=True).syscall
    number = _SYSCALLS.get(machine)

    def command(which: int) -> None:
        if number is None or call(ctypes.c_long(number), which, 0, 0) != 0:
            why = "" if number is None else f": {os.strerror(ctypes.get_errno())}"
            raise RuntimeError(
                f"engines share their state with other processes in memory, which on {machine} "
                f"needs Linux 4.16 or newer with membarrier(2); here it cannot be used{why}"
            )

    command(_REGISTER)
    return lambda: command(_EXPEDITED)


def _nothing() -> None:
    """For machines that need no fence."""
