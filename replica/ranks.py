"""A replica's ranks. With data parallelism it has several engines, each with a queue of its own.
Each is a :class:`~sluice.replica.server.Replica` here, with its own reports; this module joins them
to the one that Serve knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from operator import attrgetter
from typing import Any

from sluice.replica.engine import EngineRequest, Progress, ResponseItem, ResponseTaken
from sluice.replica.metrics import Measured
from sluice.replica.response import Response
from sluice.replica.server import Replica
from sluice.scheduling.fleet.ranks import rank_name, rank_of

live_requests = attrgetter("live_requests")
"""API calls that a rank serves now."""


def names_of(replica_id: str, ranks: int) -> list[str]:
    """The names of a replica's ranks; one rank has the replica's own name."""
    return [replica_id] if ranks == 1 else [rank_name(replica_id, each) for each in range(ranks)]


class Ranks:
    """The ranks of one replica.

    Args:
        replica_id: Serve's name of the replica.
        replicas: its ranks in order, at least one. The first one launches the engine of all: it is
            started first, and stopped last.
    """

    def __init__(self, replica_id: str, replicas: Sequence[Replica]) -> None:
        self.replica_id = replica_id
        self.replicas = replicas

    async def start(self) -> None:
        """Start every rank.

        Raises:
            EngineDeadError: an engine could not start.
        """
        for each in self.replicas:
            await each.start()

    def measured(self) -> dict[str, Measured]:
        """What metrics are read from, by the name of the rank."""
        return {
            each.replica_id: Measured(each.engine.state, partial(live_requests, each))
            for each in self.replicas
        }

    def chosen(self, request: EngineRequest) -> Replica:
        """The rank that is to serve a request: the one that it names, or else the one with the
        fewest live requests."""
        if request.rank is not None and request.rank < len(self.replicas):
            return self.replicas[request.rank]
        return min(self.replicas, key=live_requests)

    def open(self, request: EngineRequest, wake: Callable[[], None]) -> Response:
        """Begin to serve a request; see :meth:`sluice.replica.server.Replica.open`."""
        return self.chosen(request).open(request, wake)

    async def generate(
        self, request: EngineRequest, target: str | None
    ) -> AsyncGenerator[list[ResponseItem], None]:
        """Serve a request; see :meth:`sluice.replica.server.Replica.generate`. If ``target``, the
        caller's choice, is another replica, or if the request asks for it, the first item names the
        rank."""
        moved = target is not None and not target.startswith(self.replica_id)
        if moved:
            request = request.at(None)
        rank = self.chosen(request)
        if moved or request.confirm:
            yield [ResponseTaken(rank.replica_id)]
        async with aclosing(rank.generate(request)) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored."""
        for each in self.replicas:
            await each.abort(request_id)

    def progress(self, request_ids: Sequence[str], target: str | None) -> Progress:
        """Whether the rank that ``target`` names makes progress, and which of these requests it
        does not serve; without a rank, whether all do, and which none serves."""
        rank = None if target is None else rank_of(target)
        if rank is not None and rank < len(self.replicas):
            return self.replicas[rank].progress(request_ids)
        found = [each.progress(request_ids) for each in self.replicas]
        unknown = set(request_ids).intersection(*(each.unknown for each in found))
        hung = any(each.hung for each in found)
        return Progress(self.replica_id, hung, tuple(sorted(unknown)))

    async def check_health(self) -> None:
        """Return if every rank may serve.

        Raises:
            EngineDeadError: an engine is dead, or has been stalled for too long.
        """
        for each in self.replicas:
            await each.check_health()

    async def drain(self) -> None:
        """Drain every rank; see :meth:`sluice.replica.server.Replica.drain`."""
        await asyncio.gather(*(each.drain() for each in self.replicas))

    async def stop(self) -> None:
        """Leave the controller, and free the engines. Idempotent."""
        for each in reversed(self.replicas):
            await each.stop()

    def snapshot(self) -> dict[str, Any]:
        """The state as plain data: that of the first rank, and ``ranks`` with those of all.

        Raises:
            RuntimeError: an engine is gone.
        """
        found = [each.snapshot() for each in self.replicas]
        return found[0] | {
            "live_requests": sum(each["live_requests"] for each in found),
            "ranks": found,
        }
