"""What differs between two answers to the same request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final, NamedTuple

import httpx

_OWN: Final = frozenset(
    (
        *("id", "created", "created_at", "completed_at", "item_id", "call_id", "tool_use_id"),
        *("system_fingerprint", "version", "root", "owned_by"),
    )
)
"""Keys whose values are each server's own; their types are compared."""

_CONTINUED: Final = frozenset(
    ("content", "text", "delta", "arguments", "thinking", "partial_json", "reasoning")
)
"""Keys of stream events whose texts are parts of one; a server cuts it where it likes."""

_COUNTED: Final = frozenset(("sequence_number",))
"""Keys that count the events of a stream."""


class Answer(NamedTuple):
    """An answer in a form that two servers should agree on; of a stream the kinds of its events."""

    status: int
    media_type: str
    body: Any

    @classmethod
    def of(cls, response: httpx.Response) -> Answer:
        media_type = response.headers.get("content-type", "").partition(";")[0]
        if media_type == "text/event-stream":
            # Those of several choices come in any order.
            events = sorted(_events(response.text), key=_choice_of)
            return cls(response.status_code, media_type, list(_joined(events)))
        try:
            return cls(response.status_code, media_type, response.json())
        except ValueError:
            return cls(response.status_code, media_type, response.text)


class Listed(NamedTuple):
    """A difference with a reason in docs/clients.md: ``found`` in rows that ``rows`` matches."""

    name: str
    rows: str
    found: str


LISTED: Final = (
    Listed("types", r"'stream': 'yes'|'max_tokens': ('4'|True)", "^status: 400, stock 200"),
    Listed("service tiers", "'service_tier'", "^service_tier: |^status: 400, stock 200"),
    Listed("null", "None", "^status: 200, stock (400|500|broken)"),
    Listed("cut responses", "/v1/responses ", "response.incomplete, stock response.completed"),
    Listed("bounds", "'n': 17", "^status: 400, stock 200"),
    Listed("refused streams", "'stream': True", "^status: 4.., stock 200: .*error"),
    Listed(
        "refused fields",
        "'(use_beam_search|request_id|priority|kv_transfer_params|previous_response_id|thread)'",
        "^status: 400, stock (200|404)|^error.param",
    ),
    Listed("zero tokens", "'max_(completion|output)_tokens': 0", "^error.param: max_"),
    Listed("several models", "'model': None|GET /v1/models", "^status: 400|^data: 2 entries"),
    Listed("kept responses", "/v1/responses/resp_1", "^status: 404, stock 405"),
    Listed("health", "(GET|POST) /(health|ping) ", '^content-type: |^: {"status": "ok"}'),
    Listed("metrics", "/metrics", "^status: 405, stock 200|^: #"),
)


def differences(ours: Answer, stock: Answer) -> Iterator[str]:
    """Each difference, as its place and what is there."""
    if ours.status != stock.status:
        stocks = stock.status or "broken"
        yield f"status: {ours.status}, stock {stocks}: {_short([ours.body, stock.body])}"
        return
    if not ours.body and not stock.body:
        return  # of HEAD
    if ours.status >= 400:
        yield from _of_errors(ours.body, stock.body)
        return
    if ours.media_type != stock.media_type:
        yield f"content-type: {ours.media_type}, stock {stock.media_type}"
    yield from _of_values("", ours.body, stock.body)


def _of_errors(ours: Any, stock: Any) -> Iterator[str]:
    error = ours.get("error") if isinstance(ours, dict) else None
    if not isinstance(error, dict):
        yield f"error: {_short(ours)}"
        return
    keys = {"message", "type", "code"} if ours.get("type") == "error" else set(_OPENAI_ERROR)
    if error.keys() != keys or not all(isinstance(error[key], str) for key in keys - {"param"}):
        yield f"error: {_short(error)}"
    named = stock["error"].get("param") if isinstance(stock, dict) and "error" in stock else None
    # Without the names of vLLM's classes, and without places in malformed JSON.
    parts = [part for part in (named or "").split(".") if not part[:1].isupper()]
    field = ".".join(parts[1:] if parts[0] == "body" else parts)
    # A value in a list may be named by its list.
    within = f"{field}.".startswith(f"{error.get('param')}.")
    if "param" in error and field and not field.isdecimal() and not within:
        yield f"error.param: {error['param']}, stock {named}"


_OPENAI_ERROR: Final = ("message", "type", "param", "code")


def _of_values(place: str, ours: Any, stock: Any) -> Iterator[str]:
    key = place.rpartition(".")[2]
    if isinstance(ours, dict) and isinstance(stock, dict):
        for name in [*ours, *(each for each in stock if each not in ours)]:
            inner = f"{place}.{name}".removeprefix(".")
            if name not in stock:
                yield f"{inner}: only in Sluice's: {_short(ours[name])}"
            elif name not in ours:
                yield f"{inner}: only in stock's: {_short(stock[name])}"
            else:
                yield from _of_values(inner, ours[name], stock[name])
    elif isinstance(ours, list) and isinstance(stock, list):
        if len(ours) != len(stock):
            yield f"{place}: {len(ours)} entries, stock {len(stock)}: {_short([ours, stock])}"
        for number, (one, other) in enumerate(zip(ours, stock, strict=False)):
            yield from _of_values(f"{place}.{number}".removeprefix("."), one, other)
    elif key in _OWN or key in _COUNTED:
        if type(ours) is not type(stock):
            yield f"{place}: {_short(ours)}, stock {_short(stock)}"
    elif isinstance(ours, float) and isinstance(stock, float | int):
        if not math.isclose(ours, stock, rel_tol=1e-2, abs_tol=2e-3):
            yield f"{place}: {ours}, stock {stock}"
    elif ours != stock:
        yield f"{place}: {_short(ours)}, stock {_short(stock)}"


def _choice_of(event: list[Any]) -> int:
    choices = event[1].get("choices") if isinstance(event[1], dict) else None
    return choices[0]["index"] if choices else 99


def _events(text: str) -> Iterator[list[Any]]:
    for block in text.split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines())
        if "data" in fields:
            data = fields["data"]
            yield [fields.get("event", ""), data if data == "[DONE]" else json.loads(data)]


def _joined(events: list[list[Any]]) -> Iterator[list[Any]]:
    kinds = groupby(events, lambda event: (event[0], _choice_of(event), type(event[1])))
    for _, same in kinds:
        (name, data), *further = same
        for _, more in further:
            data = _together("", data, more)
        yield [name, data]


def _together(key: str, first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict):
        both = {
            name: _together(name, first[name], second[name]) for name in first if name in second
        }
        return {**first, **second, **both}
    if isinstance(first, list):
        if key in ("choices", "tool_calls") and len(first) == len(second) == 1:
            return [_together("", first[0], second[0])]
        return first + second
    return first + second if key in _CONTINUED and isinstance(first, str) else second


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 160 else f"{text[:160]}..."
