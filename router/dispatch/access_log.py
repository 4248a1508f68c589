"""The log line and the span of each ended request; neither holds a prompt, an output or a key."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from sluice.protocol.requests import Endpoint
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import OPERATIONS, PROVIDER, Outcome, RequestFigures
from sluice.telemetry.logs import LogsConfig
from sluice.telemetry.tracing import CONTEXT_HEADERS, Attribute, Span, Tracer, attribute_of

if TYPE_CHECKING:
    from sluice.router.dispatch.attempt import Answer
    from sluice.router.request.arrival import Arrival
    from sluice.router.request.call import Call

_log = logging.getLogger(__name__)

_SERVED = (Outcome.OK, Outcome.CANCELLED)


class Telemetry:
    """One per router process. ``logs``: which requests get a line."""

    def __init__(self, logs: LogsConfig | None = None, tracer: Tracer | None = None) -> None:
        self._lines = (logs or LogsConfig()).requests
        self._tracer = tracer

    def begin(
        self, arrival: Arrival, endpoint: Endpoint, headers: Sequence[tuple[bytes, bytes]]
    ) -> Span | None:
        """The request's span, ``None`` if untraced. ``headers``: raw, names in lower case."""
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

    def ended_early(
        self, arrival: Arrival, endpoint: Endpoint, reason: Reason | None, span: Span | None = None
    ) -> None:
        """A request ended before its class was known. ``None``: its client left."""
        outcome = Outcome.CANCELLED if reason is None else Outcome.of_status(reason.status)
        quiet = outcome in (Outcome.CANCELLED, Outcome.CLIENT_ERROR)
        if self._lines == "all" or (self._lines == "failed" and not quiet):
            fields = {
                "outcome": outcome.value,
                **({} if reason is None else {"reason": reason.value}),
                "endpoint": endpoint,
                "client": arrival.client.name,
            }
            if arrival.client_request_id:
                fields["client_request_id"] = arrival.client_request_id
            _line(outcome, arrival.request_id, fields, span)
        _end(span, outcome, reason)

    def ended(
        self, call: Call, figures: RequestFigures, reason: Reason | None, answer: Answer | None
    ) -> None:
        """A request whose class is known ended. ``reason``: of the router's own error."""
        outcome = figures.outcome
        wanted = self._lines == "all" or (self._lines == "failed" and outcome not in _SERVED)
        if not wanted and call.span is None:
            return
        fields = _fields(call, figures, answer)
        if wanted:
            named: dict[str, object] = {"outcome": outcome.value}
            if reason is not None:
                named["reason"] = reason.value
            named |= {"endpoint": call.endpoint, "client": call.client.name}
            if call.client_request_id:
                named["client_request_id"] = call.client_request_id
            named |= {name: value for name, value in fields.items() if value is not None}
            _line(outcome, call.request_id, named, call.span)
        if call.span is not None:
            call.span.set(**{attribute_of(name): value for name, value in fields.items()})
            _end(call.span, outcome, reason)

    def put_off(self, call: Call, reason: Reason | None) -> None:
        """A batch's line found no room, and is tried again: it has not ended, its span has."""
        _end(call.span, Outcome.REFUSED, reason)


def _fields(
    call: Call, figures: RequestFigures, answer: Answer | None
) -> dict[str, Attribute | None]:
    slo = figures.slo
    fields: dict[str, Attribute | None] = {
        "model": call.model,
        "class": slo.service_class,
        "priority": slo.priority,
    }
    if call.session:
        fields["session"] = call.session
    if call.degraded:
        fields["degraded"] = ", ".join(f"{name}={value}" for name, value in call.degraded.items())
    times_s = {
        "ttft_ms": figures.ttft_s,
        "tpot_ms": figures.tpot_s,
        "e2e_ms": figures.e2e_s,
        "queue_ms": figures.queued_s,
    }
    if answer is not None:
        decision = answer.decision
        fields |= {
            "admission": answer.tier.value,
            "replica": answer.head.replica_id or None,
            "prefill_replica": decision.prefill_id,
            "resumes": len(answer.opened) - 1 or None,
        }
        times_s = {"predicted_ttft_ms": decision.predicted_ttft_s, **times_s}
    for name, time_s in times_s.items():
        fields[name] = None if time_s is None else round(time_s * 1000, 3)
    if call.loop is not None and call.loop.turns:
        fields |= {
            "loop_turn": call.loop.turns,
            "loop_promised": bool(call.loop.promised),
            "loop_left_ms": round((call.loop.due_s - figures.ended_s) * 1000, 3),
        }
    for objective, parts in islice(figures.late.items(), 1):
        fields |= {"late": objective, "cause": next(iter(parts)).value}
        fields["late_ms"] = round(sum(parts.values()) * 1000, 3)
        fields |= {f"late_{cause}_ms": round(s * 1000, 3) for cause, s in parts.items()}
    fields |= {
        "attained": not figures.missed if slo.stated else None,
        "prompt_tokens": figures.prompt,
        "cached_tokens": figures.cached,
        "output_tokens": figures.generated,
    }
    return fields


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
