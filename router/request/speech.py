"""A request for a transcription or a translation: a form with audio, read into a body as if it
were JSON, with the audio as bytes in its field ``file``."""

from __future__ import annotations

import re
from typing import Any, Final

from starlette.requests import Request

from sluice.replica.request_body import RequestBody
from sluice.router import wire
from sluice.router.errors import invalid, shown
from sluice.router.request.body import HeldBytes
from sluice.router.request.form import Form, receive

TIMEOUT_S = 120.0
"""Longest time that a client may take to send its form, seconds."""

_FLAGS: Final = (
    "stream",
    "stream_include_usage",
    "stream_continuous_usage_stats",
    "use_beam_search",
)
_COUNTS: Final = ("max_completion_tokens", "n")
"""Fields that the router, or a replica, reads as another type than text. The engine converts the
rest."""

_AS_FLAG: Final = {"true": True, "1": True, "false": False, "0": False}
_COUNT: Final = re.compile(r"([0-9]{1,10})(\.0{1,10})?")
_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,20})?")
_TEXTS: Final = (wire.CLASS, "id")
"""Keys of an objective whose values are text, also if they look like a number."""


async def read_speech(request: Request, max_bytes: int, held: HeldBytes | None) -> RequestBody:
    """The body in a form whose file has at most ``max_bytes``; what arrives is counted in ``held``.

    Raises:
        ApiError: 400, 413 or 415, or 503 or 429 if the budget in ``held`` is exhausted.
        starlette.requests.ClientDisconnect: the client left.
    """
    pieces: list[bytes] = []

    async def keep(piece: bytes) -> None:
        pieces.append(piece)

    form = await receive(request, keep, max_bytes, TIMEOUT_S, held)
    audio = b"".join(pieces)
    if not audio:
        raise invalid("The file is empty.", "file")
    fields = fields_of(form)
    # The audio is no part of the JSON, so it is sent to a replica as it is.
    return RequestBody.of(fields).with_fields({**fields, "file": audio})


def fields_of(form: Form) -> dict[str, Any]:
    """The fields of a form besides its file, with the types that they have in JSON.

    Clients that write an object into a form send each key as a field of its own: ``slo[ttft_ms]``.

    Raises:
        ApiError: 400, such a field is not one of an objective.
    """
    fields: dict[str, Any] = {}
    for name, text in (form.fields | form.lists).items():
        if name.startswith(f"{wire.SLO_FIELD}["):
            _put(fields.setdefault(wire.SLO_FIELD, {}), name, text)
        elif name in _FLAGS:
            fields[name] = _AS_FLAG.get(str(text), text)
        else:
            count = _COUNT.fullmatch(str(text)) if name in _COUNTS else None
            fields[name] = int(count[1]) if count else text
    return fields


def _put(objective: Any, name: str, text: str | list[str]) -> None:
    """Put the value of a field ``slo[KEY]`` or ``slo[KEY][KEY]`` where it belongs."""
    *path, key = name[len(wire.SLO_FIELD) + 1 : -1].split("][")
    for step in path:
        objective = objective.setdefault(step, {}) if isinstance(objective, dict) else None
    if not isinstance(objective, dict) or not isinstance(text, str) or len(path) > 1:
        raise invalid(
            f"{shown(name)} is no part of an objective in a form, which has no stages", name[:64]
        )
    is_number = key not in _TEXTS and _NUMBER.fullmatch(text)
    objective[key] = (int(text) if text.isdecimal() else float(text)) if is_number else text
