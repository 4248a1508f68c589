"""One replica, without Ray: an engine, its reports to the controller, and responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import (
    UNSCHEDULED,
    Endpoint,
    EngineDeadError,
    EngineRequest,
    Progress,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
    request_key,
)
from sluice.replica.config import ReplicaConfig
from sluice.replica.engine import Engine, EngineInfo, table_capacity
from sluice.replica.reporter import Membership, Reporter, ReportTarget
from sluice.replica.streams.direct import DirectPort, sent_directly
from sluice.replica.streams.server import Response
from sluice.scheduling.fleet.state import SUMMARY, EngineState
from sluice.scheduling.latency.model import StepSample
from sluice.scheduling.roles import Role
from sluice.scheduling.tenancy.fair_shares import PLACES_PART, has_room
from sluice.telemetry.logs import of_request
from sluice.telemetry.tracing import Span, Tracer, attribute_of

# Distinguishes a stalled engine from a slow or idle one.
#
# While requests are live it makes no call into the engine: it reads the state that the engine
# writes after each step, and since when requests wait. After the last request has left a stalled
# engine there is no step that would show its recovery, so the watchdog then calls the engine.

# An engine counts as stalled after this many times the predicted time of its last step without a
# new one, and after this many longest steps: a full batch may follow one of a few decodes.
PREDICTED_STEPS, LONGEST_STEPS = 20.0, 3.0

# Of the first steps, in which code may still be compiled, each may take REPLACED_AFTER_S.
FIRST_STEPS = 5

# Time without a step, seconds, and longest steps, after which Serve replaces the replica.
REPLACED_AFTER_S, REPLACED_AFTER_STEPS = 30.0, 20.0

# If the watchdog was not called for this long, its own process was stalled: steps that the engine
# made meanwhile may not be visible yet.
OWN_GAP_S = 2.0


class Watchdog:
    """The watchdog of one engine, for several calls of ``look`` a second while requests are live.
    ``hung_after_s``: min seconds without a step after which it counts as stalled."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        hung_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._hung_after_s = hung_after_s
        self._clock = clock
        self._longest_s = longest_step_s(info)
        self._summary = engine.state().summary
        self._first_step = int(self._summary["steps"])
        self._looked_s = self._not_before_s = clock()
        self._still_since_s: float | None = None
        self._pulse: asyncio.Task[None] | None = None

    def look(self, state: EngineState | None = None) -> bool:
        """Whether the engine is stalled; ``state`` if just read. ``O(live requests)`` where it has
        made no step for ``hung_after_s``."""
        now_s = self._clock()
        if now_s - self._looked_s > OWN_GAP_S:
            self._not_before_s = now_s
        self._looked_s = now_s
        before_s = float(self._summary["updated_s"])
        # If the state cannot be read, its writer is stalled in a write or gone: keep the last one.
        with contextlib.suppress(RuntimeError):
            self._summary = (state or self._engine.state()).summary
        stepped_s = float(self._summary["updated_s"])
        if self._still_since_s is not None:
            if stepped_s > before_s:
                self._recovered("it has made a step")
            elif self._pulse is None and self._engine.waits_since_s() is None:
                self._pulse = asyncio.create_task(self._probe(), name="pulse")
            return self._still_since_s is not None
        since_s = max(stepped_s, self._not_before_s)
        if now_s - since_s <= self._hung_after_s:
            return False
        waits_s = self._engine.waits_since_s()
        if waits_s is not None:
            since_s = max(since_s, waits_s)
            if now_s - since_s > self._patience_s():
                logger.warning("engine stalled: no step for %.1f s", now_s - since_s)
                self._still_since_s = since_s
        return self._still_since_s is not None

    def check(self) -> None:
        """Raises EngineDeadError: stalled for so long that it must be replaced."""
        self.look()
        if self._still_since_s is None:
            return
        still_s = self._clock() - self._still_since_s
        if still_s > max(REPLACED_AFTER_S, REPLACED_AFTER_STEPS * self._longest_s):
            raise EngineDeadError(f"engine hung: no step for {still_s:.0f} s")

    def stop(self) -> None:
        """Stop the pending call, if there is one."""
        if self._pulse is not None:
            self._pulse.cancel()

    def _patience_s(self) -> float:
        """How long the engine may make no step before it counts as stalled."""
        summary = self._summary
        patience_s = max(
            self._hung_after_s,
            PREDICTED_STEPS * float(summary["predicted_step_s"]),
            LONGEST_STEPS
            * self._longest_s
            * max(float(summary["correction"]), float(summary["fixed_correction"])),
        )
        if int(summary["steps"]) - self._first_step < FIRST_STEPS:
            return max(REPLACED_AFTER_S, patience_s)
        return patience_s

    async def _probe(self) -> None:
        try:
            await self._engine.pulse()
            self._not_before_s = self._clock()
            self._recovered("its loop runs")
        except Exception:
            logger.warning("the stalled engine did not answer", exc_info=True)
        finally:
            self._pulse = None

    def _recovered(self, sign: str) -> None:
        logger.warning("engine recovered: %s", sign)
        self._still_since_s = None
        if self._pulse is not None and self._pulse is not asyncio.current_task():
            self._pulse.cancel()


def longest_step_s(info: EngineInfo) -> float:
    """Predicted time of a full batch of the longest requests with all KV in use."""
    tokens = info.max_batch_tokens
    return info.profile.model.step_s(
        StepSample(
            prefill_tokens=tokens,
            prefill_square=tokens**2,
            prefill_cross=tokens * info.max_model_tokens,
            prefill_context=info.max_model_tokens,
            prefills=1,
            decodes=info.max_sequences,
            decode_context=info.kv_blocks * info.block_tokens,
        )
    )


# The spans of one request in a replica: its wait, its prefill and its decode.


class RequestTrace:
    """The child spans of one response: ``queue`` from arrival to first batch, ``prefill`` from
    there to the first token, ``decode`` to the last. Without a first batch only ``decode``."""

    def __init__(self, span: Span, request: EngineRequest, clock: Callable[[], float]) -> None:
        self.request = replace(request, trace=span.context)
        self._span = span
        self._clock = clock
        self._received_s = clock()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._status = 0
        self._tail: ResponseTail | None = None

    @classmethod
    def begin(
        cls, tracer: Tracer, request: EngineRequest, clock: Callable[[], float] = time.monotonic
    ) -> RequestTrace | None:
        """The trace of ``request``, or ``None`` if it is not traced."""
        span = tracer.join("generate", request.trace, clock())
        if span is None:
            return None
        span.set(
            sluice__request_id=request.request_id,
            sluice__endpoint=request.endpoint,
            sluice__class=request.slo.service_class,
            sluice__best_effort=request.best_effort,
        )
        return cls(span, request, clock)

    def saw(self, item: ResponseItem) -> None:
        """An item left the engine."""
        if isinstance(item, ResponseChunk):
            if item.tokens:
                self._last_s = self._clock()
                if self._first_s is None:
                    self._first_s = self._last_s
        elif isinstance(item, ResponseTail):
            self._tail = item
            if item.kv_handle is not None:  # only its prompt was requested
                self._first_s = self._clock()
        elif isinstance(item, ResponseHead):
            self._status = item.status

    def end(self) -> None:
        """The response ended, by itself or early."""
        span, tail = self._span, self._tail
        if tail is None:
            span.set(sluice__ended_early=True)
        else:
            counts = {"prompt_tokens": tail.prompt_tokens, "output_tokens": tail.output_tokens}
            span.set(**{attribute_of(name): count for name, count in counts.items()})
            if tail.token_offsets_s:  # a plain response: its one chunk has no times of tokens
                self._first_s = self._received_s + tail.token_offsets_s[0]
                self._last_s = self._received_s + tail.token_offsets_s[-1]
            if tail.queued_s is not None and self._first_s is not None:
                # Engine and replica share a clock, but the engine reads it a little earlier.
                started_s = min(self._received_s + tail.queued_s, self._first_s)
                self._part("queue", self._received_s, started_s)
                self._part("prefill", started_s, self._first_s)
        if self._first_s is not None and self._last_s is not None:
            self._part("decode", self._first_s, self._last_s)
        if self._status >= 500:
            span.fail(str(self._status))
        span.end()

    def _part(self, name: str, start_s: float, end_s: float) -> None:
        self._span.child(name, start_s=start_s).end(end_s)


logger = logging.getLogger(__name__)


class Replica:
    """Serves requests on one engine, and keeps the controller informed. ``port``: where clients'
    proxies fetch streams; ``None``: all go through routers."""

    def __init__(
        self,
        replica_id: str,
        node_id: str,
        engine: Engine,
        config: ReplicaConfig,
        target: ReportTarget,
        tracer: Tracer | None = None,
        role: Role = "mixed",
        port: DirectPort | None = None,
    ) -> None:
        self.role: Role = role
        self._port = port
        self.replica_id = replica_id
        self._node_id = node_id
        self.engine = engine
        self._config = config
        self._target = target
        self._tracer = tracer
        self._pumps: set[asyncio.Task[None]] = set()
        self._of_tenant: Counter[int] = Counter()
        self._open: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._info: EngineInfo | None = None
        self._reporter: Reporter | None = None
        self._watchdog: Watchdog | None = None

    @property
    def live_requests(self) -> int:
        """API calls in the engine now."""
        return len(self._pumps)

    async def start(self, engine: Awaitable[EngineInfo] | None = None) -> EngineInfo:
        """Start the engine, unless ``engine`` is its start, then the reports. Raises
        EngineDeadError: it could not start."""
        self._info = await (engine or self.engine.start())
        member = Membership(
            self.replica_id,
            self._node_id,
            table_capacity(self._config.max_live_requests),
            self.role,
            self._config.elastic,
        )
        self._watchdog = Watchdog(self.engine, self._info, self._config.hung_after_s)
        self._reporter = Reporter(
            self.engine.state,
            self._info,
            self._target,
            self._config,
            member,
            lambda: self.live_requests,
            self._watchdog.look,
            follow=self._follow,
        )
        self._reporter.start()
        return self._info

    def _follow(self, role: Role) -> None:
        logger.info("role: %s -> %s", self.role, role)
        self.role = role
        self.engine.set_role(role)

    def open(self, request: EngineRequest, wake: Callable[[], None]) -> Response:
        """Begin to serve a request; ``wake``: items are ready. Closing the response, which the
        caller must always do, aborts the request."""
        if not self._has_room(request):
            self._report_finished(request)
            return Response(wake, self._refusal(request.endpoint))
        response = Response(wake)
        with of_request(request.request_id):
            pump = asyncio.create_task(self._pump(request, response))
        self._pumps.add(pump)
        self._of_tenant[request.tenant] += 1
        self._open.add(request.request_id)
        self._idle.clear()
        pump.add_done_callback(partial(self._finish, request, response))
        if self._reporter is not None:
            self._reporter.wake()
        response.close = partial(self._close, request, pump)
        return response

    def _close(self, request: EngineRequest, pump: asyncio.Task[None]) -> None:
        pump.cancel()
        self._open.discard(request.request_id)
        self._check_idle()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[ResponseItem], None]:
        """Serve one request in batches of ready items; closing this aborts it. Raises
        EngineDeadError: the engine died; items yielded before stay valid."""
        ready = asyncio.Event()
        response = self.open(request, ready.set)
        try:
            while True:
                if batch := response.take():
                    yield batch
                elif response.over:
                    break
                else:
                    ready.clear()
                    await ready.wait()
            if response.error is not None:
                raise response.error
        finally:
            response.close()

    def _has_room(self, request: EngineRequest) -> bool:
        free = self._config.max_live_requests - len(self._pumps)
        if not request.best_effort or not request.tenant:
            return free > 0
        # Without this limit the best-effort requests of one tenant could take all slots.
        return has_room(self._of_tenant[request.tenant], free, request.weight, PLACES_PART)

    def _refusal(self, endpoint: Endpoint) -> list[ResponseItem]:
        limit = self._config.max_live_requests
        error = RequestError(
            f"This replica serves at most {limit} requests, and has no free slot for this one. "
            "Try again later.",
            None,
            503,
        )
        return [
            ResponseHead(error.status, "application/json", self.replica_id),
            ResponseChunk(error.body(endpoint)),
            ResponseTail(0, 0),
        ]

    async def _pump(self, request: EngineRequest, response: Response) -> None:
        """Move the engine's items to the response, until the end or a cancellation."""
        trace = RequestTrace.begin(self._tracer, request) if self._tracer is not None else None
        if trace is not None:
            request = trace.request

        def forward(chunk: ResponseChunk) -> bool:
            if trace is not None:
                trace.saw(chunk)
            return response.offer(chunk)

        try:
            if request.direct_patience_s is not None and self._port is not None:
                patience_s = request.direct_patience_s
                items = self.engine.generate(request)
                items = sent_directly(items, self._port, patience_s, response.end)
            else:
                items = self.engine.generate(request, forward)
            async with aclosing(items):  # type: ignore[type-var]
                async for item in items:
                    if isinstance(item, ResponseHead):
                        item = item._replace(replica_id=self.replica_id)
                    if trace is not None:
                        trace.saw(item)
                    await response.put(item)
        finally:
            if trace is not None:
                trace.end()

    def _finish(self, request: EngineRequest, response: Response, pump: asyncio.Task[None]) -> None:
        """Called when a pump has ended, even if it was cancelled before it ran."""
        self._pumps.discard(pump)
        self._of_tenant[request.tenant] -= 1
        if not self._of_tenant[request.tenant]:
            del self._of_tenant[request.tenant]
        response.end(asyncio.CancelledError() if pump.cancelled() else pump.exception())
        self._report_finished(request)
        self._check_idle()

    def _report_finished(self, request: EngineRequest) -> None:
        """End the controller's reservation, also if the request never reached the engine."""
        if self._reporter is not None and request.endpoint not in UNSCHEDULED:
            self._reporter.finished(request_key(request.request_id))

    def _check_idle(self) -> None:
        if not self._pumps and not self._open:
            self._idle.set()

    async def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored."""
        await self.engine.abort(request_id)

    def progress(self, request_ids: Sequence[str]) -> Progress:
        """Whether this replica makes progress, and which of these requests it does not serve."""
        unknown = tuple(name for name in request_ids if name not in self._open)
        return Progress(self.replica_id, self._hangs(), unknown)

    async def check_health(self) -> None:
        """Raises EngineDeadError: its engine is dead, or stalled for too long."""
        await self.engine.check_health()
        if self._watchdog is not None:
            self._watchdog.check()

    def _hangs(self) -> bool:
        return self._watchdog is not None and self._watchdog.look()

    async def drain(self) -> bool:
        """Have the controller send no more requests, and wait for the live ones and their
        consumers; late ones are served. Returns whether all ended within ``drain_timeout_s``."""
        if self._reporter is not None:
            self._reporter.drain()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._idle.wait()
                await self.engine.drain()
        except TimeoutError:
            logger.warning("%d requests were live at the end of the drain", len(self._pumps))
            return False
        return True

    async def stop(self) -> None:
        """Leave the controller and free the engine; live requests end with an error. Idempotent."""
        if self._reporter is not None:
            await self._reporter.stop()
        if self._watchdog is not None:
            self._watchdog.stop()
        await self.engine.stop()

    def snapshot(self) -> dict[str, Any]:
        """The state as plain data. Raises RuntimeError: the engine is gone."""
        state = self.engine.state()
        return {
            "replica_id": self.replica_id,
            "info": asdict(self._info) if self._info is not None else None,
            "live_requests": self.live_requests,
            "hung": self._hangs(),
            "registered": self._reporter is not None and self._reporter.registered,
            "lost_reports": self._reporter.lost if self._reporter is not None else 0,
            "rows": len(state.rows),
            "summary": {name: state.summary[name].tolist() for name in SUMMARY.names or ()},
        }
