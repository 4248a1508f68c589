"""Detects requests that may be the cause of lost replicas; docs/reliability.md has the rules.

*Suspected*: at a lost replica. *Cleared*: after a while at the next one. *Blamed*: that is lost,
too. *Quarantined*: the same body of the same client is refused for a while."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from sluice.router.dispatch.attempt import Attempt, OpenAttempts, SuspicionState
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.request.call import Call
from sluice.router.request.validation import is_structured
from sluice.router.serve.contract import ReplicaFailedError
from sluice.scheduling.fleet.ranks import replica_of

CLEARED_S: Final = 10.0
"""Minimum time at the next replica after which a suspect is cleared, seconds."""

TRIAL_S: Final = 1.0
"""Longest wait of a suspect for another one that begins at the same replica, seconds."""

FEW: Final = 3  # maximum number of suspects that are blamed for one loss

ONE_LOSS_S: Final = 5.0
"""Failures at one replica within this time of each other count as one loss, seconds."""

QUARANTINED_S: Final = 300.0
"""How long a request is refused, and how long one loss of it is remembered, seconds."""

REMEMBERED: Final = 1_024
"""Maximum number of remembered contents; the least recently seen one is evicted first."""

_HUNG = (
    "The replica hung while it served this request. Structured output is not retried after a hang, "
    "as it may be the cause."
)
_LOST = "Several replicas were lost while they served this request. It is not retried."


@dataclass(slots=True)
class _Content:
    """One content: replicas lost with it, until when that counts, how long the last served it."""

    losses: int
    until_s: float
    lasted_s: float


@dataclass(slots=True)
class Suspicion:
    """Applies the rules of docs/reliability.md; one per router process and model.

    ``O(1)`` for ordinary requests, ``O(open attempts)`` for a suspect when a replica is lost. A
    body is hashed only if its size equals that of a remembered one. ``lost``: when each replica
    was lost, and the attempts blamed for it."""

    attempts: OpenAttempts
    metrics: RouterMetrics
    clock: Callable[[], float]
    contents: OrderedDict[tuple[tuple[int, int], bytes], _Content] = field(
        default_factory=OrderedDict
    )
    lost: dict[str, tuple[float, frozenset[Attempt]]] = field(default_factory=dict)
    trials: dict[str, asyncio.Event] = field(default_factory=dict)

    def open(self, call: Call) -> SuspicionState:
        """The state of a new call. Raises ApiError: 422; the call is quarantined."""
        content = self._find(call)
        if content is None:
            return SuspicionState()
        if content.losses < 2:
            return SuspicionState(suspected=True, lasted_s=content.lasted_s)
        self.metrics.quarantined_requests.inc()
        left_s = content.until_s - self.clock()
        raise ApiError(
            Reason.REQUEST_QUARANTINED,
            "Replicas were lost while they served this request. The same request is refused for "
            f"another {max(1, round(left_s))} s.",
        )

    @asynccontextmanager
    async def trial(self, place: str | None) -> AsyncIterator[None]:
        """Enclose the start of a suspect's attempt: no other suspect starts at ``place``
        meanwhile."""
        name = replica_of(place or "")
        mine = asyncio.Event()
        try:
            async with asyncio.timeout(TRIAL_S):
                while (other := self.trials.get(name)) is not None:
                    await other.wait()
        except TimeoutError:
            pass
        self.trials[name] = mine
        try:
            yield
        finally:
            mine.set()
            if self.trials.get(name) is mine:
                del self.trials[name]

    def judge(
        self, call: Call, state: SuspicionState, attempt: Attempt, failure: ReplicaFailedError
    ) -> ReplicaFailedError | None:
        """An attempt has failed. Returns the failure that ends the call if the call is blamed."""
        blamed = self._blamed(attempt) if state.suspected else frozenset()
        if _replica(attempt) in (None, state.place) or not failure.lost:
            return None
        lasted_s = self.clock() - attempt.made_s
        if failure.hung and ends_when_hung(call):
            known = self._find(call)
            self._remember(call, 1 if known is None else known.losses + 1, lasted_s)
            return ReplicaFailedError(Reason.REQUEST_SUSPECTED, _HUNG, retry=False, hung=True)
        if state.suspected and not self._is_cleared(state, attempt):
            if attempt not in blamed and not (state.spared and attempt.responded):
                state.spared = attempt.responded
                return None
            self._remember(call, 2, lasted_s)
            return ReplicaFailedError(
                Reason.REQUEST_SUSPECTED, _LOST, retry=False, dead=failure.dead, hung=failure.hung
            )
        state.suspected, state.place = True, _replica(attempt)
        state.lasted_s, state.spared = lasted_s, False
        return None

    def _is_cleared(self, state: SuspicionState, attempt: Attempt) -> bool:
        return self.clock() - attempt.made_s >= max(CLEARED_S, state.lasted_s)

    def _blamed(self, attempt: Attempt) -> frozenset[Attempt]:
        """The attempts blamed for a loss, decided when the first attempt there fails."""
        now_s, place = self.clock(), _replica(attempt)
        for name in [name for name, (at_s, _) in self.lost.items() if now_s - at_s > ONE_LOSS_S]:
            del self.lost[name]
        if place is None:
            return frozenset()
        if place not in self.lost:
            here = [
                each
                for each, answer in self.attempts.items()
                if answer.suspicion.suspected
                and _replica(each) == place
                and each.responded
                and each.tail is None
                and not self._is_cleared(answer.suspicion, each)
            ]
            group = [each for each in here if not each.opened] or here
            self.lost[place] = now_s, frozenset(group if len(group) <= FEW else ())
        return self.lost[place][1]

    def _find(self, call: Call) -> _Content | None:
        size = _size(call)
        if not any(size == known for known, _ in self.contents):
            return None
        key = size, _digest(call)
        content = self.contents.get(key)
        if content is not None and self.clock() >= content.until_s:
            del self.contents[key]
            return None
        return content

    def _remember(self, call: Call, losses: int, lasted_s: float) -> None:
        key = _size(call), _digest(call)
        self.contents[key] = _Content(losses, self.clock() + QUARANTINED_S, lasted_s)
        self.contents.move_to_end(key)
        if len(self.contents) > REMEMBERED:
            self.contents.popitem(last=False)
        if losses > 1:
            self.metrics.quarantined_requests.inc()


def _replica(attempt: Attempt) -> str | None:
    """Serve's replica at the attempt's place: all of its ranks end with it."""
    return None if attempt.place is None else replica_of(attempt.place)


def ends_when_hung(call: Call) -> bool:
    """Whether a call must end once its replica hangs."""
    return is_structured(call.body)


def _size(call: Call) -> tuple[int, int]:
    """Equal for equal contents, and known without reading the body."""
    return call.prompt.characters, call.prompt.tokens


def _digest(call: Call) -> bytes:
    """Digest of the content and its client: no request is refused because of another client's."""
    content = [call.endpoint, call.client.owner, call.body]
    # Audio is bytes, which are hashed by themselves.
    text = json.dumps(content, sort_keys=True, default=lambda a: hashlib.sha256(a).hexdigest())
    return hashlib.sha256(text.encode()).digest()
