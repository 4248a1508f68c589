"""What a router tells of each request at its end: a log line and, where it is traced, its span.

Neither holds a prompt, an output or a key. Names of classes, models, clients and replicas are those
of the configuration and of the fleet.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sluice.protocol.requests import Endpoint
from sluice.router.errors import RULES, Reason
from sluice.router.metrics.instruments import OPERATIONS, PROVIDER, Outcome
from sluice.scheduling.request.objective import TokenClock
from sluice.telemetry.logs import LogsConfig
from sluice.telemetry.tracing import CONTEXT_HEADERS, Attribute, Span, Tracer, attribute_of

if TYPE_CHECKING:
    from sluice.router.dispatch.attempt import Answer
    from sluice.router.request.arrival import Arrival
    from sluice.router.request.call import Call

_log = logging.getLogger(__name__)

_SERVED = (Outcome.OK, Outcome.CANCELLED)


class Telemetry:
    """One per router process.

    Args:
        logs: which requests get a line.
        tracer: makes the spans; ``None``: tracing is off.
    """

    def __init__(self, logs: LogsConfig | None = None, tracer: Tracer | None = None) -> None:
        self._lines = (logs or LogsConfig()).requests
        self._tracer = tracer

    def begin(
        self, arrival: Arrival, endpoint: Endpoint, headers: Sequence[tuple[bytes, bytes]]
    ) -> Span | None:
        """The request's span, or ``None`` where it is not traced.

        Args:
            headers: of the request, raw, names in lower case.
        """
        if self._tracer is None:
            return None
        context = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name.decode("latin-1") in CONTEXT_HEADERS
        }
        span = self._tracer.begin(endpoint, context, arrival.received_s)
        if span is not None:
            span.set(sluice__request_id=arrival.request_id, sluice__endpoint=endpoint)
            span.set(
                sluice__client_request_id=arrival.client_request_id or None,
                gen_ai__operation__name=OPERATIONS.get(endpoint),
                gen_ai__provider__name=PROVIDER,
            )
        return span

    def refused(
        self, arrival: Arrival, endpoint: Endpoint, reason: Reason, span: Span | None = None
    ) -> None:
        """A request ended before its class was known."""
        outcome = Outcome.of_status(RULES[reason].status)
        if self._lines == "none":
            pass
        elif self._lines == "all" or outcome is not Outcome.CLIENT_ERROR:
            fields = {
                "outcome": outcome.value,
                "reason": reason.value,
                "endpoint": endpoint,
                "client": arrival.client.name,
                **_theirs(arrival),
            }
            _line(outcome, arrival.request_id, fields, span)
        _end(span, outcome, reason)

    def left_early(self, arrival: Arrival, endpoint: Endpoint, span: Span | None = None) -> None:
        """A client left before its request's class was known."""
        if self._lines == "all":
            fields = {
                "outcome": Outcome.CANCELLED.value,
                "endpoint": endpoint,
                "client": arrival.client.name,
                **_theirs(arrival),
            }
            _line(Outcome.CANCELLED, arrival.request_id, fields, span)
        _end(span, Outcome.CANCELLED, None)

    def ended(
        self,
        call: Call,
        clock: TokenClock,
        outcome: Outcome,
        reason: Reason | None,
        answer: Answer | None,
        now_s: float,
    ) -> None:
        """A request ended whose class is known.

        Args:
            clock: what was seen of its tokens.
            reason: of an error of the router's own.
            answer: of the replica that served it.
        """
        wanted = self._lines == "all" or (self._lines == "failed" and outcome not in _SERVED)
        if not wanted and call.span is None:
            return
        figures = _figures(call, clock, answer, now_s)
        if wanted:
            fields = {
                "outcome": outcome.value,
                "reason": reason and reason.value,
                "endpoint": call.endpoint,
                "client": call.client.name,
                **_theirs(call),
                **figures,
            }
            present = {name: value for name, value in fields.items() if value is not None}
            _line(outcome, call.request_id, present, call.span)
        if call.span is not None:
            call.span.set(**{attribute_of(name): value for name, value in figures.items()})
            _end(call.span, outcome, reason)

    def put_off(self, call: Call, reason: Reason | None) -> None:
        """A batch's line found no room, and is tried again: it has not ended, its span has."""
        _end(call.span, Outcome.REFUSED, reason)


def _theirs(of: Arrival | Call) -> dict[str, str]:
    """The client's own id of the request, where it gave one."""
    return {"client_request_id": of.client_request_id} if of.client_request_id else {}


def _figures(
    call: Call, clock: TokenClock, answer: Answer | None, now_s: float
) -> dict[str, Attribute | None]:
    slo = call.slo
    decision = answer.decision if answer is not None else None
    tail = answer.tail if answer is not None else None
    return {
        "model": call.model,
        "class": slo.service_class,
        "priority": slo.priority,
        "admission": answer.tier.value if answer is not None else None,
        "replica": (answer.head.replica_id or None) if answer is not None else None,
        "prefill_replica": decision.prefill_id if decision is not None else None,
        "resumes": (answer.resumes or None) if answer is not None else None,
        "predicted_ttft_ms": _ms(decision.predicted_ttft_s if decision is not None else None),
        "ttft_ms": _ms(clock.ttft_s),
        "tpot_ms": _ms(clock.tpot_s),
        "e2e_ms": _ms(clock.e2e_s(now_s)),
        "queue_ms": _ms(answer.queued_s if answer is not None else None),
        "attained": clock.attained(now_s) if slo.stated else None,
        "prompt_tokens": tail.prompt_tokens if tail is not None else None,
        "cached_tokens": answer.cached_tokens if answer is not None and tail is not None else None,
        "output_tokens": tail.output_tokens if tail is not None else clock.tokens,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _line(
    outcome: Outcome, request_id: str, fields: Mapping[str, object], span: Span | None
) -> None:
    fields = {"request_id": request_id, **fields}
    if span is not None:
        fields["trace_id"] = span.trace_id
    level = logging.WARNING if outcome is Outcome.FAILED else logging.INFO
    if _log.isEnabledFor(level):
        # As the logger would make it, but for the search for the line of code that called it.
        record = logging.LogRecord(_log.name, level, __file__, 0, "request ended", None, None)
        record.fields = fields
        _log.handle(record)


def _end(span: Span | None, outcome: Outcome, reason: Reason | None) -> None:
    if span is None:
        return
    span.set(sluice__outcome=outcome.value)
    if outcome is Outcome.FAILED:
        span.fail(reason.value if reason is not None else "replica_error")
    elif reason is not None:
        span.set(error__type=reason.value)
    span.end()
