"""A share of the engine for prefills that have waited long, however urgent the others are."""

from __future__ import annotations

from scheduling.earned_time import EarnedTime


class AgedShare:
    """Gives prefills older than ``patience_s`` the share ``share`` of the time, a chunk at a time,
    by arrival.

    Without it, S-EDF would let prefills wait indefinitely that have no deadline, or can no longer
    meet theirs. With ``W`` seconds of work of aged prefills before it and of its own, one is
    computed at most ``patience_s + W / share`` after its arrival, plus one task for each of its
    chunks, plus the time for which there is no memory.
    """

    def __init__(self, patience_s: float, share: float) -> None:
        self._patience_s = patience_s
        self._earned = EarnedTime(share)

    def has_turn(self, arrival_s: float, chunk_s: float, now_s: float) -> bool:
        """Whether the prefill that arrived first, at ``arrival_s``, runs next: its chunk of
        ``chunk_s`` predicted seconds is paid for. To be asked between tasks."""
        owed = now_s - arrival_s > self._patience_s
        self._earned.earn(now_s, owed)
        if not owed or self._earned.seconds < chunk_s:
            return False
        # What was saved up while nothing asked must not come as many chunks in a row.
        self._earned.seconds = 0.0
        return True
