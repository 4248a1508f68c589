"""Which requests may be the cause that replicas were lost.

A replica is *lost* to a router when it dies, its engine dies, its connection breaks, or it hangs.
What it was serving is tried again elsewhere. If one of these requests is the cause, a plain retry
takes the next replica, and then the next one. So:

- **Suspected** is a request that was at a replica when that was lost. It is tried again. No two
  suspects *begin* at one replica at the same time. One that has waited for :data:`TRIAL_S` begins
  all the same: a replica may have had hundreds of requests. The next replica confirms at once that
  it has the request.
- **Cleared** is a suspect that has been at the next replica for as long as at the one that was
  lost, and for at least :data:`CLEARED_S`.
- **Blamed** is a suspect whose second replica is lost, too, after it has confirmed the request. Of
  several suspects there, those without an output since are blamed, else all; but not if they are
  more than :data:`FEW`: then most of them are innocent, and they are tried once more. Whoever loses
  a third replica so is blamed.
- Structured output is blamed for a hang at once. Its grammar is followed between the steps of an
  engine, so it can stop them; to try it again would stop the next engine. It is *quarantined* when
  a second replica hangs with the same content.

A blamed request ends with an error that tells clients not to repeat it. It is **quarantined**: the
same body of the same client is refused for :data:`QUARANTINED_S`. Other requests are not affected.

Two losses at once, such as that of a node, blame nobody: what goes from a dead replica to another
one that dies before it has confirmed the request was never there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from router.answer import Attempt, ReplicaFailedError
from router.errors import ApiError, Reason
from router.metrics.instruments import RouterMetrics
from router.request.call import Call
from router.request.engine_bounds import is_structured

CLEARED_S: Final = 10.0
"""Least time at the next replica after which a suspect is cleared, seconds."""

TRIAL_S: Final = 1.0
"""Longest wait of a suspect for another one that begins at the same replica, seconds."""

FEW: Final = 3
"""Most suspects that are blamed for one loss."""

ONE_LOSS_S: Final = 5.0
"""Attempts that fail within so much time of each other at one replica fail of one loss, seconds."""

QUARANTINED_S: Final = 300.0
"""How long a request is refused, and how long one loss of it is remembered, seconds."""

REMEMBERED: Final = 1_024
"""Contents that are remembered; the one that was not seen for longest goes first."""

_HUNG = (
    "The replica hung while it served this request. Structured output is not tried again after "
    "that, as it may be the cause."
)
_LOST = "Several replicas were lost while they served this request. It is not tried again."


@dataclass(slots=True)
class Case:
    """What one call has to do with lost replicas.

    Attributes:
        suspected: it was at a replica when that was lost.
        place: the replica that was lost. Whatever fails there again is the same loss.
        lasted_s: how long it had been there.
        spared: it was one of many at its second replica when that was lost, too.
    """

    suspected: bool = False
    place: str | None = None
    lasted_s: float = 0.0
    spared: bool = False


@dataclass(slots=True)
class _Content:
    """What is remembered of a content: how many replicas were lost with it, until when that counts,
    and how long they lasted."""

    losses: int
    until_s: float
    lasted_s: float


class Suspicion:
    """Keeps the rules above. One per router process and model.

    It costs an ordinary request a look at an empty table, and a suspect ``O(suspects)`` when a
    replica is lost. A digest of a body is made only while some content is remembered, and only of
    bodies as long as that one.

    Args:
        clock: monotonic seconds; that of the attempts.
    """

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._contents: OrderedDict[tuple[tuple[int, int], bytes], _Content] = OrderedDict()
        self._open = WeakKeyDictionary[Attempt, Case]()
        # When each was lost, and who is blamed for it.
        self._lost: dict[str, tuple[float, frozenset[Attempt]]] = {}
        self._trials: dict[str, asyncio.Event] = {}

    def open(self, call: Call) -> Case:
        """The case of a new call.

        Raises:
            ApiError: 422: it is quarantined.
        """
        content = self._find(call)
        if content is None:
            return Case()
        if content.losses < 2:
            return Case(suspected=True, lasted_s=content.lasted_s)
        self._metrics.quarantined_requests.inc()
        left_s = content.until_s - self._clock()
        raise ApiError(
            Reason.REQUEST_QUARANTINED,
            "Replicas were lost while they served this request, so the same request is refused "
            f"for {max(1, round(left_s))} s more.",
        )

    @asynccontextmanager
    async def trial(self, case: Case, place: str | None) -> AsyncIterator[None]:
        """Around the beginning of an attempt at ``place``: alone among suspects, if possible."""
        if not case.suspected:
            yield
            return
        name = place or ""
        mine = asyncio.Event()
        try:
            async with asyncio.timeout(TRIAL_S):
                while (other := self._trials.get(name)) is not None:
                    await other.wait()
        except TimeoutError:
            pass
        self._trials[name] = mine
        try:
            yield
        finally:
            mine.set()
            if self._trials.get(name) is mine:
                del self._trials[name]

    def sent(self, case: Case, attempt: Attempt) -> None:
        """A new attempt at a call."""
        if case.suspected:
            self._open[attempt] = case

    def ended(self, attempt: Attempt) -> None:
        """It is over, or closed. Idempotent."""
        self._open.pop(attempt, None)

    def ends_when_hung(self, call: Call) -> bool:
        """Whether a call is over once its replica hangs."""
        return is_structured(call.body)

    def judge(
        self, call: Call, case: Case, attempt: Attempt, failure: ReplicaFailedError
    ) -> ReplicaFailedError | None:
        """An attempt has failed. Returns the failure that ends the call if it is to blame."""
        blamed = self._blamed(attempt) if case.suspected else frozenset()
        self.ended(attempt)
        if attempt.place in (None, case.place) or not failure.lost:
            return None
        lasted_s = self._clock() - attempt.made_s
        if failure.hung and self.ends_when_hung(call):
            known = self._find(call)
            self._remember(call, 1 if known is None else known.losses + 1, lasted_s)
            return ReplicaFailedError(Reason.REQUEST_SUSPECTED, _HUNG, retry=False, hung=True)
        if case.suspected and not self._is_cleared(case, attempt):
            if attempt not in blamed and not (case.spared and attempt.heard):
                case.spared = attempt.heard
                return None
            self._remember(call, 2, lasted_s)
            return ReplicaFailedError(
                Reason.REQUEST_SUSPECTED, _LOST, retry=False, dead=failure.dead, hung=failure.hung
            )
        case.suspected, case.place = True, attempt.place
        case.lasted_s, case.spared = lasted_s, False
        return None

    def _is_cleared(self, case: Case, attempt: Attempt) -> bool:
        return self._clock() - attempt.made_s >= max(CLEARED_S, case.lasted_s)

    def _blamed(self, attempt: Attempt) -> frozenset[Attempt]:
        """Who is blamed for the loss of the replica of ``attempt``: decided when the first of the
        attempts there fails."""
        now_s, place = self._clock(), attempt.place
        for name in [name for name, (at_s, _) in self._lost.items() if now_s - at_s > ONE_LOSS_S]:
            del self._lost[name]
        if place is None:
            return frozenset()
        if place not in self._lost:
            here = [
                each
                for each, case in self._open.items()
                if each.place == place
                and each.heard
                and each.tail is None
                and not self._is_cleared(case, each)
            ]
            group = [each for each in here if not each.opened] or here
            self._lost[place] = now_s, frozenset(group if len(group) <= FEW else ())
        return self._lost[place][1]

    def _find(self, call: Call) -> _Content | None:
        size = _size(call)
        if not any(size == known for known, _ in self._contents):
            return None
        key = size, _digest(call)
        content = self._contents.get(key)
        if content is not None and self._clock() >= content.until_s:
            del self._contents[key]
            return None
        return content

    def _remember(self, call: Call, losses: int, lasted_s: float) -> None:
        key = _size(call), _digest(call)
        self._contents[key] = _Content(losses, self._clock() + QUARANTINED_S, lasted_s)
        self._contents.move_to_end(key)
        if len(self._contents) > REMEMBERED:
            self._contents.popitem(last=False)
        if losses > 1:
            self._metrics.quarantined_requests.inc()


def _size(call: Call) -> tuple[int, int]:
    """What equal contents have in common, and is known without a look at the body."""
    return call.prompt.characters, call.prompt.tokens


def _digest(call: Call) -> bytes:
    """Of the content, and of whose it is: nobody's request is refused for another client's."""
    content = json.dumps([call.endpoint, call.client.owner, call.body], sort_keys=True)
    return hashlib.sha256(content.encode()).digest()
