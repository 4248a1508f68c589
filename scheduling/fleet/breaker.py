"""When a replica that fails its requests gets no more of them, and when it is tried again: a
circuit breaker (Nygard, *Release It!*, 2nd ed., 2018, chapter 5). Times are arguments, seconds on
one monotonic clock."""

from __future__ import annotations

import enum
from collections import deque
from math import inf
from typing import NamedTuple

FAILURES = 3
"""Failures that open a breaker."""

FAILURES_WITHIN_S = 10.0
"""Time within which these come."""

MIN_OPEN_S = 1.0
MAX_OPEN_S = 60.0
"""How long a breaker is open at first, and at most."""

PROBE_S = 10.0
"""How long a probe may stay without a result before another one may be sent, seconds."""

ENDED_PROBE_S = 1.0
"""The same of one that has ended: the replica's next report says what it got done."""


class ReplicaFault(enum.StrEnum):
    """What a router saw of a replica: a request ``FAILED`` in a way that may not happen elsewhere,
    or a stream ``HUNG``, without progress for too long."""

    FAILED = "failed"
    HUNG = "hung"


class BreakerState(enum.StrEnum):
    """``CLOSED``: requests flow. ``OPEN``: none do. ``HALF_OPEN``: one at a time may, to see what
    becomes of it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class _Failure(NamedTuple):
    at_s: float
    ended: int  # requests that had ended at the replica by then


class Breaker:
    """Opens when its replica fails or hangs, and closes when a request succeeds there.

    - It opens when the replica reports that it hangs, when a stream hangs while its engine makes no
      steps, or at ``FAILURES`` failures within ``FAILURES_WITHIN_S`` in which at most that many
      requests ended there. So neither requests that fail anywhere nor one router that does not
      reach the replica open it.
    - It is open for ``MIN_OPEN_S`` and while the replica reports that it hangs; then one probe at
      a time is let through. Work done closes it, a failure opens it again.
    - After closing it is on trial for as long as it was open, at least ``FAILURES_WITHIN_S``: one
      failure opens it, for twice as long each time, up to ``MAX_OPEN_S``.

    All methods are ``O(1)``. Callers check ``state`` after each method that may change it."""

    __slots__ = (
        "_ended",
        "_failures",
        "_hangs",
        "_open_s",
        "_trial_ended",
        "_trial_until_s",
        "cause",
        "due_s",
        "probe",
        "since_s",
        "state",
    )

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.cause = ReplicaFault.FAILED
        """Why it was opened last."""
        self.since_s = -inf
        """Since when it has not been closed."""
        self.due_s = inf
        """When :meth:`advance` has something to do."""
        self.probe: int | None = None
        """Key of the request that was let through while half-open, if any."""
        self._hangs = False
        self._ended = 0
        self._failures: deque[_Failure] = deque(maxlen=FAILURES)
        self._open_s = 0.0
        self._trial_until_s = -inf
        self._trial_ended = 0

    def advance(self, now_s: float) -> None:
        """Let what is due happen."""
        if now_s < self.due_s:
            return
        self.due_s = inf
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
        self.probe = None

    def fault(self, fault: ReplicaFault, now_s: float, stepping: bool) -> bool:
        """Count a failure that a router saw; whether it opened the breaker. ``stepping``: the
        replica has just reported a step, so its engine does not hang."""
        self.advance(now_s)
        if self.state is BreakerState.OPEN:
            return False
        self._failures.append(_Failure(now_s, self._ended))
        hangs = fault is ReplicaFault.HUNG and not stepping
        if (
            hangs
            or self.state is BreakerState.HALF_OPEN
            or self._on_trial(now_s)
            or self._too_many(now_s)
        ):
            self._open(fault, now_s)
            return True
        return False

    def report(self, hangs: bool, ended: int, now_s: float) -> bool:
        """Record a replica's report: whether its engine hangs, and how many more requests ended
        there. Return whether that opened the breaker."""
        self.advance(now_s)
        self._ended += ended
        was, self._hangs = self._hangs, hangs
        if hangs and not was:
            opened = self.state is not BreakerState.OPEN
            if opened:
                self._open(ReplicaFault.HUNG, now_s)
            self.due_s = inf  # until it takes that back
            return opened
        if was and not hangs:
            self.due_s = now_s
            self.advance(now_s)
        return False

    def send(self, key: int, now_s: float) -> None:
        """The request of this key is the probe. Raises ``RuntimeError`` if it is not half-open, or
        a probe is under way."""
        if self.state is not BreakerState.HALF_OPEN or self.probe is not None:
            raise RuntimeError(f"no probe may be sent: {self.state}, probe {self.probe}")
        self.probe = key
        self.due_s = now_s + PROBE_S

    def ended(self, now_s: float) -> None:
        """The probe has ended, for whatever reason."""
        if self.probe is not None:
            self.due_s = min(self.due_s, now_s + ENDED_PROBE_S)

    def close(self, now_s: float) -> None:
        """The probe got through."""
        if self.probe is None:
            return
        self.probe, self.due_s = None, inf
        self.state = BreakerState.CLOSED
        self._failures.clear()
        self._trial_until_s = now_s + max(self._open_s, FAILURES_WITHIN_S)
        self._trial_ended = self._ended

    def forgettable(self, now_s: float) -> bool:
        """Whether a new breaker would do the same."""
        return (
            self.state is BreakerState.CLOSED
            and now_s >= self._trial_until_s
            and (not self._failures or now_s - self._failures[-1].at_s > FAILURES_WITHIN_S)
        )

    def _on_trial(self, now_s: float) -> bool:
        return now_s < self._trial_until_s and self._ended - self._trial_ended <= FAILURES

    def _too_many(self, now_s: float) -> bool:
        """Whether the last failures are close together, and nearly all that ended meanwhile."""
        first = self._failures[0]
        return (
            len(self._failures) == FAILURES
            and now_s - first.at_s <= FAILURES_WITHIN_S
            and self._ended - first.ended <= FAILURES
        )

    def _open(self, cause: ReplicaFault, now_s: float) -> None:
        again = self.state is BreakerState.HALF_OPEN or now_s < self._trial_until_s
        if self.state is BreakerState.CLOSED:
            self.since_s = now_s
        self._open_s = min(2 * self._open_s, MAX_OPEN_S) if again else MIN_OPEN_S
        self.state, self.cause, self.probe = BreakerState.OPEN, cause, None
        self.due_s = now_s + self._open_s
        self._failures.clear()
        self._trial_until_s = -inf
