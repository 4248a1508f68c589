"""One call as an ASGI response: from dispatch to the last byte, or until the client leaves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Sequence
from math import inf
from types import TracebackType
from typing import Final

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sluice.protocol.requests import EVENT_STREAM, Endpoint
from sluice.router import wire
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.attempt import NOTHING, Answer, Piece
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import Outcome, RouterMetrics
from sluice.router.request.call import Call
from sluice.router.serve.contract import ReplicaFailedError, StalledReaderError
from sluice.router.wire import STOP_MESSAGE
from sluice.scheduling.request.job import Tier
from sluice.scheduling.request.objective import clock_of

# Watches the client of a response: it may leave, or stop reading.

_RESOLUTION_S: Final = 1e-3


class DisconnectGuard:
    """Cancels the block inside it when the client leaves or the router stops, and then ends it
    without an exception.

    An ASGI server does not cancel a handler whose client left. The guard covers every phase,
    including the wait for the first token. ``receive`` must belong to a request whose body was
    read.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.disconnected = False
        self.stopped = False
        """The router stops, and its server has given up waiting for this answer."""

    async def __aenter__(self) -> DisconnectGuard:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watch = asyncio.create_task(self._wait())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._watch.cancel()
        if not (self.disconnected or self.stopped):
            return False
        ours_alone = self._task.uncancel() <= self._cancelling
        return ours_alone and kind is asyncio.CancelledError

    async def _wait(self) -> None:
        while (kind := (await self._receive())["type"]) not in ("http.disconnect", STOP_MESSAGE):
            pass
        self.stopped = kind == STOP_MESSAGE
        self.disconnected = not self.stopped
        self._task.cancel()


class TimeoutSend:
    """Forwards the messages of one response within the block, and drops a client that reads
    nothing.

    The server blocks the sending task once its buffers are full. One timer watches the whole
    response: a timer per message would cost more than the sending.

    Args:
        send: of the server.
        limit_s: longest wait for the client to accept a message, seconds.
    """

    def __init__(self, send: Send, limit_s: float) -> None:
        self._send = send
        self._limit_s = limit_s
        self._due_s = inf
        self._gave_up = False

    def __enter__(self) -> TimeoutSend:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    async def __call__(self, message: Message) -> None:
        """Forward a message.

        Raises:
            StalledReaderError: the client does not read it.
        """
        await self.wait(self._send(message))

    async def wait(self, sent: Awaitable[None]) -> None:
        """Wait until something is sent to the client, in whatever way.

        Raises:
            StalledReaderError: the client does not read it.
        """
        self._due_s = self._loop.time() + self._limit_s
        try:
            await sent
        except asyncio.CancelledError:
            # If the task was also cancelled for another reason, it ends as cancelled.
            if self._gave_up and self._task.uncancel() == 0:
                raise StalledReaderError("the client reads nothing") from None
            raise
        finally:
            self._due_s = inf

    def _look(self) -> None:
        """Drop the client, or check again at the next possible deadline."""
        now_s = self._loop.time()
        if self._due_s - now_s < _RESOLUTION_S:
            self._gave_up = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(min(self._due_s, now_s + self._limit_s), self._look)


# OpenAI's ``service_tier`` in answers: if a request names a tier, its answer says which served it.
#
# Only chats and responses have the field. It is inserted into the bytes, because the router does
# not parse answers. Within a JSON string, quotes and line breaks are escaped, so the patterns
# never match inside one.

_EMPTY: Final = b'"service_tier":null'
_PRESET: Final = b'"service_tier":"auto"'
"""What vLLM writes: in a chat's answer, and in each object of a response."""

_CHUNK: Final = re.compile(rb'^data: \{(?="id")', re.MULTILINE)
"""Where a chunk of a chat begins; vLLM's have no such field."""


def with_tier(data: bytes, endpoint: Endpoint, tier: str | None, streams: bool) -> bytes:
    """Whole events of an answer, or a whole answer, with the tier in it. ``O(bytes)``.

    Args:
        tier: a configured tier; ``None``: the request names none.
    """
    if tier is None or not data:
        return data
    field = b'"service_tier":' + json.dumps(tier).encode()
    if endpoint == "responses":
        return data.replace(_PRESET, field)
    if endpoint != "chat":
        return data
    if streams:
        return _CHUNK.sub(lambda found: found[0] + field + b",", data)
    if _EMPTY in data:
        return data.replace(_EMPTY, field, 1)
    return data.replace(b"{", b"{" + field + b",", 1)


_PROMISED_HEADERS = (
    wire.PROMISED_TTFT_HEADER,
    wire.PROMISED_TPOT_HEADER,
    wire.PROMISED_E2E_HEADER,
)


class CallResponse(Response):
    """Serves one call and accounts for it, however it ends.

    Args:
        stalled_reader_s: the client is dropped when it reads nothing for this long, seconds.
        fetches: the client's side can fetch a stream from the replica.
    """

    def __init__(
        self,
        call: Call,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        telemetry: Telemetry,
        stalled_reader_s: float,
        fetches: bool = False,
    ) -> None:
        self._stalled_reader_s = stalled_reader_s
        self._fetches = fetches
        self._call = call
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._telemetry = telemetry
        self._error: ApiError | None = None
        self._clock = clock_of(call.slo, call.received_s)
        self._answer: Answer | None = None
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        outcome = Outcome.FAILED
        try:
            with TimeoutSend(send, self._stalled_reader_s) as patient:
                outcome = await self._serve(scope, receive, patient)
        except StalledReaderError:
            self._metrics.stalled_readers.inc()
            outcome = Outcome.CANCELLED
        # A server raises OSError when the client has left.
        except OSError:
            outcome = Outcome.CANCELLED
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            raise
        finally:
            if self._answer is not None:
                self._dispatcher.close(self._answer)
            self._count(outcome)

    async def _serve(self, scope: Scope, receive: Receive, send: TimeoutSend) -> Outcome:
        # The guard ends before the last message: a server reports the end of a complete response
        # as a disconnect too.
        guard = DisconnectGuard(receive)
        error: ApiError | None = None
        async with guard:
            try:
                self._answer = await self._dispatcher.open(self._call, self._fetches, self._clock)
            except ApiError as failure:
                error = failure
            else:
                if self._answer.head.media_type == EVENT_STREAM:
                    error = await self._stream(self._answer, send)
        if guard.disconnected:
            return Outcome.CANCELLED
        if guard.stopped:
            error = ApiError(Reason.ROUTER_STOPPING, "The router stopped before the answer ended.")
        self._error = error
        if self._answer is None:
            assert error is not None
            self._metrics.admission.refused(error.reason, self._call.slo.service_class)
            await error.response(self._call.endpoint, self._own_headers())(scope, receive, send)
            return Outcome.of_status(error.rule.status)
        if self._answer.head.media_type == EVENT_STREAM:
            last = error.event(self._call.endpoint) if error is not None else b""
            await send({"type": "http.response.body", "body": last, "more_body": False})
            self._learn(self._answer)
            return Outcome.OK if error is None else Outcome.FAILED
        return await self._whole(self._answer, scope, receive, send)

    async def _stream(self, answer: Answer, send: TimeoutSend) -> ApiError | None:
        """Forward the pieces of an event stream. Returns the error that broke it, if one did."""
        headers = self._own_headers() | {
            "content-type": f"{EVENT_STREAM}; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        if answer.head.fetch:
            headers[wire.STREAM_HEADER] = answer.head.fetch
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": answer.head.status, "headers": raw})
        observe_gap = self._metrics.usage.gap(self._call.slo.service_class)
        tier = (self._call.endpoint, self._call.service_tier)
        try:
            async for piece in self._dispatcher.pieces(answer):
                reasoned = piece.reasoned
                for tokens, at_s in piece.sent or self._parts(piece):
                    gap_s = self._emit(tokens, at_s, reasoned)
                    reasoned -= tokens
                    if gap_s is not None:
                        observe_gap(gap_s)
                if piece.sent:
                    continue
                data = with_tier(piece.data, *tier, streams=True)
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ReplicaFailedError as failure:
            self._emit(NOTHING.tokens)
            reason = Reason.STREAM_BROKEN
            if failure.reason is Reason.REQUEST_SUSPECTED:
                reason = failure.reason
            return ApiError(reason, f"The stream broke off after it had begun: {failure}")
        return None

    async def _whole(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> Outcome:
        """Send a complete response."""
        body = b"".join([piece.data async for piece in self._dispatcher.pieces(answer)])
        tail = answer.tail
        if tail is not None and answer.head.status < 400:
            reached_s = self._call.received_s + answer.waited_s
            for place, offset_s in enumerate(tail.token_offsets_s, 1):
                self._emit(1, reached_s + offset_s, int(place == tail.reasoned))
        if answer.head.status < 400:
            body = with_tier(body, self._call.endpoint, self._call.service_tier, streams=False)
        response = Response(
            body,
            answer.head.status,
            headers=self._own_headers(),
            media_type=answer.head.media_type,
        )
        await response(scope, receive, send)
        self._learn(answer)
        return Outcome.of_status(answer.head.status)

    def _emit(self, tokens: int, now_s: float | None = None, reasoned: int = 0) -> float | None:
        """Count tokens, see :meth:`TokenClock.emit`. Returns the seconds since the last ones, if
        there were any."""
        clock, last_s = self._clock, self._clock.last_token_s
        at_s = self._dispatcher.clock() if now_s is None else max(now_s, last_s or now_s)
        told = clock.tokens.bit_length()
        clock.emit(tokens, at_s, reasoned)
        # At the first token, and then each time that the count has doubled.
        doubled = clock.tokens.bit_length() > told
        if doubled and self._answer is not None and self._answer.promised:
            self._dispatcher.endings.progressed(self._call, clock)
        if last_s is None and clock.ttft_s is not None:
            self._metrics.first_token(self._call.slo.service_class, clock.ttft_s)
        return at_s - last_s if tokens and last_s is not None else None

    def _parts(self, piece: Piece) -> Sequence[tuple[int, float | None]]:
        """The tokens in ``piece`` by when they leave; ``None``: now. What waited for the last of
        them left when the engine made it: a stage may end with a token that has no text, and the
        next one begin with the text after it."""
        tokens = piece.tokens
        if len(piece.made) < 2 or tokens != piece.tokens:
            return ((tokens, None),)
        return (*piece.made[:-1], (piece.made[-1][0], None))

    def _learn(self, answer: Answer) -> None:
        if answer.tail is not None and answer.tail.prompt_tokens > 0:
            self._dispatcher.estimator.learn(self._call.prompt, answer.tail.prompt_tokens)

    def _count(self, outcome: Outcome) -> None:
        call, metrics, answer = self._call, self._metrics, self._answer
        now_s = self._dispatcher.clock()
        metrics.ended(call.endpoint, self._clock, outcome, now_s, call.client)
        head = tail = None
        if answer is None:
            metrics.usage.ended(call, self._clock, outcome.error, now_s)
        else:
            head, tail = answer.head, answer.tail
            used = (tail, answer.cached_tokens, answer.queued_s)
            metrics.usage.ended(call, self._clock, outcome.error, now_s, *used)
        reason = self._error.reason if self._error is not None else None
        self._telemetry.ended(call, self._clock, outcome, reason, answer, now_s)
        metrics.admission.clamped(call.client.name, call.clamped)
        streams = bool(call.body.get("stream"))
        sent = self._clock.tokens * (call.body.get("n") or 1) if streams else None
        call.charge.close(head, tail, sent, left=outcome is Outcome.CANCELLED)
        kept = None
        if answer is not None and answer.promised and outcome is not Outcome.CLIENT_ERROR:
            failed = outcome not in (Outcome.OK, Outcome.CANCELLED)
            predicted_s = answer.decision.predicted_ttft_s
            kept = metrics.admission.ended(self._clock, predicted_s, failed, now_s, answer.moved)
        replica_id = "" if answer is None else answer.head.replica_id
        self._dispatcher.endings.ended(call, self._clock, outcome, reason, now_s, replica_id, kept)

    def _own_headers(self) -> dict[str, str]:
        call, answer = self._call, self._answer
        headers = {wire.CLASS_HEADER: call.slo.service_class} if call.scheduled else {}
        if call.clamped:
            changes = [f"{field}={value}" for field, value in call.clamped.items()]
            headers[wire.CLAMPED_HEADER] = ", ".join(changes)
        if call.loop is not None:
            left_s = max(0.0, call.loop.due_s - self._dispatcher.clock())
            headers[wire.LOOP_REMAINING_HEADER] = f"{left_s * 1000:.1f}"
        if answer is None:
            return headers
        if answer.head.replica_id:
            headers[wire.REPLICA_HEADER] = answer.head.replica_id
        decision = answer.decision
        if decision.prefill_id is not None:
            headers[wire.PREFILL_REPLICA_HEADER] = decision.prefill_id
        if answer.head.status >= 400:
            return headers  # nothing is promised of a refusal
        if call.scheduled:
            headers[wire.ADMISSION_HEADER] = answer.tier.value
        if decision.predicted_ttft_s is not None:
            headers[wire.PREDICTED_TTFT_HEADER] = f"{decision.predicted_ttft_s * 1000:.1f}"
        if answer.tier is Tier.GUARANTEED:
            ttft_s, tpot_s, _ = call.slo.of_stage(0).times_s
            promised = zip(_PROMISED_HEADERS, (ttft_s, tpot_s, call.slo.e2e_s), strict=True)
            headers |= {name: f"{s * 1000:.1f}" for name, s in promised if s is not None}
            if decision.level is not None:
                headers[wire.PROMISE_LEVEL_HEADER] = f"{decision.level:g}"
        return headers
