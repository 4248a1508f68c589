"""One line of a batch through the same checks and the same dispatcher as a live request."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from sluice.protocol.requests import Endpoint, RequestBody
from sluice.router.batches.lines import BatchRequest
from sluice.router.batches.metrics import BatchMetrics
from sluice.router.batches.results import Reply
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.attempt import Answer
from sluice.router.dispatch.models import Model, ModelRegistry
from sluice.router.dispatch.response import with_tier
from sluice.router.errors import ApiError, Reason, invalid
from sluice.router.metrics.instruments import Outcome
from sluice.router.request.arrival import INFERENCE_PATHS, Arrival, noted
from sluice.router.request.call import MAX_INLINE_BYTES, Call, CallReader
from sluice.router.request.prompt import output_to_expect
from sluice.router.request.session import FIELD as LOOP_FIELD
from sluice.router.tenancy.limits import Client
from sluice.router.tenancy.rate_limits import RateLimiter
from sluice.scheduling.request.objective import TokenClock
from sluice.scheduling.request.stage_clock import clock_of
from sluice.telemetry.logs import of_request

FIRST_PAUSE_S = 0.5
"""Approximate pause before a line without capacity is retried, seconds; doubled each time."""

FAILED_PAUSE_S = 5.0
"""The same for a line that failed, seconds. Its attempts span the time in which dead replicas are
replaced; otherwise the death of the only replica would fail all lines in flight."""

SHORTEST_PAUSE_S = 0.01
"""Minimum pause of a line that its client's rate limit does not admit yet, seconds."""

LONGEST_PAUSE_S = 30.0
"""Approximate maximum of these pauses, seconds. A line that waits for capacity keeps its slot, so
that such lines keep others from being sent."""

_NO_ROOM = frozenset(
    {Reason.ROUTER_FULL, Reason.REPLICAS_FULL, Reason.NO_REPLICA, Reason.MODEL_STARTING}
)
_TOO_MANY = 429

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Admitted(NamedTuple):
    """A checked line within its client's rate limits. It must be run or dropped."""

    line: BatchRequest
    call: Call
    fleet: Model
    client: Callable[[], Client]

    def drop(self) -> None:
        """The line will not be run, or has ended: return its unused reserved tokens."""
        self.call.charge.close()


class LineCaller:
    """Runs lines as best-effort calls. One per router process.

    Args:
        pause: sleeps for the given number of seconds.
        telemetry: logs and traces the lines, as requests.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleets: ModelRegistry,
        limiter: RateLimiter,
        batch_metrics: BatchMetrics,
        pause: Callable[[float], Any] = asyncio.sleep,
        telemetry: Telemetry | None = None,
    ) -> None:
        # The same rules as for live calls, except for the default class.
        default = {"default_class": config.batches.service_class}
        self._reader = CallReader(config.model_copy(update=default))
        self._max_attempts = config.batches.max_line_attempts
        self._fleets = fleets
        self._limiter = limiter
        self._batch_metrics = batch_metrics
        self._pause = pause
        self._telemetry = telemetry or Telemetry()

    async def admit(
        self, line: BatchRequest, url: str, client: Callable[[], Client]
    ) -> Admitted | Reply:
        """Wait until the rate limits of its client admit ``line``, and check it. It counts towards
        them once, however often it is attempted.

        Args:
            client: returns the line's client, whose limits may change meanwhile.

        Returns:
            The argument of :meth:`run`, or the reply to a line that is refused.
        """
        await self._when_let_in(lambda: self._limiter.count_request(client()))
        arrival = self._arrival(client(), line)
        try:
            with of_request(arrival.request_id):
                call, fleet = await self._call(line, INFERENCE_PATHS[url], arrival)
            prompt_tokens = fleet.dispatcher.estimator.estimate(call.prompt)
            expected = output_to_expect(call.endpoint, call.output_tokens)
        except Exception as error:
            return _failed(error, arrival, INFERENCE_PATHS[url])
        charge = await self._when_let_in(
            lambda: self._limiter.reserve(client(), prompt_tokens, expected)
        )
        return Admitted(line, replace(call, charge=charge), fleet, client)

    async def _when_let_in(self, ask: Callable[[], _T]) -> _T:
        while True:
            try:
                return ask()
            except ApiError as refusal:
                self._batch_metrics.waits.inc()
                wait_s = max(SHORTEST_PAUSE_S, refusal.retry_after_s or 0.0)
                await self._pause(min(wait_s, LONGEST_PAUSE_S))

    async def run(self, admitted: Admitted) -> Reply:
        """The reply to a line, which may be an error. Waits while there is no capacity for it."""
        try:
            return await self._run(admitted)
        finally:
            admitted.drop()

    async def _run(self, admitted: Admitted) -> Reply:
        failures = waits = 0
        while True:
            arrival = self._arrival(admitted.client(), admitted.line)
            with of_request(arrival.request_id):
                reply = await self._attempt(admitted, arrival)
            if reply.final or (reply.status < 500 and not reply.no_room):
                return reply
            if reply.no_room:
                self._batch_metrics.waits.inc()
                waits += 1
                await self._pause(_pause_s(FIRST_PAUSE_S, waits))
                continue
            failures += 1
            if failures == self._max_attempts:
                return reply
            await self._pause(_pause_s(FAILED_PAUSE_S, failures))

    def _arrival(self, client: Client, line: BatchRequest) -> Arrival:
        theirs = noted(line.custom_id)
        return Arrival(uuid.uuid4().hex, self._fleets.clock(), client, client_request_id=theirs)

    async def _attempt(self, admitted: Admitted, arrival: Arrival) -> Reply:
        call, fleet = admitted.call, admitted.fleet
        try:
            if call.client == arrival.client:
                call = replace(call, request_id=arrival.request_id, received_s=arrival.received_s)
            else:  # its limits have changed
                charge = call.charge
                call, fleet = await self._call(admitted.line, call.endpoint, arrival)
                call = replace(call, charge=charge)
            span = self._telemetry.begin(arrival, call.endpoint, ())
            return await self._serve(replace(call, span=span), fleet)
        except Exception as error:
            return _failed(error, arrival, admitted.call.endpoint)

    def _check(self, line: BatchRequest, endpoint: Endpoint, arrival: Arrival) -> Call:
        return self._reader.make(RequestBody.of(line.body), (), endpoint, arrival)

    async def _call(
        self, line: BatchRequest, endpoint: Endpoint, arrival: Arrival
    ) -> tuple[Call, Model]:
        """The checked call, and the model that serves it.

        Raises:
            ApiError: a 4xx.
        """
        try:
            if line.body.get("stream"):
                raise invalid(
                    "stream must be false or left out: a batch keeps whole answers", "stream"
                )
            if line.size <= MAX_INLINE_BYTES:
                call = self._check(line, endpoint, arrival)
            else:
                call = await asyncio.to_thread(self._check, line, endpoint, arrival)
            if call.loop is not None:
                raise invalid(f"{LOOP_FIELD} has no meaning in a batch", LOOP_FIELD)
            fleet = await self._fleets.find(call.model, call.client.caps.models, endpoint)
        except ApiError as error:
            self._fleets.edge.refused(endpoint, error.reason, arrival.client)
            self._telemetry.refused(arrival, endpoint, error.reason)
            raise
        return replace(call, best_effort=True), fleet

    async def _serve(self, call: Call, fleet: Model) -> Reply:
        """The reply of a replica. It counts as an ended request, unless there was no capacity.

        Raises:
            ApiError: there is no reply.
        """
        clock = clock_of(call.slo, call.received_s)
        outcome: Outcome | None = Outcome.FAILED
        answer: Answer | None = None
        reason: Reason | None = None
        try:
            answer = await fleet.dispatcher.open(call)
            # A plain response is complete once it is open.
            pieces = fleet.dispatcher.pieces(answer)
            body = b"".join([piece.data async for piece in pieces])
            status = answer.head.status
            no_room = status == _TOO_MANY
            outcome = None if no_room else Outcome.of_status(status)
            if status < 500 and not no_room:
                call.charge.close(answer.head, answer.tail)
            if status < 400:
                _time(answer, call, clock)
                if clock.ttft_s is not None:
                    fleet.metrics.first_token(call.slo.service_class, clock.ttft_s)
                body = with_tier(body, call.endpoint, call.service_tier, streams=False)
            return Reply(status, call.request_id, body, no_room, call.clamped)
        except ApiError as error:
            outcome = None if _is_no_room(error) else Outcome.of_status(error.rule.status)
            reason = error.reason
            raise
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            call.charge.close(left=True)
            raise
        finally:
            if answer is not None:
                fleet.dispatcher.close(answer)
            now_s = self._fleets.clock()
            fleet.dispatcher.endings.ended(call, clock, outcome or Outcome.REFUSED, reason, now_s)
            if outcome is None:
                self._telemetry.put_off(call, reason)
            else:
                self._telemetry.ended(call, clock, outcome, reason, answer, now_s)
                fleet.metrics.ended(call.endpoint, clock, outcome, now_s, call.client)
                if answer is None:
                    fleet.metrics.usage.ended(call, clock, outcome.error, now_s)
                else:
                    used = (answer.tail, answer.cached_tokens, answer.queued_s)
                    fleet.metrics.usage.ended(call, clock, outcome.error, now_s, *used)
                fleet.metrics.admission.clamped(call.client.name, call.clamped)


def _time(answer: Answer, call: Call, clock: TokenClock) -> None:
    if answer.tail is None:
        return
    reached_s = call.received_s + answer.waited_s
    for place, offset_s in enumerate(answer.tail.token_offsets_s, 1):
        clock.emit(1, reached_s + offset_s, int(place == answer.tail.reasoned))


def _failed(error: Exception, arrival: Arrival, endpoint: Endpoint) -> Reply:
    if not isinstance(error, ApiError):
        _log.error("unexpected failure of a batch line", exc_info=error)
        error = ApiError(Reason.INTERNAL, "The router failed; see its log for the cause.")
    body = json.dumps(error.document(endpoint)).encode()
    final = error.reason is Reason.REQUEST_SUSPECTED
    return Reply(error.rule.status, arrival.request_id, body, _is_no_room(error), final=final)


def _is_no_room(error: ApiError) -> bool:
    return error.reason in _NO_ROOM or error.rule.status == _TOO_MANY


def _pause_s(first_s: float, times: int) -> float:
    """Doubled each time, with jitter, so that lines that failed together do not retry together."""
    longest_s = min(LONGEST_PAUSE_S, first_s * 2.0 ** min(times - 1, 16))
    return longest_s * random.uniform(0.5, 1.0)
