"""The input of a batch: each line is a JSON object with one request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Final, NamedTuple

from sluice.router.batches.records import LineFault
from sluice.router.errors import ApiError, shown
from sluice.router.request.body import parse_object

MAX_CUSTOM_ID: Final = 512
"""Maximum length of ``custom_id``, characters."""

MAX_FAULTS: Final = 100
"""Maximum number of reported faults of one input; reading stops there."""

SLICE_LINES: Final = 64
SLICE_BYTES: Final = 1 << 20
"""A slice ends with the line that reaches either."""


class BatchRequest(NamedTuple):
    """One request of a batch. ``number`` is that of its line, from 1; ``size`` is that of the line,
    bytes; ``body`` is unchecked."""

    number: int
    custom_id: str
    body: dict[str, Any]
    size: int


class Checked(NamedTuple):
    """Result of a check: the number of requests, and their faults."""

    total: int
    faults: tuple[LineFault, ...]


class LineError(ValueError):
    """A line is not a valid request of the batch.

    Args:
        code: for programs. param: the key at fault.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def check_lines(file: BinaryIO, url: str, max_lines: int, max_line_bytes: int) -> Checked:
    """Read the whole input, and find the invalid lines.

    The bodies of the requests are not checked: a request that the API would refuse is refused when
    it runs, and the others run. ``O(bytes)``; the ids are kept in memory.
    """
    faults: list[LineFault] = []
    seen: set[str] = set()
    total = 0
    for number, raw in _numbered(file, max_line_bytes):
        total += 1
        if total > max_lines:
            faults.append(
                LineFault(
                    code="too_many_lines",
                    message=f"A batch may have at most {max_lines} requests.",
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
        except LineError as error:
            faults.append(
                LineFault(code=error.code, message=str(error), line=number, param=error.param)
            )
            if len(faults) == MAX_FAULTS:
                break
    if total == 0:
        faults.append(LineFault(code="empty_file", message="The file holds no requests."))
    return Checked(total, tuple(faults))


def parse_line(number: int, raw: bytes, url: str, max_bytes: int) -> BatchRequest:
    """The request in line ``number``, ``raw``, of a batch that is for ``url``.

    Raises:
        LineError: it is too long, is not JSON, lacks a key, or is for something else.
    """
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
    """The lines that are not blank, with their numbers from 1. A line that is too long is cut right
    beyond the limit, and its rest is never held in memory."""
    number = 0
    # One more than the limit and its line feed, so that the longest line and a longer one differ.
    while raw := file.readline(max_bytes + 2):
        number += 1
        whole = raw.endswith(b"\n")
        if raw.strip():
            yield number, raw.rstrip(b"\r\n") if whole else raw
        while not whole and (rest := file.readline(1 << 16)):
            whole = rest.endswith(b"\n")
