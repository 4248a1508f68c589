"""The observer's way to the deciding actor: by name, with a deadline."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, RayError

from sluice.controller.observability.recent_decisions import LatestDecisions
from sluice.controller.observability.records import Detail, Figures
from sluice.controller.transport.failure import NoAnswerError
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.roles import Role

_TIMEOUT_S = 1.0
"""Longest wait for an answer, seconds: less than routers wait for the observer's."""


class DecidingActor(Protocol):
    """The part of the deciding actor that the observer uses. Each method may raise
    :class:`NoAnswerError`."""

    async def figures(self) -> Figures:
        """The numbers of its metrics."""

    async def detail(self) -> Detail:
        """Its state for an operator."""

    async def latest_decisions(self, limit: int) -> LatestDecisions:
        """At most ``limit`` of its last decisions."""

    async def demand(self, role: Role | None) -> Load:
        """The load on the replicas of ``role``, or on all; without what routers count."""


class ControllerHandle:
    """Calls the deciding actor; each method raises :class:`NoAnswerError` if it does not answer.
    Routers and replicas start that actor; this does not.

    Args:
        name, namespace: of the actor.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._namespace = namespace
        self._handle: Any = None

    async def figures(self) -> Figures:
        """See :meth:`sluice.controller.actor.Controller.figures`."""
        found: Figures = await self._ask("figures")
        return found

    async def detail(self) -> Detail:
        """See :meth:`sluice.controller.actor.Controller.detail`."""
        found: Detail = await self._ask("detail")
        return found

    async def latest_decisions(self, limit: int) -> LatestDecisions:
        """See :meth:`sluice.controller.actor.Controller.latest_decisions`."""
        found: LatestDecisions = await self._ask("latest_decisions", limit)
        return found

    async def demand(self, role: Role | None) -> Load:
        """See :meth:`sluice.controller.actor.Controller.demand`."""
        found: Load = await self._ask("demand", role)
        return found

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            if self._handle is None:
                # In a thread, because it blocks.
                self._handle = await asyncio.to_thread(
                    ray.get_actor, self._name, namespace=self._namespace
                )
            async with asyncio.timeout(_TIMEOUT_S):
                return await getattr(self._handle, method).remote(*args)
        except TimeoutError:
            raise NoAnswerError("timeout") from None
        except (RayError, ValueError) as error:  # ValueError: there is no such actor
            if isinstance(error, ActorDiedError):
                self._handle = None
            raise NoAnswerError("unavailable") from None
