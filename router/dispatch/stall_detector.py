"""Detects attempts whose replica is unresponsive: neither an error nor a token arrives.

Silence only triggers a probe, one per replica. A replica that confirms the request is waited for:
its own watchdog ends a hung engine. One that reports a hang, or misses two probes in a row, loses
the attempts that may continue at another live replica. A call fails after :data:`SILENCE_S`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from sluice.controller.client import ControllerClient
from sluice.protocol.requests import Progress
from sluice.router.dispatch.attempt import Answer, Attempt, OpenAttempts
from sluice.router.dispatch.retries import RetryBudget
from sluice.router.dispatch.suspicion import ends_when_hung
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.serve.contract import ReplicaFailedError, Replicas
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.roles import Role

SWEEP_S = 0.25  # interval between two checks of all attempts, seconds
ASK_EVERY_S = 1.0  # minimum time between two probes of a replica, seconds
ANSWER_S = 0.5  # timeout of a probe, seconds
MISSES = 2  # unanswered probes in a row after which a replica counts as unresponsive
MAX_NAMES = 256  # maximum number of requests named in one probe; later probes name the others

REMEMBERED_S = 60.0
"""How long an unresponsive replica stays marked as such if nothing came from it, seconds."""

SEARCHES = 3
"""Probes to find a live replica in a pool: the least loaded one, then any of Serve's choice."""

SILENCE_S = 60.0  # longest time of a call at replicas without a sign of life, seconds

LEAVING_S = 3_600.0
"""A drain without probes counts as life this long, seconds; ``drain_timeout_s`` ends it."""

OWN_GAP_S = 5.0
"""A longer time between two checks is a stall of this process, and counts for no call, seconds."""

ON_THE_WAY_S = 10.0  # A silent request unknown to its replica after this is lost, seconds

_NOBODY = Progress("", hung=False)


@dataclass(slots=True, eq=False)
class _Suspect:
    """A replica with silent attempts. ``unknown``: requests that it did not know when last asked.
    ``probes``: those with too many requests to name, which are named in turns."""

    replica_id: str
    role: Role
    since_s: float
    asking: asyncio.Task[None] | None = None
    next_s: float = -inf
    misses: int = 0
    probes: int = 0
    unknown: frozenset[str] = frozenset()

    @property
    def rests(self) -> bool:
        """Whether no probe of it is open."""
        return self.asking is None or self.asking.done()


@dataclass
class StallDetector:
    """Watches a model's open attempts on its event loop. ``after_s``: silence before a probe, s.
    ``hung``: when each replica was last found to be unresponsive. ``look``: called as often."""

    attempts: OpenAttempts
    replicas: Replicas
    controller: ControllerClient
    budget: RetryBudget
    metrics: RouterMetrics
    after_s: float
    clock: Callable[[], float]
    look: Callable[[], None]
    suspects: dict[str, _Suspect] = field(default_factory=dict)
    hung: dict[str, float] = field(default_factory=dict)
    swept_s: float = inf

    async def watch(self) -> None:
        """Check the open attempts until there are none."""
        self.swept_s = self.clock()
        while self.attempts:
            await asyncio.sleep(SWEEP_S)
            self.sweep()
            self.look()

    def sweep(self) -> None:
        """Check all attempts, and probe the replicas of silent ones. ``O(open attempts)``."""
        now_s = self.clock()
        by_place: dict[str, list[Attempt]] = {}
        silent: set[str] = set()
        ended: list[Attempt] = []
        asleep = self.replicas.asleep
        gap_s, self.swept_s = now_s - self.swept_s, now_s
        # The one that waits longest leaves first: they are in the order in which they were made.
        for attempt, answer in self.attempts.items():
            if attempt.tail is not None:
                continue
            if attempt.responded:
                answer.alive_s = max(answer.alive_s, attempt.last_item_s)
            if gap_s > OWN_GAP_S:
                answer.alive_s = min(now_s, answer.alive_s + gap_s)
            # Waits for a slow client and for a model's first replica have limits of their own.
            if asleep or not attempt.waits:
                answer.alive_s = now_s
            if now_s - answer.alive_s >= SILENCE_S:
                ended.append(attempt)
            elif attempt.place is not None:
                by_place.setdefault(attempt.place, []).append(attempt)
                if self._is_silent(attempt, now_s):
                    silent.add(attempt.place)
        for attempt in ended:
            message = f"There was no sign of life of the request for {SILENCE_S:g} seconds."
            self._abandon(attempt, ReplicaFailedError(Reason.REPLICA_FAILED, message, retry=False))
        for name in [name for name, at_s in self.hung.items() if at_s < now_s - REMEMBERED_S]:
            del self.hung[name]
        for name in [name for name in self.suspects if name not in silent]:
            if self.suspects[name].rests:
                del self.suspects[name]
        for name in silent:
            here = by_place[name]
            suspect = self.suspects.get(name)
            if suspect is None:
                suspect = self.suspects[name] = _Suspect(name, here[0].role, now_s)
            if suspect.rests and now_s >= suspect.next_s:
                suspect.next_s = now_s + ASK_EVERY_S
                suspect.asking = asyncio.create_task(self._examine(suspect, here, now_s))

    def _is_silent(self, attempt: Attempt, now_s: float) -> bool:
        return now_s - attempt.last_item_s >= self.after_s and attempt.waits

    async def _examine(self, suspect: _Suspect, here: list[Attempt], asked_s: float) -> None:
        """Probe a replica, and handle its attempts according to the answer."""
        begun = [each for each in here if self._is_silent(each, asked_s)]
        chosen = begun
        if len(begun) > MAX_NAMES:
            start = suspect.probes * MAX_NAMES % len(begun)
            chosen = begun[start : start + MAX_NAMES]
            suspect.probes += 1
        named = {each.request.request_id: each for each in chosen}
        suspect.unknown = suspect.unknown.intersection(each.request.request_id for each in begun)
        report = await self._ask(tuple(named), suspect.replica_id, (), suspect.role)
        if report is not None and report.replica_id != suspect.replica_id:
            await self._leave_replaced(suspect, here, asked_s)
            return
        if report is None and any(each.responded and each.last_item_s > asked_s for each in here):
            report = Progress(suspect.replica_id, hung=False)
        if report is not None:
            for name in named.keys() - set(report.unknown):
                if (answer := self.attempts.get(named[name])) is not None:
                    answer.alive_s = max(answer.alive_s, asked_s)
        if report is not None and not report.hung:
            suspect.misses = 0
            self.hung.pop(suspect.replica_id, None)
            self._abandon_lost(suspect, named, report, asked_s)
            return
        suspect.unknown = frozenset()
        suspect.misses += report is None
        if report is not None or suspect.misses >= MISSES:
            self.hung[suspect.replica_id] = asked_s
            self.controller.faulted(suspect.replica_id, ReplicaFault.HUNG)
            await self._move(suspect, here, asked_s)

    async def _leave_replaced(self, suspect: _Suspect, here: list[Attempt], asked_s: float) -> None:
        """Serve no longer lists the replica, so it cannot be probed: let it drain, but abandon its
        attempts if it was unresponsive before, as Serve waits for the whole drain."""
        hung_s = self.hung.get(suspect.replica_id)
        if hung_s is None or any(each.responded and each.last_item_s > hung_s for each in here):
            drains = self.replicas.is_leaving(suspect.replica_id)
            if drains and asked_s - suspect.since_s < LEAVING_S:
                for answer in filter(None, map(self.attempts.get, here)):
                    answer.alive_s = max(answer.alive_s, asked_s)
            return
        self.hung[suspect.replica_id] = asked_s
        await self._move(suspect, here, asked_s)

    def _abandon_lost(
        self, suspect: _Suspect, named: dict[str, Attempt], report: Progress, asked_s: float
    ) -> None:
        """Fail attempts twice reported unknown; once, their last items may have been in flight."""
        lost = suspect.unknown.intersection(report.unknown)
        suspect.unknown = (suspect.unknown - named.keys()) | frozenset(report.unknown)
        for attempt in (named[name] for name in lost):
            arrived = attempt.responded or asked_s - attempt.made_s >= ON_THE_WAY_S
            if arrived and attempt.last_item_s <= asked_s:
                message = "The replica has lost the request."
                self._abandon(attempt, ReplicaFailedError(Reason.REPLICA_FAILED, message))

    async def _move(self, suspect: _Suspect, here: list[Attempt], asked_s: float) -> None:
        """Fail an unresponsive replica's attempts that another one may retry or resume."""

        def stuck(attempt: Attempt) -> bool:
            return attempt in self.attempts and attempt.waits and attempt.last_item_s <= asked_s

        if not any(map(stuck, here)) or not await self._elsewhere(suspect):
            return
        for attempt in filter(stuck, here):
            if self._may_leave(attempt, self.attempts[attempt]):
                message = "The replica is unresponsive."
                self._abandon(
                    attempt, ReplicaFailedError(Reason.REPLICA_FAILED, message, hung=True)
                )

    def _may_leave(self, attempt: Attempt, answer: Answer) -> bool:
        """Whether an attempt leaves a hung replica: another attempt is granted, or it may be the
        cause. A call that cannot be resumed waits: the replica may recover."""
        if ends_when_hung(answer.call):
            return True
        transcript = answer.transcript
        begun = attempt.opened or (transcript is not None and transcript.begun)
        if begun and not (transcript is not None and transcript.resumable):
            return False
        if answer.spent or not self.budget.take():
            return False
        answer.granted = True
        return True

    def _abandon(self, attempt: Attempt, failure: ReplicaFailedError) -> None:
        if attempt.abandon(failure):
            self.metrics.abandoned.inc()

    async def _elsewhere(self, suspect: _Suspect) -> bool:
        """Whether any other replica answers that its engine runs."""
        hung = tuple(self.hung)
        for pool in sorted(self.replicas.roles, key=lambda role: role != suspect.role):
            avoided = [hung, *[()] * (SEARCHES - 1)]
            questions = (self._ask((), None, avoid, pool) for avoid in avoided)
            for report in await asyncio.gather(*questions):
                if report is None or report.hung or report.replica_id in ("", suspect.replica_id):
                    continue
                self.hung.pop(report.replica_id, None)
                return True
        return False

    async def _ask(
        self, names: tuple[str, ...], target: str | None, avoid: tuple[str, ...], role: Role
    ) -> Progress | None:
        """The answer, ``None`` if late. An error of the replica itself counts as one."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self.replicas.progress(names, target, avoid, role)
        except TimeoutError:
            return None
        except ReplicaFailedError as failure:
            if failure.reason is Reason.NO_REPLICA:
                return _NOBODY
            return Progress(target or "", hung=False) if failure.reason is Reason.INTERNAL else None
