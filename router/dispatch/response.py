"""One call as an ASGI response: from dispatch to the last byte, or until the client leaves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from math import inf, nan
from typing import Final

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sluice.protocol.requests import ANTHROPIC, EVENT_STREAM, GENERATING, Endpoint, ResponseHead
from sluice.router import wire
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.attempt import Answer, Attempt, Piece
from sluice.router.dispatch.degrade import Placed
from sluice.router.dispatch.dispatcher import STALLED_READER_S, Dispatcher
from sluice.router.errors import ApiError, Reason
from sluice.router.metrics.instruments import Outcome, RouterMetrics
from sluice.router.request.call import Call
from sluice.router.serve.contract import ReplicaFailedError, StalledReaderError
from sluice.router.tenancy.limits import NO_CHARGE
from sluice.router.wire import STOP_MESSAGE
from sluice.scheduling.request.job import Tier
from sluice.scheduling.request.objective import OBJECTIVES, Objective, clock_of

# Watches the client of a response: it may leave, or stop reading.

Watch = Callable[[Callable[[str], None] | None], None]

_RESOLUTION_S: Final = 1e-3


class DisconnectGuard:
    """Cancels its block, without an exception, when the client leaves or the router stops: an ASGI
    server does not. ``receive`` must belong to a request whose body was read; it is awaited in a
    task unless the server has ``watch`` (:data:`sluice.router.wire.WATCH`)."""

    def __init__(self, receive: Receive, watch: Watch | None = None) -> None:
        self._receive = receive
        self._watch = watch
        self._waiting: asyncio.Task[None] | None = None
        self.disconnected = False
        self.stopped = False
        """The router stops, and its server has given up waiting for this answer."""

    async def __aenter__(self) -> DisconnectGuard:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        if self._watch is None:
            self._waiting = asyncio.create_task(self._wait())
        else:
            self._watch(self._end)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if self._waiting is not None:
            self._waiting.cancel()
        elif self._watch is not None:
            self._watch(None)
        if not (self.disconnected or self.stopped):
            return False
        ours_alone = self._task.uncancel() <= self._cancelling
        return ours_alone and kind is asyncio.CancelledError

    async def _wait(self) -> None:
        while (kind := (await self._receive())["type"]) not in ("http.disconnect", STOP_MESSAGE):
            pass
        self._end(kind)

    def _end(self, kind: str) -> None:
        self.stopped = kind == STOP_MESSAGE
        self.disconnected = not self.stopped
        self._task.cancel()


class TimeoutSend:
    """Forwards one response's messages, and drops a client that reads nothing for ``limit_s``. One
    timer per response: one per message would cost more than the sending."""

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

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def __call__(self, message: Message) -> None:
        """Forward a message. Raises StalledReaderError: the client does not read it."""
        self._due_s = self._loop.time() + self._limit_s
        try:
            await self._send(message)
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
    """Whole events or a whole answer, with ``tier`` (``None``: unnamed) in it. ``O(bytes)``."""
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
    """Serves one call and accounts for it, however it ends. ``fetches``: the client can fetch a
    stream from the replica. ``place``: its class accepts alternatives, of which this may choose."""

    def __init__(
        self,
        call: Call,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        telemetry: Telemetry,
        fetches: bool = False,
        place: Callable[[], Awaitable[Placed]] | None = None,
    ) -> None:
        self._fetches = fetches
        self._place = place
        self._call = call
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._telemetry = telemetry
        self._error: ApiError | None = None
        self._clock = clock_of(call.slo, call.received_s)
        self._answer: Answer | None = None
        self._begun = False
        """Whether the head of a stream was sent."""
        self._note: asyncio.Task[None] | None = None
        self._last = b""
        """The end of a stream, which leaves in one write with the end of the answer."""
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        outcome, self._send = Outcome.FAILED, send
        try:
            with TimeoutSend(send, STALLED_READER_S) as timed_send:
                outcome = await self._serve(scope, receive, timed_send)
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
            answer, call = self._answer, self._call
            if self._note is not None:
                self._note.cancel()
            if answer is not None:
                answer.say = None  # or they would refer to each other
                self._dispatcher.close(answer)
            error = self._error.reason if self._error is not None else None
            self._dispatcher.ended(call, self._clock, outcome, error, answer, self._telemetry)
            if call.loop is not None:
                promised = answer is not None and answer.promises > 0
                call.loop.end(call.received_s, outcome.answered, promised)
            if call.charge is not NO_CHARGE:
                head, tail = (None, None) if answer is None else (answer.head, answer.tail)
                streams, choices = call.body.get("stream"), call.body.get("n") or 1
                sent = self._clock.tokens * choices if streams else None
                call.charge.close(head, tail, sent, left=outcome is Outcome.CANCELLED)

    async def _serve(self, scope: Scope, receive: Receive, send: TimeoutSend) -> Outcome:
        call = self._call
        error: ApiError | None = None
        answer: Answer | None = None
        streams = False
        # The guard ends before the last message: a server reports the end of a complete response
        # as a disconnect too.
        guard = DisconnectGuard(receive, scope.get("state", {}).pop(wire.WATCH, None))
        async with guard:
            try:
                decision = None
                asked_s = nan
                if self._place is not None:
                    asked_s = self._dispatcher.clock()
                    call, model, decision = await self._place()
                    self._call, self._dispatcher, self._metrics = (
                        call,
                        model.dispatcher,
                        model.metrics,
                    )
                    self._clock = clock_of(call.slo, call.received_s)
                silent = self._fetches or self._dispatcher.announces == "off"
                asked = call.body.get("stream") and call.endpoint in GENERATING
                say = self._announce if asked and not silent else None
                open_ = self._dispatcher.open
                answer = self._answer = await open_(
                    call, self._fetches, self._clock, decision, say, asked_s
                )
            except ApiError as failure:
                error = failure
                await self._dispatcher.offers.add(call, error)
            else:
                streams = answer.head.media_type == EVENT_STREAM
                if streams:
                    error = await self._stream(answer, send, scope)
        if guard.disconnected:
            return Outcome.CANCELLED
        if guard.stopped:
            error = ApiError(Reason.ROUTER_STOPPING, "The router stopped before the answer ended.")
        self._error = error
        if answer is None:
            assert error is not None
            self._metrics.admission.refused(error.reason, call.slo.service_class)
            if self._begun:
                await self._end_with(error.event(call.endpoint), send)
                return Outcome.FAILED
            await error.response(call.endpoint, self._own_headers(None))(scope, receive, send)
            return Outcome.of_status(error.reason.status)
        if not streams:
            return await self._whole(answer, scope, receive, send)
        last = self._last if error is None else error.event(call.endpoint)
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return Outcome.OK if error is None else Outcome.FAILED

    def _announce(self, objective: Objective, answer: Answer, attempt: Attempt) -> None:
        """Tell the client that an objective is going to be missed, with the head if need be."""
        early = not self._begun
        if early and not answer.opened:
            answer.head = ResponseHead(200, EVENT_STREAM, attempt.place or "")
            answer.decision, answer.tier = attempt.decision, Tier.GUARANTEED
        stated_s = dict(zip(OBJECTIVES, self._call.slo.times_s, strict=True))[objective] or 0.0
        said = {"objective": objective, "promised_ms": round(1000 * stated_s, 3)}
        note = b": sluice.late " + json.dumps(said).encode()
        if self._dispatcher.announces == "event":
            # Clients of OpenAI's read it as a chunk without a choice, as that of the usage is.
            event = json.dumps({"object": "sluice.late", "choices": [], "late": said})
            note = b"event: sluice.late\ndata: " + event.encode()
        self._begun = True
        start = self._head_of(answer, objective) if early else None
        self._note = asyncio.create_task(self._send_note(start, note + b"\n\n"), name="late")

    async def _send_note(self, start: Message | None, note: bytes) -> None:
        if start is not None:
            await self._send(start)
        await self._send({"type": "http.response.body", "body": note, "more_body": True})

    async def _noted(self) -> None:
        """The announcement, and the head with it, has left."""
        if self._note is not None:
            await asyncio.wait([self._note])

    async def _end_with(self, last: bytes, send: Send) -> None:
        """End a stream that has begun with an announcement with these events."""
        await self._noted()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _head_of(self, answer: Answer, late: str = "") -> Message:
        """The head of a stream; ``late``: the objective that is known to be missed by then."""
        headers = self._own_headers(answer) | {
            "content-type": f"{EVENT_STREAM}; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        if answer.head.fetch:
            headers[wire.STREAM_HEADER] = answer.head.fetch
        if late:
            headers[wire.LATE_HEADER] = late
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": answer.head.status, "headers": raw}

    async def _stream(self, answer: Answer, send: TimeoutSend, scope: Scope) -> ApiError | None:
        """Forward the pieces of an event stream. Returns the error that broke it, if one did."""
        call = self._call
        if self._begun:
            await self._noted()
        else:
            self._begun = True
            await send(self._head_of(answer))
        observe_gap = self._metrics.usage.gap(call.slo.service_class)
        write: Callable[[bytes], bool] | None = scope.get("state", {}).pop(wire.FORWARD, None)

        def forward(piece: Piece) -> bool:
            data = self._counted(piece, observe_gap)
            return write is None or not data or write(data)

        pieces = self._dispatcher.pieces(answer, None if write is None else forward)
        try:
            async for piece in pieces:
                data = self._counted(piece, observe_gap)
                if answer.tail is not None:
                    self._last = data
                elif data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ReplicaFailedError as failure:
            reason = Reason.STREAM_BROKEN
            if failure.reason is Reason.REQUEST_SUSPECTED:
                reason = failure.reason
            return ApiError(reason, f"The stream broke off after it had begun: {failure}")
        return None

    def _counted(self, piece: Piece, observe_gap: Callable[[float], None]) -> bytes:
        """Count the tokens of a piece that is about to leave. Returns its bytes, as they leave."""
        # Tokens by when they leave; None: now. What waited for the last ones of a piece left when
        # the engine made it: a stage may end with a token that has no text, and the next one begin
        # with the text after it.
        parts: Sequence[tuple[int, float | None]] = piece.sent
        if len(piece.made) > 1:
            parts = (*piece.made[:-1], (piece.made[-1][0], None))
        elif piece.tokens and not parts:
            parts = ((piece.tokens, None),)
        reasoned = piece.reasoned
        for tokens, sent_s in parts:
            gap_s = self._emit(tokens, sent_s, reasoned)
            reasoned -= tokens
            if gap_s is not None:
                observe_gap(gap_s)
        if piece.sent:
            return b""
        return with_tier(piece.data, self._call.endpoint, self._call.service_tier, streams=True)

    async def _whole(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> Outcome:
        """Send a complete response."""
        call, head, tail = self._call, answer.head, answer.tail
        body = b"".join([piece.data async for piece in self._dispatcher.pieces(answer)])
        if self._begun:  # a refusal, of a stream that has begun with an announcement
            event = b"event: error\n" if call.endpoint in ANTHROPIC else b""
            await self._end_with(event + b"data: " + body + b"\n\n", send)
            return Outcome.of_status(head.status)
        if head.status < 400:
            if tail is not None:
                reached_s = call.received_s + answer.waited_s
                for place, offset_s in enumerate(tail.token_offsets_s, 1):
                    self._emit(1, reached_s + offset_s, int(place == tail.reasoned))
            body = with_tier(body, call.endpoint, call.service_tier, streams=False)
        headers = self._own_headers(answer)
        response = Response(body, head.status, headers=headers, media_type=head.media_type)
        await response(scope, receive, send)
        return Outcome.of_status(head.status)

    def _emit(self, tokens: int, now_s: float | None, reasoned: int = 0) -> float | None:
        """Count tokens, and return the seconds since the last ones, if there were any."""
        clock = self._clock
        last_s, before = clock.last_token_s, clock.tokens
        at_s = self._dispatcher.clock() if now_s is None else max(now_s, last_s or now_s)
        clock.emit(tokens, at_s, reasoned)
        # At the first token, and then each time that the count has doubled.
        doubled = clock.tokens.bit_length() > before.bit_length()
        if doubled and self._answer is not None and self._answer.promises:
            self._dispatcher.late(self._call, clock)
        if last_s is not None:
            return at_s - last_s if tokens else None
        if (ttft_s := clock.ttft_s) is not None:
            self._metrics.ttft_s(self._call.slo.service_class).observe(ttft_s)
        return None

    def _own_headers(self, answer: Answer | None) -> dict[str, str]:
        call = self._call
        headers = {wire.CLASS_HEADER: call.slo.service_class} if call.scheduled else {}
        if call.clamped:
            changes = [f"{field}={value}" for field, value in call.clamped.items()]
            headers[wire.CLAMPED_HEADER] = ", ".join(changes)
        if call.degraded:
            changes = [f"{field}={value}" for field, value in call.degraded.items()]
            headers[wire.DEGRADED_HEADER] = ", ".join(changes)
        if call.session:
            headers[wire.SESSION_HEADER] = call.session
        if call.loop is not None:
            left_s = max(0.0, call.loop.due_s - self._dispatcher.clock())
            headers[wire.LOOP_REMAINING_HEADER] = f"{left_s * 1000:.1f}"
            # Of a later turn it is known.
            begun = call.loop.goes_on or (answer is not None and answer.tier is Tier.GUARANTEED)
            loop_tier = Tier.GUARANTEED if call.loop.promised and begun else Tier.BEST_EFFORT
            headers[wire.LOOP_ADMISSION_HEADER] = loop_tier.value
        if answer is None:
            return headers
        head, decision = answer.head, answer.decision
        if head.replica_id:
            headers[wire.REPLICA_HEADER] = head.replica_id
        if decision.prefill_id is not None:
            headers[wire.PREFILL_REPLICA_HEADER] = decision.prefill_id
        if head.status >= 400:
            return headers  # nothing is promised of a refusal
        tier = answer.tier
        if call.scheduled:
            headers[wire.ADMISSION_HEADER] = tier.value
        if decision.predicted_ttft_s is not None:
            headers[wire.PREDICTED_TTFT_HEADER] = f"{decision.predicted_ttft_s * 1000:.1f}"
        if tier is Tier.GUARANTEED:
            ttft_s, tpot_s, _ = call.slo.of_stage(0).times_s
            promised = zip(_PROMISED_HEADERS, (ttft_s, tpot_s, call.slo.e2e_s), strict=True)
            headers |= {name: f"{s * 1000:.1f}" for name, s in promised if s is not None}
            if decision.level is not None:
                headers[wire.PROMISE_LEVEL_HEADER] = f"{decision.level:g}"
        return headers
