"""The results of lines, as they are stored and given to clients."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sluice.router.batches.lines import BatchRequest
from sluice.router.batches.state import Result


class Reply(NamedTuple):
    """The reply to a line.

    Attributes:
        status: HTTP status. request_id: our id of the attempt. body: of the response, JSON.
        no_room: it was not served for lack of capacity, and may be tried again.
        clamped: what the client's caps changed in its objective, and to what, by field.
        final: it failed, and must not be tried again.
    """

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
