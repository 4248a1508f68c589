"""Requests and running streams that move to another replica, and KV that follows them.

Streams move with their KV from replicas that leave, or if a promised TPOT would be missed: the
reader stops, the replica gives a handle of the KV up to the last token that the client has, and
another replica resumes the stream with it. Without a handle that one computes prompt and tokens.
A turn of a session that is placed elsewhere than its prefix gets a handle of that as well."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from msgspec import structs

from sluice.controller.client import ControllerClient
from sluice.protocol.messages import MAX_WAITS, FirstTokenWait
from sluice.protocol.requests import EVENT_STREAM, UNABLE, EngineRequest, KVHandle, request_key
from sluice.router.dispatch.attempt import Answer, Attempt, MovedError, OpenAttempts
from sluice.router.dispatch.placement import PlacementClient
from sluice.router.dispatch.retries import may_migrate, prefill_of, rest_of
from sluice.router.metrics.instruments import MoveReason, RouterMetrics
from sluice.router.serve.contract import ReplicaFailedError, Replicas
from sluice.scheduling.fleet.prefix import NO_PREFIX
from sluice.scheduling.placement.migration import RunningStream, streams_to_move
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.request.objective import MIN_TPOT_TOKENS, SLO, TokenClock, TPOTAnchor

# Promised requests that wait for their first tokens. The router asks about them with each push of
# metrics, and the controller answers which of them are going to miss their TTFT at their replica
# (:mod:`sluice.controller.state.mirror`). The client of such a request has received nothing: it
# moves, at most once, if another replica promises what is left of its SLO.


@dataclass(slots=True)
class Moves:
    """Waiting requests of one router process and model. Runs on its event loop."""

    attempts: OpenAttempts
    controller: ControllerClient
    placements: PlacementClient
    clock: Callable[[], float]
    moving: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.controller.on_sync(self.waits, self.missing)

    def waits(self) -> tuple[FirstTokenWait, ...]:
        """Waiting calls not late yet, at most ``MAX_WAITS`` (due soonest). ``O(open attempts)``."""
        now_s, found = self.clock(), []
        for attempt, answer in self.attempts.items():
            ttft_s, waited_s = answer.call.slo.columns[0], now_s - answer.call.received_s
            if waited_s < ttft_s and self._may_move(attempt, answer):
                chosen = attempt.decision.replica_id or ""
                found.append(FirstTokenWait(attempt.key, chosen, ttft_s, waited_s))
        return tuple(
            heapq.nsmallest(MAX_WAITS, found, key=lambda wait: wait.ttft_s - wait.waited_s)
        )

    def missing(self, keys: Sequence[int]) -> None:
        """Move these calls, which are going to miss their TTFT, if they still wait."""
        wanted = set(keys)
        for attempt, answer in self.attempts.items():
            if attempt.key in wanted and self._may_move(attempt, answer):
                move = asyncio.create_task(self._move(attempt, answer), name="move")
                self.moving[attempt.key] = move

    def _may_move(self, attempt: Attempt, answer: Answer) -> bool:
        """Whether an attempt may be abandoned for one at an earlier replica: once per call, and not
        for a phase of a P/D pair or a suspect of lost replicas."""
        request = attempt.request
        whole = not request.prefill_only and request.kv_handle is None and request.resume is None
        waits = not attempt.opened and attempt.key not in self.moving
        stated = answer.call.slo.ttft_s is not None
        excluded = answer.moved or answer.suspicion.suspected
        return request.promised and stated and whole and waits and not excluded

    async def _move(self, attempt: Attempt, answer: Answer) -> None:
        """Abandon an attempt if another replica promises the rest, and nothing came meanwhile."""
        key, chosen = request_key(answer.moved_id), attempt.decision.replica_id or ""
        try:
            found = await self.placements.elsewhere(answer.call, key, answer.failed, chosen)
            if found is None:
                return
            if attempt.opened or not attempt.abandon(MovedError()):
                self.controller.release(key)
                return
            answer.moved, answer.moves_to = True, found
            answer.uncounted += 1
        finally:
            del self.moving[attempt.key]


KV_TIMEOUT_S: Final = 2.0
"""Longest wait for a KV handle, seconds; then the other replica computes the KV."""

MIN_KV_WAIT_S: Final = 0.25
"""How much longer than predicted a handle of cached KV may take, seconds."""

MAX_REFUSALS: Final = 16
"""Most refused streams of a replica between two syncs; its others wait for the next one."""

_UNTRACED: Mapping[str, str] = {}


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream that may move, and its recent TPOT. ``stays``: no other replica took it when the
    controller was last asked."""

    attempt: Attempt
    answer: Answer
    place: str
    stays: bool = False
    token_s: float = 0.0
    tokens: int = 0
    at_s: float = 0.0

    @property
    def may_move(self) -> bool:
        """Whether it can be stopped now, and resumed without loss."""
        attempt, answer = self.attempt, self.answer
        current = bool(answer.opened) and answer.opened[-1] is attempt
        known = answer.transcript is not None and answer.transcript.resumable
        through_here = not answer.fetched
        unended = attempt.tail is None and attempt.waits and not answer.spent
        return current and known and through_here and unended and answer.clock.tokens > 0

    def measure(self) -> None:
        """Take its TPOT since the last call, if enough tokens came."""
        clock = self.answer.clock
        new, last_s = clock.tokens - self.tokens, clock.last_token_s
        if last_s is None or (self.tokens and new < MIN_TPOT_TOKENS):
            return
        if self.tokens:
            self.token_s = (last_s - self.at_s) / new
        self.tokens, self.at_s = clock.tokens, last_s

    def seen(self, now_s: float) -> RunningStream:
        """What the policy looks at."""
        answer, clock = self.answer, self.answer.clock
        slo, most = clock.slo, answer.call.output_tokens
        tpot_s = slack_s = e2e_left_s = inf
        # The stages of a request have an objective each, and their next one is not predicted.
        promised = self.attempt.decision.tier is Tier.GUARANTEED
        if promised and not slo.stages and clock.first_token_s is not None:
            _, tpot_s, e2e_s, _ = slo.columns
            if tpot_s < inf:
                slack_s = clock.first_token_s + clock.tokens * tpot_s - now_s
            e2e_left_s = clock.arrival_s + e2e_s - now_s
        return RunningStream(
            left_tokens=max(1, most - clock.tokens) if most else inf,
            token_s=self.token_s or clock.mean_tpot_s or 0.0,
            tpot_s=tpot_s,
            slack_s=slack_s,
            e2e_left_s=e2e_left_s,
            recovers=slo.tpot_anchor is TPOTAnchor.MEAN,
            moves=len(answer.left),
            moved_s=answer.left_s,
        )


@dataclass(slots=True)
class Migrations:
    """The streams of one router process and model that may move. Runs on its event loop.
    ``moving``: those being asked about or moved, until their next attempt has begun or failed."""

    attempts: OpenAttempts
    controller: ControllerClient
    placements: PlacementClient
    replicas: Replicas
    metrics: RouterMetrics
    clock: Callable[[], float]
    streams: dict[Attempt, _Stream | None] = field(default_factory=dict)
    leaving_ids: frozenset[str] = frozenset()
    refusals: Counter[str] = field(default_factory=Counter)
    moving: dict[Attempt, _Stream] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.controller.on_leaving(self.leaving)

    def settled(self, attempt: Attempt) -> None:
        """The stream of ``attempt`` has left its replica, or stays: the next one may move."""
        if attempt not in self.attempts:
            self.streams.pop(attempt, None)
        stream = self.moving.pop(attempt, None)
        if stream is not None:
            self._move_some(stream.place)

    def leaving(self, replica_ids: Sequence[str]) -> None:
        """These replicas leave. Called with each answer to a push. ``O(open attempts)``."""
        self.leaving_ids = frozenset(replica_ids)
        self.refusals.clear()
        known = self.streams.items()
        self.streams = {attempt: each for attempt, each in known if attempt in self.attempts}
        streams = [self._stream(*each) for each in self.attempts.items()]
        for stream in filter(None, streams):
            stream.stays = False
            stream.measure()
        for place in dict.fromkeys(stream.place for stream in streams if stream is not None):
            self._move_some(place)

    def _stream(self, attempt: Attempt, answer: Answer) -> _Stream | None:
        """An open attempt as a stream that may move; ``None`` if it is none."""
        head = attempt.head
        streams = attempt.opened and head.status == 200 and head.media_type == EVENT_STREAM
        if not streams or attempt.place is None or answer.suspicion.suspected:
            return None
        if attempt not in self.streams:
            able = may_migrate(answer.call)
            self.streams[attempt] = _Stream(attempt, answer, attempt.place) if able else None
        return self.streams[attempt]

    def _move_some(self, place: str) -> None:
        """Ask for another replica for the streams at ``place`` that the policy chooses."""
        if self.refusals[place] >= MAX_REFUSALS:
            return
        now_s = self.clock()
        here = [self._stream(*each) for each in self.attempts.items() if each[0].place == place]
        able = [
            stream
            for stream in filter(None, here)
            if stream.attempt not in self.moving and not stream.stays and stream.may_move
        ]
        under_way = sum(stream.place == place for stream in self.moving.values())
        leaves = place in self.leaving_ids
        seen = [stream.seen(now_s) for stream in able]
        for index in streams_to_move(seen, under_way, now_s, leaves):
            stream = able[index]
            self.moving[stream.attempt] = stream
            task = asyncio.create_task(self._move(stream, seen[index], leaves), name="migrate")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _move(self, stream: _Stream, seen: RunningStream, leaves: bool) -> None:
        """Have a stream's reader stop, if another replica takes the stream."""
        attempt, answer = stream.attempt, stream.answer
        key, moves = request_key(answer.moved_id), False
        try:
            found = await self._elsewhere(stream, seen, key)
            if found is None:
                return
            pays = seen.pays(found.kv_transfer_s)
            if pays and stream.may_move and attempt.abandon(MovedError()):
                moves = True
                answer.moves_to = found
                answer.move_reason = MoveReason.LEAVING if leaves else MoveReason.LATE
            else:
                self.controller.release(key)
        finally:
            if not moves:
                stream.stays = True
                self.refusals[stream.place] += 1
                self.settled(attempt)

    async def _elsewhere(
        self, stream: _Stream, seen: RunningStream, key: int
    ) -> RouteDecision | None:
        """Another replica for a stream, under this key."""
        answer, clock = stream.answer, stream.answer.clock
        call = rest_of(answer.call, clock.tokens, _rest(clock, self.clock(), seen))
        tier = stream.attempt.decision.tier
        tiers = frozenset(Tier) if tier is None else frozenset({tier})
        avoid = (*answer.failed, *answer.left)
        return await self.placements.with_kv(call, key, avoid, stream.place, tiers)

    def left(self, answer: Answer, source: Attempt) -> None:
        """The stream of ``source`` has been stopped to move."""
        answer.left.append(source.place or "")
        answer.left_s = self.clock()
        answer.uncounted += 1
        # The stream would have continued without the move, so a failure of it does not count.
        answer.granted = True

    def arrived(self, answer: Answer, attempt: Attempt) -> None:
        """``attempt`` continues a stream that has moved."""
        answer.granted = False
        if answer.move_reason is not None:
            transferred = attempt.request.kv_handle is not None and attempt.prefill is None
            last_s = answer.clock.last_token_s or answer.left_s
            self.metrics.migrated(answer.move_reason, transferred, self.clock() - last_s)

    async def with_kv_of(self, source: Attempt, request: EngineRequest) -> EngineRequest:
        """A request that resumes the stream of ``source``, with the KV if that can be had."""
        asked = replace(
            prefill_of(request, 0.0, _UNTRACED), kv_of_request=source.request.request_id
        )
        return await self._with_kv(request, asked, source.place or "", KV_TIMEOUT_S)

    async def with_cached_kv(
        self, decision: RouteDecision, request: EngineRequest
    ) -> EngineRequest:
        """A request with what ``decision.kv_from`` has cached of its prompt, if that can be had
        about as soon as predicted. It is one step's work there, and is done at once."""
        wait_s = min(KV_TIMEOUT_S, MIN_KV_WAIT_S + decision.kv_transfer_s)
        asked = replace(
            prefill_of(request, 0.0, _UNTRACED),
            cached_only=True,
            slo=SLO(ttft_s=request.waited_s + wait_s),
            best_effort=False,
            promised=False,
            prefix=NO_PREFIX,
            turn=None,
        )
        found = await self._with_kv(request, asked, decision.kv_from or "", wait_s)
        if found.kv_handle is not None:
            self.placements.fetched(found.kv_handle.prompt_tokens, decision.kv_tokens)
        return found

    async def _with_kv(
        self, request: EngineRequest, asked: EngineRequest, place: str, wait_s: float
    ) -> EngineRequest:
        """``request`` with the handle that ``asked`` gets at ``place`` within ``wait_s``."""
        started_s = self.clock()
        try:
            kv_handle = await self._handle(asked, place, wait_s)
        except BaseException:
            self.controller.release(request_key(request.request_id))
            raise
        waited_s = request.waited_s + self.clock() - started_s
        return replace(request, kv_handle=kv_handle, waited_s=waited_s)

    async def _handle(self, asked: EngineRequest, place: str, wait_s: float) -> KVHandle | None:
        """The handle of a replica's KV. ``None``: it must be computed."""
        stream = self.replicas.transfer_kv(asked, place)
        if stream is None:
            return None
        decision = RouteDecision(place, "migration")
        attempt = Attempt(asked, decision, decision.role, stream, clock=self.clock)
        try:
            async with asyncio.timeout(wait_s):
                await attempt.begin()
        except (ReplicaFailedError, TimeoutError):
            return None
        finally:
            if attempt.tail is None:
                stream.cancel()
        if asked.cached_only and attempt.head.status == UNABLE:
            self.placements.fetches_kv = 0.0
        return attempt.tail.kv_handle if attempt.tail is not None else None


def _rest(clock: TokenClock, now_s: float, seen: RunningStream) -> SLO:
    """The objective of the rest: the stream's while it can be kept, then
    :meth:`TokenClock.rest`."""
    slo, terms = clock.rest(clock.tokens, now_s), seen.terms
    if terms is None:
        return slo
    ttft_s = now_s - clock.arrival_s + terms.pause_s
    return structs.replace(
        slo, ttft_s=ttft_s, tpot_s=terms.tpot_s if terms.tpot_s < inf else slo.tpot_s
    )
