"""Attempts whose replica stands still without a word: no error comes, and no token.

A replica may be silent for good reasons: a best-effort request may wait for minutes. So silence is
only a reason to ask. A replica that answers that it goes on is waited for, for as long as it takes.
One that says that its engine hangs, or does not answer twice in a row, stands still: its attempts
are given up, each where another one may be made and somebody else is alive. Where everything stands
still, or a stream cannot be resumed, to wait is better: the replica may come back, and where Serve
stops it the attempt ends with an error.

It costs an attempt a dictionary entry, and a piece a time stamp: one task looks at all attempts a
few times a second, and a replica is asked once for all of its silent ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from controller.messages import Trouble
from replica.engine import Progress
from router.answer import Attempt, ReplicaFailedError
from router.errors import Reason
from router.metrics.instruments import RouterMetrics
from scheduling.roles import Role

SWEEP_S = 0.25
"""Time between two looks at all attempts, seconds."""

ASK_EVERY_S = 1.0
"""Least time between two questions to a replica, seconds."""

ANSWER_S = 0.5
"""Longest wait for an answer, seconds."""

MISSES = 2
"""Questions without an answer in a row after which a replica stands still."""

MAX_NAMES = 256
"""Most requests that are named in one question; the others are in later ones."""

REMEMBERED_S = 60.0
"""For how long a replica that stood still is known for that when nothing was heard of it since."""

SEARCHES = 3
"""Questions to find somebody in a pool who is alive; the first goes to the least loaded one that is
not known to stand still, the others where Serve sends them."""

_NOBODY = Progress("", hung=False)

_STANDS_STILL = "The replica stands still."
_LOST = "The replica does not have the request any more."


class Askable(Protocol):
    """What is needed of the replicas."""

    @property
    def roles(self) -> Sequence[Role]:
        """The pools that there are."""

    async def progress(
        self, request_ids: Sequence[str], target: str | None, avoid: Sequence[str], role: Role
    ) -> Progress:
        """Ask ``target`` whether it goes on; where that is ``None`` or not in the pool any more,
        anybody there, if possible none of ``avoid``.

        Raises:
            ReplicaFailedError: it could not be asked, or failed over the question.
        """


class Informed(Protocol):
    """What is needed of the controller's client."""

    def troubled(self, replica_id: str, trouble: Trouble) -> None:
        """A replica is in trouble. Returns at once."""


class _Suspect:
    """A replica with silent attempts."""

    __slots__ = ("asking", "misses", "next_s", "replica_id", "role", "turn", "unknown")

    def __init__(self, replica_id: str, role: Role) -> None:
        self.replica_id = replica_id
        self.role = role
        self.asking: asyncio.Task[None] | None = None
        self.next_s = float("-inf")
        self.misses = 0
        self.turn = 0
        self.unknown: frozenset[str] = frozenset()

    def next_of(self, attempts: list[Attempt]) -> list[Attempt]:
        """Those that the next question names: all in turns, where there are many."""
        if len(attempts) <= MAX_NAMES:
            return attempts
        start = self.turn * MAX_NAMES % len(attempts)
        self.turn += 1
        return attempts[start : start + MAX_NAMES]

    def is_asked_no_longer(self, _: asyncio.Task[None]) -> None:
        self.asking = None


class StallDetector:
    """Watches over the open attempts. One per router process and model, on its event loop.

    Args:
        after_s: silence after which a replica is asked, seconds.
        clock: monotonic seconds; that of the attempts.
    """

    def __init__(
        self,
        replicas: Askable,
        controller: Informed,
        metrics: RouterMetrics,
        after_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._replicas = replicas
        self._controller = controller
        self._metrics = metrics
        self._after_s = after_s
        self._clock = clock
        # In the order in which they were made; who waits longest leaves first.
        self._open: dict[Attempt, Callable[[], bool]] = {}
        self._suspects: dict[str, _Suspect] = {}
        # When each was last found to stand still.
        self._hung: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(self, attempt: Attempt, leave: Callable[[], bool]) -> None:
        """Watch over an attempt until it has ended or is forgotten. ``O(1)``.

        Args:
            leave: whether it may be given up for another one; that is then as good as made.
        """
        self._open[attempt] = leave
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="stalls")

    def forget(self, attempt: Attempt) -> None:
        """It was closed. ``O(1)``."""
        self._open.pop(attempt, None)

    async def _run(self) -> None:
        while self._open:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Look at all attempts, and begin to ask where some are silent. ``O(open attempts)``."""
        now_s = self._clock()
        for attempt in [attempt for attempt in self._open if attempt.tail is not None]:
            self.forget(attempt)
        by_place: dict[str, list[Attempt]] = {}
        silent: set[str] = set()
        for attempt in self._open:
            if attempt.place is not None:
                by_place.setdefault(attempt.place, []).append(attempt)
                if self._is_silent(attempt, now_s):
                    silent.add(attempt.place)
        for name in [name for name, at_s in self._hung.items() if at_s < now_s - REMEMBERED_S]:
            del self._hung[name]
        for name in [name for name in self._suspects if name not in silent]:
            if self._suspects[name].asking is None:
                del self._suspects[name]
        for name in silent:
            here = by_place[name]
            suspect = self._suspects.get(name)
            if suspect is None:
                suspect = self._suspects[name] = _Suspect(name, here[0].role)
            if suspect.asking is None and now_s >= suspect.next_s:
                suspect.next_s = now_s + ASK_EVERY_S
                suspect.asking = asyncio.create_task(self._examine(suspect, here, now_s))
                suspect.asking.add_done_callback(suspect.is_asked_no_longer)

    def _is_silent(self, attempt: Attempt, now_s: float) -> bool:
        return now_s - attempt.heard_s >= self._after_s and attempt.waits

    async def _examine(self, suspect: _Suspect, here: list[Attempt], asked_s: float) -> None:
        """Ask a replica, and do for the attempts there what its answer asks for."""
        # Before its first item a request may still be on its way there.
        begun = [each for each in here if each.heard and self._is_silent(each, asked_s)]
        named = {each.request_id: each for each in suspect.next_of(begun)}
        suspect.unknown = suspect.unknown.intersection(each.request_id for each in begun)
        told = await self._ask(tuple(named), suspect.replica_id, (), suspect.role)
        if told is not None and told.replica_id != suspect.replica_id:
            await self._leave_replaced(suspect, here, asked_s)
            return
        if told is None and any(each.heard and each.heard_s > asked_s for each in here):
            told = Progress(suspect.replica_id, hung=False)
        if told is not None and not told.hung:
            suspect.misses = 0
            self._hung.pop(suspect.replica_id, None)
            self._give_up_lost(suspect, named, told, asked_s)
            return
        suspect.unknown = frozenset()
        suspect.misses += told is None
        if told is not None or suspect.misses >= MISSES:
            self._hung[suspect.replica_id] = asked_s
            self._controller.troubled(suspect.replica_id, Trouble.HUNG)
            await self._move(suspect, here, asked_s)

    async def _leave_replaced(self, suspect: _Suspect, here: list[Attempt], asked_s: float) -> None:
        """Serve lists it no longer, and it cannot be asked. What drains ends what it has; what
        stood still before is waited for by Serve, too, for as long as a drain may take."""
        hung_s = self._hung.get(suspect.replica_id)
        if hung_s is None or any(each.heard and each.heard_s > hung_s for each in here):
            return
        self._hung[suspect.replica_id] = asked_s
        await self._move(suspect, here, asked_s)

    def _give_up_lost(
        self, suspect: _Suspect, named: dict[str, Attempt], told: Progress, asked_s: float
    ) -> None:
        """Fail the attempts that a living replica did not know twice: nothing will come of them.
        The first time, their last items may have been on their way."""
        lost = suspect.unknown.intersection(told.unknown)
        suspect.unknown = (suspect.unknown - named.keys()) | frozenset(told.unknown)
        for attempt in (named[name] for name in lost):
            if attempt.heard_s <= asked_s:
                self._give_up(attempt, ReplicaFailedError(Reason.REPLICA_FAILED, _LOST))

    async def _move(self, suspect: _Suspect, here: list[Attempt], asked_s: float) -> None:
        """Fail the attempts at a replica that stands still, as far as they may go elsewhere."""

        def stuck(attempt: Attempt) -> bool:
            return attempt in self._open and attempt.waits and attempt.heard_s <= asked_s

        if not any(map(stuck, here)) or not await self._elsewhere(suspect):
            return
        for attempt in filter(stuck, here):
            if self._open[attempt]():
                failure = ReplicaFailedError(Reason.REPLICA_FAILED, _STANDS_STILL, hung=True)
                self._give_up(attempt, failure)

    def _give_up(self, attempt: Attempt, failure: ReplicaFailedError) -> None:
        if attempt.give_up(failure):
            self._metrics.given_up.inc()

    async def _elsewhere(self, suspect: _Suspect) -> bool:
        """Whether any other replica answers that it goes on."""
        hung = tuple(self._hung)
        for pool in sorted(self._replicas.roles, key=lambda role: role != suspect.role):
            avoided = [hung, *[()] * (SEARCHES - 1)]
            questions = (self._ask((), None, avoid, pool) for avoid in avoided)
            for told in await asyncio.gather(*questions):
                if told is None or told.hung or told.replica_id in ("", suspect.replica_id):
                    continue
                self._hung.pop(told.replica_id, None)
                return True
        return False

    async def _ask(
        self, names: tuple[str, ...], target: str | None, avoid: tuple[str, ...], role: Role
    ) -> Progress | None:
        """The answer, if there is one in time. Who raises an error answers, too."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._replicas.progress(names, target, avoid, role)
        except TimeoutError:
            return None
        except ReplicaFailedError as failure:
            if failure.reason is Reason.NO_REPLICA:
                return _NOBODY
            return Progress(target or "", hung=False) if failure.reason is Reason.INTERNAL else None
