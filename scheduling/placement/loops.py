"""Tool loops: the turns of a session that share a deadline, each turn's part of it, and whether the
loop is promised.

The part of a turn is what is left of the deadline, without the time that tools are expected to
take, shared with the turns that are expected to follow. A loop is promised if a share ``level`` of
the latest loops like it would have been in time with the turns of now: each counts with the time
of its tools, and with that of its turns by how much longer a turn takes now than when it began. So
long loops, slow tools and load that grew meanwhile count. Autellix (arXiv 2502.13965) and Continuum
(2511.02230) learn the same figures for the order of turns, and promise nothing."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import islice
from math import exp, inf, log, sqrt
from statistics import NormalDist
from typing import Annotated, Final, NamedTuple

import numpy as np
from msgspec import Meta

from sluice.scheduling.placement.output_lengths import MAX_CLASSES, MAX_TENANTS, length_of
from sluice.scheduling.recent import used
from sluice.scheduling.request.job import MAX_NUMBER, Age, Key, Text
from sluice.scheduling.request.kernels import Floats

MAX_LOOPS: Final = 1 << 16
"""Most loops that are remembered. Of the tenant with the most of them, the one without a turn for
longest is forgotten first."""

KEPT_S: Final = 86_400.0
"""A loop that its client names is forgotten without a turn for this long, seconds: as long as the
longest deadline."""

IDLE_S: Final = 60.0
"""A loop is over without a turn for this long, seconds, where its class does not say."""

MEMORY: Final = 256
"""Latest loops of a class, or of a tenant in it, that count."""

MIN_PROMISED: Final = 5
"""Loops that must have ended before one is promised."""

MIN_ENDED: Final = 20
"""Loops that must have ended before one counts as unattainable, and a tenant by its own."""

MIN_PART: Final = 2.0
"""A turn gets at least this many times the usual time of one, while that is left."""

MEASURED_S: Final = 1.0
"""How old a quantile may be, seconds."""

_SMOOTHING = 1 / 32
"""Weight of the latest turn in the usual time of one."""

_UNITS, _MAX_UNITS = 1_000.0, float(1 << 30)
"""Units of a second where times are whole numbers, and the largest of these."""

_MIN_S = 1e-9

Seconds = Annotated[float, Meta(ge=0.001, le=MAX_NUMBER)]


class LoopTurn(NamedTuple):
    """A turn that has arrived, and what its router knows of the loop.

    ``deadline_s``: from the first turn to the last end. ``waited_s``: since this turn's arrival,
    ``age_s`` since that of the loop's first one, ``turns`` came between; ``promised``: ``None``:
    not decided. ``stated``: the client names the loop."""

    key: Key
    service_class: Text
    tenant: Key
    deadline_s: Seconds
    idle_s: Seconds = IDLE_S
    waited_s: Age = 0.0
    age_s: Age = 0.0
    turns: Key = 0
    promised: bool | None = None
    stated: bool = False


class LoopPart(NamedTuple):
    """A turn's part of its loop. ``age_s``: of the loop; ``turns``: with this one; ``part_s``: of
    the deadline, from the turn's arrival, not positive after it; ``promised``: whether the loop
    is, ``None``: too little is known of such loops; ``needs_s``: what they need, if known."""

    age_s: float
    turns: int
    part_s: float
    promised: bool | None = None
    needs_s: float | None = None


class LoopTurnEnd(NamedTuple):
    """A turn ended ``age_s`` after its loop began, ``took_s`` after its arrival. ``answered``:
    ``None`` if its client left or made a mistake. ``promised``: whether this turn was; later ones
    of a promised loop count as that. ``final``: its client says that it was the last turn."""

    key: Key
    age_s: Age
    took_s: Age
    answered: bool | None
    promised: bool
    final: bool = False


class LoopEnding(NamedTuple):
    """How a loop ended. ``kept``: by its deadline, and its last turn was answered."""

    service_class: str
    promised: bool
    kept: bool


class LoopPromises:
    """The loops of a fleet. ``level``: share of the promised loops to be kept; ``None``: nothing is
    learned or promised, and a turn's part is all that is left. Amortised ``O(log n)`` per turn
    among ``n`` loops, and ``O(MEMORY log MEMORY)`` at most once a second and class; a loop beyond
    ``MAX_LOOPS`` ``O(tenants)``."""

    def __init__(self, level: float | None = None) -> None:
        self.ended: Counter[LoopEnding] = Counter()
        """Loops that ended, with an answered turn."""
        self._level = level
        self._loops: dict[int, _Loop] = {}
        # By tenant, the one without a turn for longest first.
        self._of: dict[int, OrderedDict[int, None]] = {}
        # When a loop may be over, and its key.
        self._ends: list[tuple[float, int]] = []
        self._classes: OrderedDict[str, _Seen] = OrderedDict()
        self._tenants: OrderedDict[tuple[str, int], _Seen] = OrderedDict()

    def __len__(self) -> int:
        """Loops that are remembered."""
        return len(self._loops)

    def begin(self, turn: LoopTurn, now_s: float) -> LoopPart:
        """A turn has arrived."""
        self.expire(now_s)
        arrived_s = now_s - turn.waited_s
        loop = before = self._loops.get(turn.key)
        seen = self._seen(turn.service_class, turn.tenant)
        needs_s = None
        if seen is not None and self._level is not None:
            needs_s = seen.needs_s(now_s, self._level)
        if loop is None or loop.refused:
            loop = _Loop(turn, now_s - max(turn.age_s, turn.waited_s))
            if seen is not None:
                loop.usual_s = seen.turn_s
                if loop.promised is None and needs_s is not None:
                    in_time = needs_s <= turn.deadline_s
                    tries = not seen.known or self._tries(turn, seen)
                    loop.promised = None if not in_time and tries else in_time
        else:
            loop.began_s = min(loop.began_s, now_s - turn.age_s)
            if turn.promised is False:
                loop.promised = False
        self._loops[turn.key] = loop
        if before is None:
            self._of.setdefault(loop.tenant, OrderedDict())[turn.key] = None
        else:
            loop.tenant = before.tenant
            self._of[loop.tenant].move_to_end(turn.key)
        if not loop.counted:
            for each in self._both(loop):
                each.live[turn.key] = loop
        loop.deadline_s = max(loop.deadline_s, turn.deadline_s)
        loop.idle_s = turn.idle_s
        loop.last_s = max(loop.last_s, arrived_s)
        loop.turns += 1
        loop.running += 1
        if before is None:
            self._remember(turn.key, loop)
        part_s = loop.began_s + turn.deadline_s - arrived_s
        if seen is not None and loop.promised:
            part_s = seen.part_s(part_s, loop.turns)
        return LoopPart(now_s - loop.began_s, loop.turns, part_s, loop.promised, needs_s)

    def known(self, key: int, part: LoopPart, now_s: float) -> None:
        """What the controller knows of a loop with a turn here."""
        loop = self._loops.get(key)
        if loop is not None:
            loop.began_s = now_s - part.age_s
            loop.turns, loop.promised = part.turns, part.promised

    def end(self, ended: LoopTurnEnd, now_s: float) -> None:
        """A turn ended. Of a forgotten loop nothing is learned."""
        loop = self._loops.get(ended.key)
        if loop is None:
            return
        end_s = min(loop.began_s + ended.age_s, now_s)
        loop.running = max(0, loop.running - 1)
        loop.last_s = max(loop.last_s, end_s)
        if loop.promised and not ended.promised:
            loop.promised = False
        if ended.answered is None:
            return
        if not ended.answered:
            loop.failed_s = max(loop.failed_s, end_s)
            return
        loop.late = loop.late or end_s > loop.due_s
        if loop.promised is not False:
            for seen in self._both(loop):
                seen.answered(ended.took_s, loop.answered == 0)
        loop.answered += 1
        loop.end_s = max(loop.end_s, end_s)
        loop.took_s += ended.took_s
        loop.final = loop.final or ended.final
        if loop.final and not loop.running:
            self._over(ended.key, loop)
            if not loop.stated:
                self._forget(ended.key)

    def expire(self, now_s: float) -> None:
        """Count the loops that are over, and learn from them."""
        ends = self._ends
        while ends and ends[0][0] <= now_s:
            _, key = heapq.heappop(ends)
            loop = self._loops.get(key)
            if loop is None:
                continue
            over_s = loop.over_s()
            if over_s > now_s:  # while a turn runs, it may still be over as early as that
                heapq.heappush(ends, (min(over_s, now_s + loop.idle_s), key))
                continue
            self._over(key, loop)
            if loop.stated and loop.over_s() > now_s:
                heapq.heappush(ends, (loop.over_s(), key))
            else:
                self._forget(key)

    def _over(self, key: int, loop: _Loop) -> None:
        """Count a loop once. A turn that has not ended by now is late."""
        if loop.counted or not loop.answered:
            return
        loop.counted = True
        kept = not (loop.late or loop.failed or loop.running)
        ending = LoopEnding(loop.service_class, bool(loop.promised), kept)
        if ending in self.ended or len(self.ended) < 4 * MAX_CLASSES:
            self.ended[ending] += 1
        for seen in self._both(loop):
            seen.over(loop)
            seen.live.pop(key, None)

    def _remember(self, key: int, loop: _Loop) -> None:
        heapq.heappush(self._ends, (loop.last_s + loop.idle_s, key))
        if len(self._loops) > MAX_LOOPS:
            most = max(self._of.values(), key=len)
            self._forget(next(iter(most)))
        if len(self._ends) > 2 * MAX_LOOPS:  # those of forgotten loops
            loops = self._loops.items()
            self._ends = sorted((each.last_s + each.idle_s, key) for key, each in loops)

    def _forget(self, key: int) -> None:
        loop = self._loops.pop(key)
        own = self._of[loop.tenant]
        del own[key]
        if not own:
            del self._of[loop.tenant]
        for seen in self._both(loop):
            seen.live.pop(key, None)

    def _both(self, loop: _Loop) -> tuple[_Seen, ...]:
        """What is learned of the loop's class, and of its tenant in it."""
        if self._level is None:
            return ()
        of_class = used(self._classes, loop.service_class, _Seen, MAX_CLASSES)
        if not loop.tenant:
            return (of_class,)
        key = loop.service_class, loop.tenant
        return of_class, used(self._tenants, key, _Seen, MAX_TENANTS)

    def _seen(self, service_class: str, tenant: int) -> _Seen | None:
        """What is known of such loops, if that is enough."""
        seen = self._tenants.get((service_class, tenant))
        if seen is None or not seen.known:
            seen = self._classes.get(service_class)
        return seen if seen is not None and seen.count >= MIN_PROMISED else None

    def _tries(self, turn: LoopTurn, seen: _Seen) -> bool:
        """Whether a loop is let in without a promise: nothing is learned of its tenant otherwise,
        whatever others do."""
        if turn.tenant:
            own = self._tenants.get((turn.service_class, turn.tenant))
            return own is None or own.tries()
        return seen.tries()


class _Loop:
    """A loop with a turn not long ago. ``usual_s``: of a turn when it began; 0: unknown."""

    __slots__ = (
        *("answered", "began_s", "counted", "deadline_s", "end_s", "failed_s", "final", "idle_s"),
        *("last_s", "late"),
        *("promised", "running", "service_class", "stated", "tenant", "took_s", "turns", "usual_s"),
    )

    def __init__(self, turn: LoopTurn, began_s: float) -> None:
        self.service_class, self.tenant = turn.service_class, turn.tenant
        self.promised, self.stated = turn.promised, turn.stated
        self.began_s = self.last_s = self.end_s = began_s
        self.deadline_s, self.idle_s = turn.deadline_s, turn.idle_s
        self.failed_s = -inf
        self.turns, self.running, self.answered = turn.turns, 0, 0
        self.late = self.counted = self.final = False
        self.took_s = self.usual_s = 0.0

    @property
    def due_s(self) -> float:
        """Its deadline, the longest that was stated."""
        return self.began_s + self.deadline_s

    @property
    def failed(self) -> bool:
        """Whether the last turn that ended was not answered."""
        return self.failed_s >= self.end_s

    @property
    def refused(self) -> bool:
        """Whether it has not begun: the first turn was refused, or its client left, and may be sent
        again."""
        return not self.answered and not self.running

    def over_s(self) -> float:
        """When it is over without another turn; once counted, when it is forgotten."""
        if self.counted:
            return self.last_s + KEPT_S
        over_s = self.last_s + self.idle_s
        if self.running:
            return max(over_s, self.due_s + self.idle_s)
        return max(over_s, self.due_s) if self.stated else over_s


class _Seen:
    """The latest loops of one kind, and the usual time of a turn, without those of best effort.
    ``live``: those that are not over, the one that began first first."""

    __slots__ = (
        *("_answered", "_first_s", "_firsts", "_measured_s", "_needs_s", "_past"),
        *("count", "live", "turn_s"),
    )

    def __init__(self) -> None:
        self.live: dict[int, _Loop] = {}
        self.turn_s = self._first_s = 0.0
        self._answered = self._firsts = self.count = 0
        # Of each loop: its turns, the time of its tools, and that of its turns in usual ones.
        self._past = np.zeros((MEMORY, 3))
        self._measured_s = -inf
        self._needs_s = inf

    @property
    def known(self) -> bool:
        """Whether enough loops have ended."""
        return self.count >= MIN_ENDED

    def answered(self, took_s: float, is_first: bool) -> None:
        """A turn was answered. ``O(1)``."""
        self._answered += 1
        self.turn_s += max(_SMOOTHING, 1 / self._answered) * (took_s - self.turn_s)
        if is_first:
            self._firsts += 1
            self._first_s += max(_SMOOTHING, 1 / self._firsts) * (took_s - self._first_s)

    def over(self, loop: _Loop) -> None:
        """A loop is over. ``O(1)``."""
        tools_s = max(0.0, loop.end_s - loop.began_s - loop.took_s)
        usual_s = loop.usual_s or self.turn_s
        work = float(loop.turns)
        if loop.promised is not False and usual_s > 0.0:
            work = loop.took_s / usual_s
        self._past[self.count % MEMORY] = loop.turns, tools_s, work
        self.count += 1
        self._measured_s = -inf

    def needs_s(self, now_s: float, level: float) -> float:
        """The time that a share ``level`` of such loops would need now. ``O(1)``, once in
        ``MEASURED_S`` seconds ``O(MEMORY log MEMORY)``."""
        if now_s - self._measured_s >= MEASURED_S:
            self._measured_s = now_s
            _, tools_s, work = self._known.T
            took_s = np.maximum(tools_s + work * self.turn_s, _MIN_S)
            run_s = [now_s - loop.began_s for loop in self._promised()]
            lengths = np.minimum(np.append(took_s, run_s) * _UNITS, _MAX_UNITS).astype(np.int32)
            ended = np.arange(len(lengths)) < len(took_s)
            self._needs_s = length_of(lengths, ended, level).bound / _UNITS
            if len(took_s) * (1.0 - level) < 1.0:
                # Too few for the quantile: the more there are, the less the next exceeds them.
                beyond_s = float(lengths.max()) / _UNITS * (1.0 + MIN_ENDED / len(took_s))
                shaped_s = _log_normal(took_s, level)
                if self.known:
                    self._needs_s = min(self._needs_s, beyond_s, shaped_s)
                else:  # the shape of so few may deceive
                    self._needs_s = max(beyond_s, shaped_s)
        return self._needs_s

    def tries(self) -> bool:
        """Whether no such loop runs, so that nothing would be learned if none is let in."""
        return next(self._promised(), None) is None

    def _promised(self) -> Iterator[_Loop]:
        """Those of the first of ``live`` that are not best effort."""
        live = islice(self.live.values(), MEMORY)
        return (loop for loop in live if loop.promised is not False)

    def part_s(self, left_s: float, turns: int) -> float:
        """The part of ``left_s`` seconds for a loop's turn number ``turns``. ``O(MEMORY)``."""
        own_s = self._first_s if turns == 1 else self.turn_s
        counts, tools_s = self._known[:, 0], self._known[:, 1]
        longer = counts[counts >= turns]
        # A loop with more turns than all others is expected to double.
        later = float(longer.mean()) - turns if len(longer) else float(turns)
        tool_s = float(tools_s.sum() / max(1.0, counts.sum() - len(counts)))
        shared_s = left_s - later * tool_s
        part_s = shared_s * own_s / max(own_s + later * self.turn_s, _MIN_S)
        return min(left_s, max(part_s, MIN_PART * own_s))

    @property
    def _known(self) -> Floats:
        return self._past[: min(self.count, MEMORY)]


def _log_normal(lengths: Floats, level: float) -> float:
    """The quantile of a log-normal distribution, of which these are few lengths: that of the next
    one, by Student's ``t``."""
    logs, count = np.log(lengths), len(lengths)
    z, freedom = NormalDist().inv_cdf(level), 4.0 * (count - 1)
    t = z * (1.0 + (z**2 + 1.0) / freedom + (5 * z**4 + 16 * z**2 + 3) / (6 * freedom**2))
    exponent = float(logs.mean()) + t * float(logs.std(ddof=1)) * sqrt(1.0 + 1.0 / count)
    return exp(min(exponent, log(MAX_NUMBER)))
