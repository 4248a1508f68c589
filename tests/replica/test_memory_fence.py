"""Where a fence is needed, and what is said where there is none."""

from __future__ import annotations

import platform

import pytest

from sluice.replica.scheduler.state_table import membarrier, reader_fence


def test_a_fence_of_this_machine_can_be_passed() -> None:
    reader_fence()()
    membarrier(platform.machine())()


def test_a_machine_without_a_fence_is_refused() -> None:
    with pytest.raises(RuntimeError, match="on sparc64 needs Linux 4"):
        reader_fence("sparc64")


def test_a_kernel_that_refuses_says_why() -> None:
    # A number that is another machine's is no call here, or one that refuses these arguments.
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    with pytest.raises(RuntimeError, match="cannot be used: "):
        reader_fence(other) if other == "aarch64" else membarrier(other)
