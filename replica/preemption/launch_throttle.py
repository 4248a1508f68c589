"""Bounds how far launches run ahead of the device, so that a check reflects the device's progress.

On a GPU an operator is launched and computes later. Launching is the faster part, so after a few
milliseconds a whole forward pass may be queued. A check that saw only the launches would stop a
prefill whose operators are all queued, and the urgent task would come after them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class Pacer(Protocol):
    """The device operations of a check.

    Attributes:
        ahead: max checks by which launches are ahead of the device.
    """

    ahead: int

    def start(self) -> None:
        """A task begins, with nothing queued before it."""

    def pace(self) -> None:
        """At a check: wait until the device is close enough."""

    def stop(self) -> Callable[[], float]:
        """At a stop: returns a function that later gives the time at which the device had computed
        all previous work, in seconds on the host's clock."""


class Immediate:
    """A device that has computed an operator when its call returns: a CPU.

    Args:
        clock: monotonic seconds.
    """

    ahead = 0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def start(self) -> None:
        """Nothing to do."""

    def pace(self) -> None:
        """Nothing to wait for."""

    def stop(self) -> Callable[[], float]:
        """The present time."""
        now_s = self._clock()
        return lambda: now_s


class Paced:
    """A device with a queue, in which events mark positions.

    Each check records an event and waits for the one that was recorded ``ahead`` checks before.
    Then at most the operators between these two are queued: enough that the device has work while
    the next ones are launched, few enough that a stop comes soon. With ``ahead`` 0 every check
    waits for the device, which then idles until the next launch.

    A ring of events is enough, as they are recorded in turn. Nested tasks continue to use it:
    operators that the suspended task has queued are still in front of them.

    The time at which the device reached a stop is computed from its event's distance to an event
    with a known time on the host: the start of the task at the bottom of the stack, when nothing is
    queued.

    Args:
        ahead: max checks by which launches are ahead.
        event: makes an event that keeps its time, such as ``torch.cuda.Event``.
        clock: monotonic seconds.

    Raises:
        ValueError: ``ahead`` is negative.
    """

    def __init__(
        self, ahead: int, event: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        if ahead < 0:
            raise ValueError(f"launches cannot be {ahead} checks ahead of the device")
        self.ahead = ahead
        self._event = event
        self._clock = clock
        self._ring = [event() for _ in range(ahead + 1)]
        self._recorded = 0
        self._start = event()
        self._start_s = 0.0

    def start(self) -> None:
        """Read the host's clock while the device is idle."""
        self._start.record()
        self._start.synchronize()
        self._start_s = self._clock()

    def pace(self) -> None:
        """Wait until the device has reached the check that was ``ahead`` before this one."""
        ring, here = self._ring, self._recorded
        ring[here % len(ring)].record()
        self._recorded = here + 1
        if here >= self.ahead:
            ring[(here + 1) % len(ring)].synchronize()  # the oldest

    def stop(self) -> Callable[[], float]:
        """A function that returns when the device reached this stop; it waits for that."""
        start, start_s, stopped = self._start, self._start_s, self._event()
        stopped.record()

        def stopped_s() -> float:
            stopped.synchronize()
            return start_s + float(start.elapsed_time(stopped)) / 1e3

        return stopped_s


LAUNCH_AHEAD = 2
"""Max checks by which launches run ahead of a GPU: a prefill stops up to this many operators, or
layers, later, but the device has work while the next ones are launched."""


def pacer_for(device: Any) -> Pacer:
    """The pacer of a ``torch.device``."""
    if device.type == "cpu":
        return Immediate()
    from torch.cuda import Event

    return Paced(LAUNCH_AHEAD, lambda: Event(enable_timing=True))
