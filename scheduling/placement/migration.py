"""Which running streams move to another replica, and when.

A stream moves with its KV between two tokens: its client sees a pause of one transfer and a few
steps. Llumnix (Sun et al., OSDI 2024) copies most KV while the request runs; here the whole copy
falls into the pause. A stream moves because its replica **leaves**, so that a drain does not take
as long as its longest stream, or because it is promised and predicted to be **late** where it is.

A promised stream only moves where the rest of its objective is promised. It never returns to a
replica that it has left, moves at most ``MAX_MOVES`` times, and not within ``REST_S`` of its last
move."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

AT_ONCE: Final = 8
"""Most streams that one router moves from one replica at once: their transfers share the replica's
network."""

REST_S: Final = 5.0
"""Shortest time between two moves of a stream, seconds."""

MAX_MOVES: Final = 3
"""Most moves of one stream."""

WORTH: Final = 2.0
"""A move pays if what is left of the stream takes at least this many times the transfer."""

PAUSE_SHARE: Final = 0.1
"""Share of the time that is left to a stream which its pause may take, if it has no slack."""

MAX_PAUSE_S: Final = 1.0
"""The next token of a stream that moves is due within this time, whatever its objective grants,
seconds: the other replica must not treat it as one that can wait."""


class Terms(NamedTuple):
    """What keeps the objective of a stream that moves: the longest time until its next token, and
    per token after that, seconds."""

    pause_s: float
    tpot_s: float


class RunningStream(NamedTuple):
    """A stream in progress, as its router sees it.

    Attributes:
        left_tokens: most tokens that may still come; infinite if unknown.
        token_s: its recent time per token, seconds.
        tpot_s, e2e_left_s: by its objective, seconds; infinite if none is promised.
        slack_s: time from now until its next token is due by that TPOT since its first token,
            seconds; negative if it is behind.
        recovers: its TPOT is the mean of all tokens, so that later ones make up for earlier ones.
        moves, moved_s: how often it has moved, and when it last did (``-inf``: never)."""

    left_tokens: float
    token_s: float
    tpot_s: float = inf
    slack_s: float = inf
    e2e_left_s: float = inf
    recovers: bool = True
    moves: int = 0
    moved_s: float = -inf

    @property
    def left_s(self) -> float:
        """Time until its end where it is, at its recent rate, seconds."""
        return self.left_tokens * self.token_s if self.token_s > 0.0 else inf

    @property
    def granted_s(self) -> float:
        """Time until its end by its objective, seconds; infinite for none."""
        by_pace_s = self.left_tokens * self.tpot_s + self.slack_s if self.tpot_s < inf else inf
        return min(by_pace_s, self.e2e_left_s)

    @property
    def terms(self) -> Terms | None:
        """On which terms its objective is kept after a move, with its slack or a share of the time
        left in the pause; ``None``: on none, or none is promised."""
        granted_s = self.granted_s
        if granted_s <= 0.0 or (not self.recovers and self.slack_s <= 0.0):
            return None
        if not self.recovers or granted_s == inf or self.left_tokens == inf:
            has_pace = self.tpot_s < inf and self.slack_s > 0.0
            return Terms(min(self.slack_s, MAX_PAUSE_S), self.tpot_s) if has_pace else None
        slack_s = min(self.slack_s, granted_s / 2.0) if self.tpot_s < inf else 0.0
        pause_s = min(max(slack_s, PAUSE_SHARE * granted_s), MAX_PAUSE_S)
        return Terms(pause_s, min(self.tpot_s, (granted_s - pause_s) / self.left_tokens))

    @property
    def late(self) -> bool:
        """Whether it will miss its objective at its recent rate where it is, and might keep it
        elsewhere."""
        if self.terms is None:
            return False
        if self.left_tokens == inf:
            return self.token_s > self.tpot_s
        return self.left_s > self.granted_s and self.token_s > 0.0

    def pays(self, transfer_s: float) -> bool:
        """Whether a move is worth its transfer of predicted ``transfer_s``: the stream would not
        end about as soon where it is."""
        return self.left_s >= WORTH * transfer_s


def streams_to_move(
    streams: Sequence[RunningStream], under_way: int, now_s: float, leaves: bool
) -> list[int]:
    """Positions in ``streams``, those of one replica, of the ones that move now, in order, beside
    those ``under_way``. ``O(n log n)``. From a replica that leaves, those with most left first, as
    they would end the drain; else only late ones, least slack first."""
    able = [
        place
        for place, stream in enumerate(streams)
        if stream.moves < MAX_MOVES and now_s - stream.moved_s >= REST_S and (leaves or stream.late)
    ]
    able.sort(key=lambda place: -streams[place].left_s if leaves else streams[place].slack_s)
    return able[: max(0, AT_ONCE - under_way)]
