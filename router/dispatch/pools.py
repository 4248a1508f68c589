"""The pools of replicas that may serve a whole call, and how long empty ones are waited for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import inf

from sluice.router.dispatch.answer import Answer
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.serve.hint import NO_REPLICA_WAIT_S
from sluice.scheduling.roles import Role

EMPTY_POOLS_PAUSE_S = 0.25
"""Pause before pools that were all found empty are asked again, seconds."""


class Pools:
    """One per router process and model.

    Args:
        roles: of the existing pools, in the order in which they are asked to serve a whole call.
        single: there is one pool only.
        clock: monotonic seconds.
        pause: sleeps for the given number of seconds.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        single: bool,
        clock: Callable[[], float],
        pause: Callable[[float], Awaitable[object]],
    ) -> None:
        self._roles = tuple(roles)
        self._single = single
        self._clock = clock
        self._pause = pause
        self._splits = {"prefill", "decode"} <= set(roles)
        # When all were first and last found empty, with no answer in between.
        self._empty_since_s = self._last_empty_s = -inf

    def may_split(self, answer: Answer) -> bool:
        """Whether there are replicas for a P/D pair, as far as is known."""
        return self._splits and not answer.empty & {"prefill", "decode"}

    def role_for(self, answer: Answer, wanted: Role | None) -> Role:
        """The pool that a call goes to: the ``wanted`` one, unless it was empty."""
        left = self._left(answer) or self._roles
        return wanted if wanted is not None and wanted in left else left[0]

    def answered(self) -> None:
        """A replica has answered."""
        self._last_empty_s = -inf

    async def wait(self, answer: Answer, failure: ReplicaFailedError) -> None:
        """A pool was empty: return when another one, or all of them again, may be asked. All
        together get the time for which a single pool keeps requests waiting, counted from when all
        were first found empty.

        Raises:
            ReplicaFailedError: ``failure``; they have been empty for too long.
        """
        if self._left(answer):
            return
        now_s = self._clock()
        if now_s - self._last_empty_s > NO_REPLICA_WAIT_S:
            self._empty_since_s = now_s
        self._last_empty_s = now_s
        if self._single or now_s - self._empty_since_s >= NO_REPLICA_WAIT_S:
            raise failure
        await self._pause(EMPTY_POOLS_PAUSE_S)
        answer.empty.clear()

    def _left(self, answer: Answer) -> list[Role]:
        return [role for role in self._roles if role not in answer.empty]
