"""How the time per output token (TPOT) of a stream is measured: by one of three anchors.

The papers mean different things by it, so a service class says which. The edge, the simulator and
the replay client all judge by :class:`TPOTMeter`, or by the same rule in whole arrays
(:mod:`sluice.simulation.metrics`). ``t_i`` is when token ``i`` (1-based) left, seconds.

Tokens that leave at one time, as with speculation or where several come in one chunk, are a
*group*. Each keeps its own place ``i``. So the running maximum is set by the first token of a
group, which has the fewest tokens before it: until then the client was that far behind. A window
goes from the end of one group to the end of another: one that ended within a group would count the
group's time, but not all of its tokens.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

WINDOW_TOKENS: Final = 10
"""SLOs-Serve §6: "we measure the TPOT every 10 tokens"."""


LEAST_PACE_TOKENS: Final = 8
"""Minimum tokens to judge the pace of a running stream: with fewer, one slow step can make it look
late."""


class TPOTAnchor(enum.StrEnum):
    """From where to where TPOT is measured.

    ``MEAN``: from the first token to the last, ``(t_n - t_1) / (n - 1)``; ProServe.

    ``RUNNING_MAX``: the largest ``(t_i - t_1) / (i - 1)``. It is within the objective if and only
    if every token left by ``t_1 + (i - 1) TPOT``. FairBatching §5.1: "the max TPOT value among all
    output tokens of the request".

    ``WINDOW``: the largest mean over 10 tokens, ``(t_(i+10) - t_i) / 10``; SLOs-Serve §6. Our
    reading: windows begin at every token. A stream of fewer than 11 tokens is one window. With
    groups a window begins with the nearest one that ends at least 10 tokens before, and its mean
    is over all tokens between; where there is none, the stream is one window.
    """

    MEAN = "mean"
    RUNNING_MAX = "running_max"
    WINDOW = "window"


class TPOTMeter:
    """The TPOT of one stream by one anchor, as its tokens leave.

    ``O(1)`` amortised per group. Of a window's groups it keeps the ends: at most 11.

    Attributes:
        tokens: how many have left.
        first_s, last_s: when the first and the last left; ``None`` before.
    """

    __slots__ = ("_anchor", "_ends", "_worst_s", "first_s", "last_s", "tokens")

    def __init__(self, anchor: TPOTAnchor) -> None:
        self._anchor = anchor
        self.tokens = 0
        self.first_s: float | None = None
        self.last_s: float | None = None
        self._worst_s: float | None = None
        # Tokens until the end of a group, and its time; the last group may still grow.
        self._ends: deque[tuple[int, float]] = deque()

    def emit(self, tokens: int, now_s: float) -> None:
        """``tokens`` (>= 0) left at ``now_s``. A time before the last one counts as that: two
        clocks may have seen them."""
        if tokens <= 0:
            return
        if self.first_s is None or self.last_s is None:
            self.first_s = self.last_s = now_s
        now_s = max(now_s, self.last_s)
        if self._anchor is TPOTAnchor.RUNNING_MAX and self.tokens:
            self._note((now_s - self.first_s) / self.tokens)
        self.tokens += tokens
        if self._anchor is TPOTAnchor.WINDOW:
            self._group(now_s)
        self.last_s = now_s

    @property
    def mean_s(self) -> float | None:
        """Mean time per token after the first; ``None`` with fewer than two tokens."""
        if self.tokens < 2 or self.first_s is None or self.last_s is None:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def tpot_s(self) -> float | None:
        """TPOT by the anchor so far; ``None`` with fewer than two tokens."""
        if self.tokens < 2 or self._anchor is TPOTAnchor.MEAN:
            return self.mean_s
        found = [worst for worst in (self._worst_s, self._window_s()) if worst is not None]
        if found:
            return max(found)
        # No window yet, or all tokens were in the first group.
        return self.mean_s

    def _note(self, pace_s: float) -> None:
        if self._worst_s is None or pace_s > self._worst_s:
            self._worst_s = pace_s

    def _group(self, now_s: float) -> None:
        """The stream has ``tokens`` tokens at ``now_s``."""
        ends = self._ends
        if ends and ends[-1][1] == now_s:
            ends.pop()
        else:
            window_s = self._window_s()
            if window_s is not None:
                self._note(window_s)
        ends.append((self.tokens, now_s))
        while len(ends) > 1 and ends[1][0] <= self.tokens - WINDOW_TOKENS:
            ends.popleft()

    def _window_s(self) -> float | None:
        """Mean of the window that ends with the last group, if there are 10 tokens before it."""
        if not self._ends:
            return None
        (begin, begin_s), (end, end_s) = self._ends[0], self._ends[-1]
        return (end_s - begin_s) / (end - begin) if end - begin >= WINDOW_TOKENS else None


def tpot_s(times_s: NDArray[np.float64], anchor: TPOTAnchor) -> float | None:
    """TPOT of a stream whose tokens left at ``times_s``, ascending; ``None`` for fewer than two.
    ``O(tokens)``; ``O(1)`` for the mean."""
    meter = TPOTMeter(anchor)
    if anchor is TPOTAnchor.MEAN and len(times_s):
        meter.emit(1, float(times_s[0]))
        meter.emit(len(times_s) - 1, float(times_s[-1]))
        return meter.tpot_s
    for time_s in times_s.tolist():
        meter.emit(1, time_s)
    return meter.tpot_s
