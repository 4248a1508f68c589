"""Cells: several controllers share the replicas of a fleet, and a router asks at most two of them.

A cell decides on its own replicas only and does not know of the others. The router asks the one of
two cells whose last answer had more slack (two choices, Mitzenmacher, IEEE TPDS 2001; stale
information: "How Useful Is Old Information?", IEEE TPDS 2000)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from hashlib import blake2b
from math import inf
from typing import Final

from sluice.scheduling.fleet.ranks import replica_of
from sluice.scheduling.request.job import (
    DECLINED,
    NO_REPLICA,
    STAYS,
    UNATTAINABLE,
    RouteDecision,
    RouteQuery,
    Tier,
)

MAX_CELLS: Final = 16
"""Most cells of a fleet."""

ANSWER_KEPT_S: Final = 2.0
"""How long a cell's last answer counts, seconds: a router syncs with all cells every second. Later
the cell ranks first: one question shows whether that is right."""

SPREAD_S: Final = 0.05
"""Difference in slack, seconds, from which the cell with more gets every request. Below it, it gets
a share in proportion: answers are late, and all requests until the next ones would go there."""

MAX_PREFIXES: Final = 16_384
"""Most prompts whose cell a router remembers."""

Questions = Generator[tuple[int, RouteQuery], RouteDecision | None, RouteDecision | None]
"""See :meth:`CellChoice.questions`."""

_WORD: Final = (1 << 64) - 1


def cell_of(replica_id: str, cells: int) -> int:
    """The cell that owns a replica: by a hash of its id, so every process agrees, also after a
    restart. The ranks of a replica have one cell."""
    if cells == 1:
        return 0
    digest = blake2b(replica_of(replica_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % cells


class CellChoice:
    """Which cells one router asks about a request, and in which order.

    Two cells are drawn by a hash of the session, else of the longest chunk of the prompt's prefix,
    else of the key, so every router draws the same two. A known session or prefix goes to its
    *home* cell while that has slack; a moving request to its replica's cell first; any other to the
    cell with more slack, or to either within ``SPREAD_S``. The second one asked is that with the
    most slack of all others. After a request that the first could not promise, the one with more
    slack is asked last, as it will probably serve the request as best effort. A cell without
    replicas, or that did not answer, is asked only if there is no other.

    ``O(cells + chunks of the prompt)``, memory bounded by ``MAX_PREFIXES``. Raises ``ValueError``
    if ``cells`` is not in [2, ``MAX_CELLS``]."""

    def __init__(self, cells: int) -> None:
        if not 2 <= cells <= MAX_CELLS:
            raise ValueError(f"cells must be from 2 to {MAX_CELLS}, got {cells}")
        self._cells = cells
        # Of each cell: its last slack, when that was reported, and whether it could not guarantee
        # the last request.
        self._slack_s = [inf] * cells
        self._at_s = [-inf] * cells
        self._full = [False] * cells
        # The cell that got a prompt, by the hash of its last chunk; the latest last.
        self._prefixes: dict[int, int] = {}

    def asked(self, query: RouteQuery, now_s: float, up: Sequence[bool]) -> list[int]:
        """The cells to ask about ``query``, one after the other: at most two, different ones, of
        those that are ``up``; empty if none is."""
        slack_s = [self._slack(cell, now_s) for cell in range(self._cells)]
        able = [is_up and slack > -inf for is_up, slack in zip(up, slack_s, strict=True)]
        if not any(able):
            able = list(up)
        if not any(able):
            return []
        first, second, part = self._drawn(query, able)
        if first == second:
            return [first]
        bound = self._bound(query, first, able, slack_s)
        if bound is not None:
            first = bound
        elif slack_s[second] - slack_s[first] > part * SPREAD_S:
            first, second = second, first
        others = [cell for cell in range(self._cells) if able[cell] and cell != first]
        last = max(others, key=lambda cell: (slack_s[cell], cell == second))
        is_full = _wants_guarantee(query) and self._full[first] and slack_s[first] < inf
        if is_full and bound is None and slack_s[first] > slack_s[last]:
            return [last, first]
        return [first, last]

    def questions(self, query: RouteQuery, now_s: float, up: Sequence[bool]) -> Questions:
        """Yields a cell with the query for it, is sent its decision or ``None`` if it did not
        answer, and returns the decision that counts. The caller reports answers with ``answered``.
        """
        *others, last = self.asked(query, now_s, up) or [0]
        declined: RouteDecision | None = None
        for cell in others:  # at most one
            declined = yield cell, query._replace(elsewhere=True)
            if declined is not None and declined.reason not in (DECLINED, STAYS):
                return declined
        decision = yield last, query
        if declined is not None and (decision is None or decision.reason == NO_REPLICA):
            # The first one has declined only because of the last one, which can do nothing.
            decision = yield others[0], query
        return decision

    def heard(self, cell: int, slack_s: float, now_s: float) -> None:
        """A cell reported its slack, see
        :meth:`sluice.scheduling.fleet.fleet.Fleet.slack_s`; ``-inf``: it has no replica."""
        self._slack_s[cell], self._at_s[cell] = slack_s, now_s

    def answered(
        self,
        cell: int,
        query: RouteQuery,
        decision: RouteDecision | None,
        now_s: float,
    ) -> None:
        """A cell answered a question, or did not (``None``)."""
        if decision is None:
            self.heard(cell, -inf, now_s)
            return
        if _wants_guarantee(query):
            refused = decision.reason in (DECLINED, UNATTAINABLE)
            self._full[cell] = refused or decision.tier is Tier.BEST_EFFORT
        if query.prefix and decision.replica_id is not None:
            self._prefixes.pop(query.prefix[-1], None)
            self._prefixes[query.prefix[-1]] = cell
            if len(self._prefixes) > MAX_PREFIXES:
                del self._prefixes[next(iter(self._prefixes))]

    def _drawn(self, query: RouteQuery, up: Sequence[bool]) -> tuple[int, int, float]:
        """Two cells that are up, the same one twice if only one is; and a number from 0 to 1."""
        seed = query.session or (query.prefix[-1] if query.prefix else query.key)
        drawn = _mixed(seed)
        first = _next_up(drawn % self._cells, up)
        step = 1 + (drawn >> 32) % (self._cells - 1)
        second = _next_up((first + step) % self._cells, up)
        if second == first:
            second = _next_up((first + 1) % self._cells, up)
        return first, second, (drawn >> 48) / (1 << 16)

    def _bound(
        self, query: RouteQuery, first: int, able: Sequence[bool], slack_s: Sequence[float]
    ) -> int | None:
        """The cell that a request is asked about first whatever the others have: that of the
        replica from which it moves, or its home with slack."""
        if query.moves_from:
            owner = cell_of(query.moves_from, self._cells)
            return owner if able[owner] else None
        known = self._prefixes
        home: int | None = first
        if not query.session:
            chunks = reversed(query.prefix) if known else ()
            home = next((known[chunk] for chunk in chunks if chunk in known), None)
        return home if home is not None and able[home] and slack_s[home] > 0.0 else None

    def _slack(self, cell: int, now_s: float) -> float:
        return self._slack_s[cell] if now_s - self._at_s[cell] <= ANSWER_KEPT_S else inf


def _wants_guarantee(query: RouteQuery) -> bool:
    return Tier.GUARANTEED in query.tiers and query.slo.stated


def _next_up(cell: int, up: Sequence[bool]) -> int:
    """The first cell from ``cell`` on, in a circle, that is up; one is."""
    cells = len(up)
    return next(at % cells for at in range(cell, cell + cells) if up[at % cells])


def _mixed(value: int) -> int:
    """Each bit of the result depends on every bit of the value: the finisher of SplitMix64 (Steele,
    Lea and Flood, OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
