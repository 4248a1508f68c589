"""A fixed share of the engine for prefills that have waited long."""

from __future__ import annotations

from sluice.scheduling.tenancy.earned_time import EarnedTime


class AgedShare:
    """Gives prefills older than ``patience_s`` the share ``share`` of the time, a chunk at a time,
    by arrival.

    Without it, S-EDF would starve prefills that have no deadline, or can no longer meet theirs. Let
    ``W`` be the work, seconds, of a prefill and of the aged prefills before it. It is computed at
    most ``patience_s + W / share`` after its arrival, plus one task for each of its chunks, plus
    the time for which there is no memory.
    """

    def __init__(self, patience_s: float, share: float) -> None:
        self._patience_s = patience_s
        self._earned = EarnedTime(share)

    def has_turn(self, arrival_s: float, chunk_s: float, now_s: float) -> bool:
        """Whether the prefill that arrived first, at ``arrival_s``, runs next: its chunk of
        ``chunk_s`` predicted seconds is covered by the earned time. Call it between tasks."""
        owed = now_s - arrival_s > self._patience_s
        self._earned.earn(now_s, owed)
        if not owed or self._earned.seconds < chunk_s:
            return False
        # Time saved up must not be spent on many chunks in a row.
        self._earned.seconds = 0.0
        return True
