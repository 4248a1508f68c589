"""Serve's request router for the replicas: it sends a request to the controller's choice.

Every process with a handle unpickles this module by value: its globals would be copies, and its
classes differ from those that others import. So all shared objects are imported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.replica_wrapper import RunningReplica

from sluice.controller.client import ControllerClient, fleet_name
from sluice.controller.config import ControllerConfig
from sluice.protocol.requests import EngineRequest
from sluice.router import wire
from sluice.router.serve import running
from sluice.router.serve.hint import NO_REPLICA_WAIT_S, DrainedError, Hint, NoReplicaError
from sluice.scheduling.fleet.ranks import replica_of

_log = logging.getLogger(__name__)


class HintRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Hint first, power of two choices otherwise.

    A hinted replica is chosen outside Serve's queue: a full one must not delay other requests.
    Closed ones need a hint, and so do quarantined ones if there are others. Without any replica,
    requests wait from when the last one left, then fail; with other pools, also once all here have
    failed."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve once, with ``request_router_kwargs``, on the router's event loop."""
        self._by_unique_id: dict[str, RunningReplica] = {}
        self._probed: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._no_replica_wait_s = float(kwargs.get("no_replica_wait_s", NO_REPLICA_WAIT_S))
        self._other_pools = bool(kwargs.get("other_pools"))
        self._scales_to_zero = bool(kwargs.get("scales_to_zero"))
        self._changed = asyncio.Event()
        self._none_since_s = asyncio.get_running_loop().time()
        # Now and not at first use: an old process must not start to maintain the controller after a
        # newer version has replaced it. In a thread, because it blocks.
        self._client = asyncio.ensure_future(
            asyncio.to_thread(
                ControllerClient,
                fleet_name(self.app_name, kwargs.get("key")),
                ControllerConfig.model_validate(kwargs["controller"]),
            )
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of candidates: the hinted replica, then Serve's own two."""
        others: list[list[RunningReplica]] = await super().choose_replicas(
            candidate_replicas, pending_request
        )
        hint = _hint_of(pending_request)
        excluded = self._excluded(hint)
        if excluded:
            open_ = [[r for r in rank if r.replica_id.unique_id not in excluded] for rank in others]
            rest = self._least_loaded_but(excluded)
            others = [*filter(None, open_), *([[rest]] if rest is not None else [])]
        hinted = self._hinted(hint)
        return others if hinted is None else [[hinted], *others]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Fall back to Serve's choice in unexpected cases: an exception would fail the request."""
        chosen = await self._choice_for(pending_request, is_retry)
        request = pending_request.args[0] if pending_request.args else None
        if isinstance(request, EngineRequest):
            # Through its module: the dictionary itself would be pickled with this class, as a copy.
            on_choice = running.CHOSEN.get(request.request_id)
            if on_choice is not None:
                hinted = _hint_of(pending_request).target or ""
                chosen_id = chosen.replica_id.unique_id
                on_choice(hinted if replica_of(hinted) == chosen_id else chosen_id)
        return chosen

    async def _choice_for(self, pending_request: PendingRequest, is_retry: bool) -> RunningReplica:
        """The replica of a request. Raises NoReplicaError: there is no replica for it."""
        if not self._by_unique_id:
            await self._wait_for_replica()
        hint = _hint_of(pending_request)
        if not is_retry:
            hinted = self._hinted(hint)
            if hinted is not None:
                return hinted
        if hint.closed and self._least_loaded_but(hint.closed) is None:
            raise DrainedError("Every replica is drained.")
        tried = (*hint.avoid, *self._excluded(hint))
        if self._other_pools and self._least_loaded_but(tried) is None:
            raise NoReplicaError("Every replica of this pool has failed the request.")
        choice = super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        return await self._while_there_are_replicas(choice)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list of running replicas changed; draining ones are no longer in it."""
        before = set(self._by_unique_id)
        super().update_replicas(replicas)
        self._by_unique_id = {replica.replica_id.unique_id: replica for replica in replicas}
        self._note_change(len(before))
        self._report_gone(sorted(before - set(self._by_unique_id)))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call or a probe found the replica dead."""
        super().on_replica_actor_died(replica_id)
        if self._by_unique_id.pop(replica_id.unique_id, None) is not None:
            self._note_change(len(self._by_unique_id) + 1)
            self._report_gone([replica_id.unique_id])

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Over gRPC a dead replica looks the same: probe by Ray, which tells."""
        super().on_replica_actor_unavailable(replica_id)
        replica = self._by_unique_id.get(replica_id.unique_id)
        if replica is not None and replica_id.unique_id not in self._probed:
            self._probed.add(replica_id.unique_id)
            self._start(self._probe(replica))

    def _hinted(self, hint: Hint) -> RunningReplica | None:
        target = hint.target
        hinted = None if target is None else self._by_unique_id.get(replica_of(target))
        excluded = self._excluded(hint)
        if hinted is not None or not (hint.avoid or excluded):
            return hinted
        others = self._least_loaded_but((*hint.avoid, *excluded))
        if others is not None or self._other_pools:
            return others
        # A replica that has just failed the request is better than one that may get no requests.
        return self._least_loaded_but(excluded) if excluded else None

    def _excluded(self, hint: Hint) -> tuple[str, ...]:
        """Replicas for targets only: closed ones, and quarantined ones if there are others."""
        both = (*hint.closed, *hint.quarantined)
        if hint.quarantined and self._least_loaded_but(both) is None:
            return hint.closed
        return both

    def _least_loaded_but(self, avoid: Sequence[str]) -> RunningReplica | None:
        """By this process's own count. ``O(replicas)``, on retries and while any is closed."""
        rest = [replica for name, replica in self._by_unique_id.items() if name not in avoid]
        cache = self.replica_queue_len_cache
        return min(rest, key=lambda replica: cache.get(replica.replica_id) or 0, default=None)

    async def _wait_for_replica(self) -> None:
        """Return when there is a replica. Raises NoReplicaError: none for too long."""
        since_s = self._none_since_s
        if self._scales_to_zero:
            since_s = asyncio.get_running_loop().time()
        try:
            while not self._by_unique_id:
                async with asyncio.timeout_at(since_s + self._no_replica_wait_s):
                    await self._changed.wait()
        except TimeoutError:
            raise NoReplicaError(
                f"There has been no replica for {self._no_replica_wait_s:g} seconds."
            ) from None

    async def _while_there_are_replicas(
        self, choice: Coroutine[Any, Any, RunningReplica]
    ) -> RunningReplica:
        """Serve's choice, bounded: it blocks after the last replica died. Raises NoReplicaError."""
        chosen = asyncio.ensure_future(choice)
        given_up = asyncio.ensure_future(self._until_none_appears())
        try:
            await asyncio.wait((chosen, given_up), return_when=asyncio.FIRST_COMPLETED)
            if not chosen.done():
                given_up.result()
            return await chosen
        finally:
            chosen.cancel()
            given_up.cancel()

    async def _until_none_appears(self) -> None:
        """Raises NoReplicaError once there has been no replica for too long."""
        while True:
            await self._wait_for_replica()
            await self._changed.wait()

    def _note_change(self, before: int) -> None:
        """Wake the tasks that wait for a change of replicas. ``before``: their former number."""
        # Through its module, as CHOSEN above.
        running.RUNNING.note(self._deployment_id, self._by_unique_id)
        if before and not self._by_unique_id:
            self._none_since_s = asyncio.get_running_loop().time()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _probe(self, replica: RunningReplica) -> None:
        try:
            await self._probe_queue_lens([replica], 0)
        finally:
            self._probed.discard(replica.replica_id.unique_id)

    async def _tell_gone(self, unique_ids: Sequence[str]) -> None:
        (await asyncio.shield(self._client)).replica_gone(unique_ids)

    def _report_gone(self, unique_ids: Sequence[str]) -> None:
        if unique_ids:
            self._start(self._tell_gone(unique_ids))

    def _start(self, work: Any) -> None:
        """Run ``work`` in the background; a failure is only logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.warning("a task of the request router failed", exc_info=task.exception())


def _hint_of(pending_request: PendingRequest | None) -> Hint:
    if pending_request is None:
        return Hint()
    return Hint.parse(pending_request.kwargs.get(wire.TARGET_KWARG))
