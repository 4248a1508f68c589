"""The lines of a batch: checked, called as live requests are, and written as results."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry

from sluice.protocol.requests import Endpoint, RequestBody
from sluice.router.batches.state import LineFault, Result, Status
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.attempt import Answer
from sluice.router.dispatch.models import Model, ModelRegistry
from sluice.router.dispatch.response import with_tier
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.metrics.instruments import Families, Outcome
from sluice.router.request.arrival import INFERENCE_PATHS, Arrival, noted
from sluice.router.request.body import parse_object
from sluice.router.request.call import MAX_INLINE_BYTES, Call, CallReader
from sluice.router.request.loop import FIELD as LOOP_FIELD
from sluice.router.request.prompt import PromptSize, measure, output_limit, output_to_expect
from sluice.router.request.validation import MAX_NAME_CHARACTERS
from sluice.router.tenancy.limits import Client, RateLimiter
from sluice.scheduling.request.objective import clock_of
from sluice.telemetry.logs import of_request

# The results of lines, as they are stored and given to clients.


class Reply(NamedTuple):
    """The reply to a line. ``no_room``: not served for lack of capacity, may be tried again;
    ``final``: failed, must not be; ``clamped``: what the client's caps changed in its objective."""

    status: int
    request_id: str
    body: bytes
    no_room: bool = False
    clamped: Mapping[str, str] = MappingProxyType({})
    final: bool = False


def answered(line: BatchRequest, reply: Reply) -> Result:
    """The result of a line with a reply, which may be an error. ``O(len(reply.body))``."""
    try:
        body = json.loads(reply.body)
    except ValueError:
        return not_run(line, "invalid_response", "The response of the engine was not JSON.")
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    if reply.clamped:
        response["clamped"] = dict(reply.clamped)
    return _result(line, reply.status < 400, {"response": response, "error": None})


def not_run(line: BatchRequest, code: str, message: str) -> Result:
    """The result of a line that has no response."""
    return _result(line, False, {"response": None, "error": {"code": code, "message": message}})


def _result(line: BatchRequest, ok: bool, fields: dict[str, Any]) -> Result:
    entry = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, **fields}
    # Escaped, as an answer may hold half of a surrogate pair, which has no bytes of its own.
    return Result(line.number, ok, json.dumps(entry, separators=(",", ":")).encode() + b"\n")


class LineOutcome(enum.StrEnum):
    """How a line ended."""

    OK = "ok"
    ERROR = "error"  # the engine or the router refused it, or its attempts all failed
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class WindowOutcome(enum.StrEnum):
    """What became of a completion window."""

    PROMISED = "promised"
    REFUSED = "refused"
    KEPT = "kept"
    MISSED = "missed"


class BatchMetrics:
    """The counts of one router; their sum over the routers is that of the application."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Families(registry)
        self._ended = make.counters("sluice_batches", "Batches that ended, by status.", "status")
        self._lines = make.counters(
            "sluice_batch_lines", "Lines that ended, by outcome.", "outcome"
        )
        self.waits = make.counter(
            "sluice_batch_line_waits", "Waits of lines because there was no capacity for them."
        )
        self.put_off = make.counter(
            "sluice_batches_put_off",
            "Failed runs of batches, which are retried later; the log has the cause.",
        )
        self._promised = make.counters(
            "sluice_batches_promised",
            "Completion windows of batches by what became of them: promised, refused, or of those "
            "that were promised and have ended kept or missed.",
            "outcome",
        )
        self.running = make.gauge("sluice_batches_running", "Running batches.")
        self.behind = make.gauge(
            "sluice_batches_behind",
            "Running batches that will miss their promised windows unless they get more.",
        )
        self.in_flight = make.gauge("sluice_batch_lines_in_flight", "Lines in flight.")

    def ended(self, status: Status) -> None:
        """Count a batch."""
        self._ended(status.value).inc()

    def window(self, outcome: WindowOutcome) -> None:
        """Count a completion window."""
        self._promised(outcome.value).inc()

    def line(self, outcome: LineOutcome, count: int = 1) -> None:
        """Count lines."""
        self._lines(outcome.value).inc(count)


# The input of a batch: each line is a JSON object with one request.

MAX_CUSTOM_ID: Final = 512  # maximum length of `custom_id`, characters
MAX_LINES: Final = 50_000  # maximum number of requests of a batch: that of OpenAI's API
MAX_FAULTS: Final = 100  # maximum number of reported faults of one input; reading stops there
SLICE_LINES: Final = 64
SLICE_BYTES: Final = 1 << 20  # a slice ends with the line that reaches either


class BatchRequest(NamedTuple):
    """One request; its line's ``number``, from 1, and ``size``, bytes; ``body`` is unchecked."""

    number: int
    custom_id: str
    body: dict[str, Any]
    size: int


MAX_MODELS: Final = 128  # most models that the lines of a batch may name


class Lines(NamedTuple):
    """Requests that name one model: their number, and sums of their prompts and of the most that
    they may generate, which is 0 if one has no limit."""

    number: int = 0
    characters: int = 0
    tokens: int = 0
    most_tokens: int = 0

    def more(self, endpoint: Endpoint, body: dict[str, Any]) -> Lines:
        """With one more. Its body is not checked: one that is not valid adds only itself."""
        size, most = PromptSize(), 0
        with suppress(Exception):
            size, most = measure(endpoint, body), max(0, int(output_limit(endpoint, body)))
        unlimited = self.number and not self.most_tokens
        return Lines(
            self.number + 1,
            self.characters + size.characters,
            self.tokens + size.tokens,
            self.most_tokens + most if most and not unlimited else 0,
        )


class Checked(NamedTuple):
    """Result of a check: the number of requests, their faults, and what each model is to do."""

    total: int
    faults: tuple[LineFault, ...]
    lines: Mapping[str | None, Lines] = MappingProxyType({})


class LineError(ValueError):
    """A line is not a valid request of the batch. ``param`` is the key at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def check_lines(file: BinaryIO, url: str, max_line_bytes: int) -> Checked:
    """The invalid lines of the whole input; bodies are checked only when they run. ``O(bytes)``;
    the ids are kept in memory."""
    faults: list[LineFault] = []
    seen: set[str] = set()
    lines: dict[str | None, Lines] = {}
    total = 0
    for number, raw in _numbered(file, max_line_bytes):
        total += 1
        if total > MAX_LINES:
            faults.append(
                LineFault(
                    code="too_many_lines",
                    message=f"A batch may have at most {MAX_LINES} requests.",
                )
            )
            break
        try:
            line = parse_line(number, raw, url, max_line_bytes)
            if line.custom_id in seen:
                raise LineError(
                    "duplicate_custom_id",
                    f"custom_id {shown(line.custom_id)} is already used by an earlier line.",
                    "custom_id",
                )
            seen.add(line.custom_id)
            model = line.body.get("model")
            if model is None or (isinstance(model, str) and len(model) <= MAX_NAME_CHARACTERS):
                if model not in lines and len(lines) >= MAX_MODELS:
                    message = f"Line {number}: a batch may name at most {MAX_MODELS} models."
                    raise LineError("too_many_models", message, "model")
                lines[model] = lines.get(model, Lines()).more(INFERENCE_PATHS[url], line.body)
        except LineError as error:
            faults.append(
                LineFault(code=error.code, message=str(error), line=number, param=error.param)
            )
            if len(faults) == MAX_FAULTS:
                break
    if total == 0:
        faults.append(LineFault(code="empty_file", message="The file holds no requests."))
    return Checked(total, tuple(faults), lines)


def parse_line(number: int, raw: bytes, url: str, max_bytes: int) -> BatchRequest:
    """The request in line ``raw`` of a batch for ``url``. Raises LineError."""
    if len(raw) > max_bytes:
        raise LineError("line_too_large", f"A line may have at most {max_bytes} bytes.")
    try:
        value = parse_object(raw)
    except ApiError as error:
        raise LineError("invalid_json_line", error.message) from None
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise LineError(
            "invalid_custom_id",
            f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters, "
            f"got {shown(custom_id)}.",
            "custom_id",
        )
    if value.get("method") != "POST":
        raise LineError(
            "invalid_method", f"method must be POST, got {shown(value.get('method'))}.", "method"
        )
    if value.get("url") != url:
        raise LineError(
            "invalid_url",
            f"url must be the endpoint of the batch, {url}, got {shown(value.get('url'))}.",
            "url",
        )
    body = value.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body must be an object, got {shown(body)}.", "body")
    return BatchRequest(number, custom_id, body, len(raw))


def slices(file: BinaryIO, url: str, max_line_bytes: int) -> Iterator[list[BatchRequest]]:
    """The requests of a checked input, in slices."""
    lines: list[BatchRequest] = []
    size = 0
    for number, raw in _numbered(file, max_line_bytes):
        lines.append(parse_line(number, raw, url, max_line_bytes))
        size += lines[-1].size
        if len(lines) == SLICE_LINES or size >= SLICE_BYTES:
            yield lines
            lines, size = [], 0
    if lines:
        yield lines


def _numbered(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, from 1; too long ones are cut and never held in memory."""
    number = 0
    # One more than the limit and its line feed, so that the longest line and a longer one differ.
    while raw := file.readline(max_bytes + 2):
        number += 1
        whole = raw.endswith(b"\n")
        if raw.strip():
            yield number, raw.rstrip(b"\r\n") if whole else raw
        while not whole and (rest := file.readline(1 << 16)):
            whole = rest.endswith(b"\n")


MAX_ATTEMPTS = 5  # of a line that fails by itself; without capacity it waits for its batch's end
FIRST_PAUSE_S = 0.5  # about, before a line without capacity is retried; doubled each time
FAILED_PAUSE_S = 5.0  # the same for a failed line; attempts span the replacement of a dead replica
SHORTEST_PAUSE_S = 0.01  # of a line that its client's rate limit does not admit yet
LONGEST_PAUSE_S = 30.0  # about the maximum of these; a line that waits for capacity keeps its slot
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
    """Runs lines as best-effort calls, or by an objective where they have to hurry. One per router
    process."""

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
        self._fleets = fleets
        self._limiter = limiter
        self._batch_metrics = batch_metrics
        self._pause = pause
        self._telemetry = telemetry or Telemetry()

    async def admit(
        self, line: BatchRequest, url: str, client: Callable[[], Client]
    ) -> Admitted | Reply:
        """Wait until the rate limits of its client admit ``line``, once for all attempts, and check
        it: the argument of :meth:`run`, or the reply that refuses it."""
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

    async def run(
        self, admitted: Admitted, hurry_s: Callable[[], float | None] = lambda: None
    ) -> Reply:
        """The reply to a line, which may be an error. Waits while there is no capacity for it.
        ``hurry_s``: in which time it should end, seconds, if its batch is behind."""
        try:
            return await self._run(admitted, hurry_s)
        finally:
            admitted.drop()

    async def _run(self, admitted: Admitted, hurry_s: Callable[[], float | None]) -> Reply:
        failures = waits = 0
        promised = False
        while True:
            arrival = self._arrival(admitted.client(), admitted.line)
            e2e_s = None if promised else hurry_s()
            with of_request(arrival.request_id):
                reply = await self._attempt(admitted, arrival, e2e_s)
            if reply.final or (reply.status < 500 and not reply.no_room):
                return reply
            # What cannot be promised now is best effort at once.
            promised = reply.no_room and e2e_s is not None
            if promised:
                continue
            if reply.no_room:
                self._batch_metrics.waits.inc()
                waits += 1
                await self._pause(_pause_s(FIRST_PAUSE_S, waits))
                continue
            failures += 1
            if failures == MAX_ATTEMPTS:
                return reply
            await self._pause(_pause_s(FAILED_PAUSE_S, failures))

    def _arrival(self, client: Client, line: BatchRequest) -> Arrival:
        theirs = noted(line.custom_id)
        return Arrival(uuid.uuid4().hex, self._fleets.clock(), client, client_request_id=theirs)

    async def _attempt(self, admitted: Admitted, arrival: Arrival, e2e_s: float | None) -> Reply:
        call, fleet = admitted.call, admitted.fleet
        try:
            if call.client == arrival.client:
                call = replace(call, request_id=arrival.request_id, received_s=arrival.received_s)
            else:  # its limits have changed
                charge = call.charge
                call, fleet = await self._call(admitted.line, call.endpoint, arrival)
                call = replace(call, charge=charge)
            if e2e_s is not None:
                slo = call.slo.with_times((None, None, e2e_s))
                call = replace(call, slo=slo, best_effort=False)
            span = self._telemetry.begin(arrival, call.endpoint, ())
            return await self._serve(replace(call, span=span), fleet)
        except Exception as error:
            return _failed(error, arrival, admitted.call.endpoint)

    async def _call(
        self, line: BatchRequest, endpoint: Endpoint, arrival: Arrival
    ) -> tuple[Call, Model]:
        """The checked call, and the model that serves it. Raises ApiError: a 4xx."""
        try:
            if line.body.get("stream"):
                raise invalid(
                    "stream must be false or left out: a batch keeps whole answers", "stream"
                )

            def make() -> Call:
                return self._reader.make(RequestBody.of(line.body), (), endpoint, arrival)

            call = make() if line.size <= MAX_INLINE_BYTES else await asyncio.to_thread(make)
            if call.loop is not None:
                raise invalid(f"{LOOP_FIELD} has no meaning in a batch", LOOP_FIELD)
            fleet = await self._fleets.find(call.model, call.client.caps.models, endpoint)
        except ApiError as error:
            self._fleets.edge.refused(endpoint, error.reason, arrival.client)
            self._telemetry.ended_early(arrival, endpoint, error.reason)
            raise
        return replace(call, best_effort=True), fleet

    async def _serve(self, call: Call, fleet: Model) -> Reply:
        """A replica's reply; an ended request unless there was no capacity. Raises ApiError."""
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
                if answer.tail is not None:
                    reached_s = call.received_s + answer.waited_s
                    for place, offset_s in enumerate(answer.tail.token_offsets_s, 1):
                        clock.emit(1, reached_s + offset_s, int(place == answer.tail.reasoned))
                if clock.ttft_s is not None:
                    fleet.metrics.ttft_s(call.slo.service_class).observe(clock.ttft_s)
                body = with_tier(body, call.endpoint, call.service_tier, streams=False)
            return Reply(status, call.request_id, body, no_room, call.clamped)
        except ApiError as error:
            outcome = None if _is_no_room(error) else Outcome.of_status(error.reason.status)
            reason = error.reason
            raise
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            call.charge.close(left=True)
            raise
        finally:
            if answer is not None:
                fleet.dispatcher.close(answer)
            # Without room it is tried again: it has not ended.
            telemetry = None if outcome is None else self._telemetry
            ended = outcome or Outcome.REFUSED
            fleet.dispatcher.ended(call, clock, ended, reason, answer, telemetry)
            if outcome is None:
                self._telemetry.put_off(call, reason)


def _failed(error: Exception, arrival: Arrival, endpoint: Endpoint) -> Reply:
    if not isinstance(error, ApiError):
        _log.error("unexpected failure of a batch line", exc_info=error)
        error = ApiError(Reason.INTERNAL, "The router failed; see its log for the cause.")
    body = json.dumps(error.document(endpoint)).encode()
    final = error.reason is Reason.REQUEST_SUSPECTED
    return Reply(error.reason.status, arrival.request_id, body, _is_no_room(error), final=final)


def _is_no_room(error: ApiError) -> bool:
    return error.reason in _NO_ROOM or error.reason.status == _TOO_MANY


def _pause_s(first_s: float, times: int) -> float:
    """Doubled each time, with jitter, so that lines that failed together do not retry together."""
    longest_s = min(LONGEST_PAUSE_S, first_s * 2.0 ** min(times - 1, 16))
    return longest_s * random.uniform(0.5, 1.0)
