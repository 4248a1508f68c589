"""Idle KV blocks in order of worth: the time that a block saves in its session's next turn, times
how soon that turn is likely to come.

By time of use, loops whose prompts need more than the memory, served in turns, would each find
their blocks evicted by the others. So the blocks of the session that is expected latest go first,
from the end of its prompt, and the prefixes of others stay whole."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final

from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.recent import used

RELEASE_S: Final = 60.0
"""A session without a turn for so long keeps nothing."""

MAX_SESSIONS: Final = 4096

_EDGES: Final = (*(0.01 * 2 ** (n / 2) for n in range(25)), RELEASE_S)
_WIDTHS: Final = tuple(b - a for a, b in zip((0.0, *_EDGES), _EDGES, strict=False))
_BUCKETS: Final = len(_EDGES) + 1  # the last one: later than RELEASE_S, or never

_MIN_SEEN: Final = 8  # gaps from which a tool's, or a tenant's, distribution is used
_MAX_SEEN: Final = 512.0  # beyond, older ones count half
_MAX_KEYS: Final = 1024

_PERSON_RATE: Final = 0.1 / RELEASE_S
"""Of a turn that called no tool, until the gaps of such turns are known."""


class _Gaps:
    """A histogram of the seconds between two turns."""

    __slots__ = ("_counts", "_rates", "seen")

    def __init__(self, before: float = 0.0) -> None:
        self._counts = [before] * (_BUCKETS - 1) + [max(before, 0.25)]
        self._rates: list[float] = []
        self.seen = sum(self._counts)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_right(_EDGES, seconds)] += 1.0
        self.seen += 1.0
        if self.seen > _MAX_SEEN:
            self._counts = [count / 2 for count in self._counts]
            self.seen /= 2
        self._rates = []

    def rate(self, age_s: float) -> float:
        """See :meth:`ToolGaps.rate`."""
        if not self._rates:
            self._rates = [self._best_rate(bucket) for bucket in range(_BUCKETS - 1)] + [0.0]
        return self._rates[bisect_right(_EDGES, age_s)]

    def _best_rate(self, first: int) -> float:
        """The Gittins index of waiting since ``first``: the most turns a second of waiting that any
        time to give up gets."""
        left = sum(self._counts[first:])
        came = waited_s = best = 0.0
        for bucket in range(first, _BUCKETS - 1):
            count = self._counts[bucket]
            waited_s += _WIDTHS[bucket] * (left - count / 2)
            left -= count
            came += count
            best = max(best, came / waited_s)
        return best


class ToolGaps:
    """Times from a turn's end to its session's next turn, learned by tenant and tool; where these
    are too few by tenant, else of all. ``tool``: what the turn called, 0: nothing, so that the next
    one is a person's, if there is one; ``None``: not known."""

    def __init__(self) -> None:
        self._by_tool: OrderedDict[tuple[int, int], _Gaps] = OrderedDict()
        self._by_tenant: OrderedDict[int, _Gaps] = OrderedDict()
        self._all = _Gaps(0.25)

    def observe(self, tenant: int, tool: int, seconds: float) -> None:
        """The next turn came ``seconds`` after one that had called ``tool``. ``O(1)``."""
        used(self._by_tool, (tenant, tool), _Gaps, _MAX_KEYS).observe(seconds)
        if tool:
            used(self._by_tenant, tenant, _Gaps, _MAX_KEYS).observe(seconds)
            self._all.observe(seconds)

    def rate(self, tenant: int, tool: int | None, age_s: float) -> float:
        """How soon the next turn is likely, ``age_s`` after the end of the last one: per second of
        waiting, over the time that is best to wait for it."""
        if tool is not None:
            own = self._by_tool.get((tenant, tool))
            if own is not None and own.seen >= _MIN_SEEN:
                return own.rate(age_s)
            if not tool:
                return _PERSON_RATE
        own = self._by_tenant.get(tenant)
        return (own if own is not None and own.seen >= _MIN_SEEN else self._all).rate(age_s)


class _Session:
    """``blocks``: idle ones in the order in which they go, each with the time of its release.
    ``runs``: turns that have begun and not ended; ``depth``: blocks of its last prompt that it
    has."""

    __slots__ = ("blocks", "depth", "ended_s", "runs", "tenant", "tool")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, float] = OrderedDict()
        self.tenant = self.runs = self.depth = 0
        self.tool: int | None = None
        self.ended_s = -inf


_SHARED: Final = 0  # stands for the session of blocks that several use
_HIT: Final = -1  # of a block that was found without one

_ORDER_S: Final = 0.1  # for how long an order of sessions is good
_CHUNK: Final = 32  # blocks of a prefill by which one is priced


class KeptBlocks:
    """Idle blocks of an engine's prefix cache that belong to sessions, which the caller evicts
    after all others. They count as free: who needs memory gets them. ``O(1)`` for each block, and
    ``O(sessions)`` ten times a second while some are taken. Sessions and blocks are numbers above
    0.

    A block that several sessions use belongs to none of them. It goes by the time since its last
    use, as do blocks without a session that are found again, such as a system prompt of chats."""

    def __init__(self) -> None:
        self.gaps = ToolGaps()
        self.used = False
        """Whether there was any session: before, none of its methods need be called."""
        self._owners: dict[int, int] = {}
        # The one that ended longest ago first.
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._shared = _Session()
        self._count = 0
        self._now_s = -inf
        self._saved_s = 1.0, 0.0
        # The session that goes next is the last.
        self._order: list[_Session] = []
        self._ordered_s = -inf

    def __len__(self) -> int:
        """Blocks that it keeps."""
        return self._count

    def __contains__(self, block: int) -> bool:
        """Whether it keeps a block."""
        owner = self._owners.get(block, _HIT)
        return block in self._sessions.get(owner, self._shared).blocks

    def __iter__(self) -> Iterator[int]:
        return (block for known in self._every() for block in known.blocks)

    def begin(self, session: int, tool: int, now_s: float) -> None:
        """A turn of ``session`` begins to run, with the results of ``tool``, 0: with none. The time
        since the last turn includes its wait: what counts is when blocks are used."""
        known = self._sessions.get(session)
        if known is None:
            return
        if not known.runs:
            called = tool if known.tool is None else known.tool
            self.gaps.observe(known.tenant, called, now_s - known.ended_s)
        known.runs += 1

    def price(self, latency: LatencyModel, block_tokens: int) -> None:
        """What computing a block takes in a prefill: later ones see more of the prompt."""
        first_s, later_s = (latency.work_s(_CHUNK * block_tokens, n) for n in (0, 65_536))
        self._saved_s = first_s, (later_s - first_s) * block_tokens / 65_536

    def end(self, session: int, tenant: int, blocks: Sequence[int], now_s: float) -> None:
        """A turn of ``session`` ends, and its ``blocks``, from the prompt's beginning, will be
        released."""
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session()
            self.used = True
        self._sessions.move_to_end(session)
        known.runs = max(0, known.runs - 1)
        known.tenant, known.tool, known.ended_s = tenant, None, now_s
        if blocks:  # a turn may end before it runs
            known.depth = len(blocks)
        self._now_s = now_s
        owners = self._owners
        for block in blocks:
            owner = owners.get(block, _HIT)
            if owner != session:
                owners[block] = session if owner == _HIT else _SHARED

    def finish(self, session: int, blocks: Iterable[int]) -> list[int]:
        """The turn of ``session`` that has ended, with these ``blocks``, was its last one: its idle
        blocks, which are forgotten; those of the turn are not kept either."""
        known = self._sessions.get(session)
        if known is None or known.runs:
            return []
        del self._sessions[session]
        idle = list(known.blocks)
        known.blocks.clear()
        self._count -= len(idle)
        self.forget(idle)
        self.forget([block for block in blocks if self._owners.get(block) == session])
        return idle

    def called(self, session: int, tool: int) -> None:
        """The last turn of ``session`` called ``tool``, 0: nothing."""
        known = self._sessions.get(session)
        if known is not None:
            known.tool = tool

    def keep(self, block: int) -> bool:
        """A cached block has lost its last user; whether it is kept for a session."""
        owner = self._owners.get(block)
        if owner is None:
            return False
        known = self._sessions.get(owner)
        if known is None:  # several use it, or its session was released
            self._owners[block], known = _SHARED, self._shared
        known.blocks[block] = self._now_s
        self._count += 1
        return True

    def find(self, block: int) -> bool:
        """An idle block is used again; whether it was kept here."""
        owner = self._owners.setdefault(block, _HIT)
        if owner == _HIT:
            return False
        del self._sessions.get(owner, self._shared).blocks[block]
        self._count -= 1
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Blocks that are not kept are in no cache any more."""
        for block in blocks:
            self._owners.pop(block, None)

    def take(self, blocks: int, now_s: float) -> list[int]:
        """The first ``blocks`` to go, at most all, which are forgotten."""
        taken: list[int] = []
        most = min(blocks, self._count)
        self._now_s = now_s
        while len(taken) < most:
            session = self._next(now_s)
            kept = session.blocks
            # The worth of one that is shared is its own.
            until_s = next(iter(kept.values())) + 1.0 if session is self._shared else inf
            while kept and len(taken) < most and next(iter(kept.values())) <= until_s:
                block, _ = kept.popitem(last=False)
                del self._owners[block]
                self._count -= 1
                session.depth -= 1
                taken.append(block)
            if session is self._shared:
                self._ordered_s = -inf
        return taken

    def release(self, now_s: float) -> list[int]:
        """The blocks of sessions without a turn for a minute, which are forgotten, as are those of
        the oldest beyond the limit."""
        released: list[int] = []
        while self._sessions:
            session, known = next(iter(self._sessions.items()))
            late = now_s - known.ended_s > RELEASE_S
            if not late and len(self._sessions) <= MAX_SESSIONS:
                break
            if late and known.runs:
                known.ended_s = now_s
                self._sessions.move_to_end(session)
                continue
            if late and known.tool is not None:
                self.gaps.observe(known.tenant, known.tool, inf)
            released += known.blocks
            known.blocks.clear()
            del self._sessions[session]
        old = self._shared.blocks
        while old and now_s - next(iter(old.values())) > RELEASE_S:
            released.append(old.popitem(last=False)[0])
        self._count -= len(released)
        self.forget(released)
        return released

    def clear(self) -> list[int]:
        """All blocks; nothing is known afterwards but the gaps."""
        blocks = list(self)
        self._sessions.clear()
        self._shared.blocks.clear()
        self._owners.clear()
        self._order.clear()
        self._count = 0
        return blocks

    def by_worth(self, now_s: float) -> list[int]:
        """All blocks, of the least worth first."""
        order = sorted(self._every(), key=lambda known: self._worth(known, now_s))
        return [block for known in order for block in known.blocks]

    def _every(self) -> list[_Session]:
        return [*self._sessions.values(), self._shared]

    def _worth(self, known: _Session, now_s: float) -> float:
        first_s, further_s = self._saved_s
        if known is self._shared:
            since_s = next(iter(known.blocks.values()), -inf)
            return first_s / (1.0 + now_s - since_s)
        rate = self.gaps.rate(known.tenant, known.tool, now_s - known.ended_s)
        return (first_s + further_s * max(0, known.depth)) * rate

    def _next(self, now_s: float) -> _Session:
        """The session whose blocks go next; it has some."""
        while True:
            if not self._order or now_s > self._ordered_s + _ORDER_S:
                kept = [known for known in self._every() if known.blocks]
                self._order = sorted(kept, key=lambda known: -self._worth(known, now_s))
                self._ordered_s = now_s
            if self._order[-1].blocks:
                return self._order[-1]
            self._order.pop()
