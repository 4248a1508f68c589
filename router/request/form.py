"""Reading a form with a file: ``multipart/form-data``, each part bounded, the file in pieces."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from sluice.protocol.requests import RequestBody
from sluice.router import wire
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.request.body import HeldBytes, announces_more, check_plain

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 64  # most parts of a form
MAX_FIELD_BYTES = 4 << 10  # largest value of a form field that is not the file, bytes

MAX_OVERHEAD_BYTES = 512 << 10
"""Most bytes of a form besides its file: more than the fields and headers may have together."""

PIECE_BYTES = 1 << 20  # bytes of the file that are gathered before they are taken

_FILE = "file"


class Form:
    """A form as it comes in: :meth:`write` it, and store :attr:`ready`, the file's bytes, between.
    ``lists``: fields whose names end with ``[]``. ``filename``: ``None`` until there is one."""

    def __init__(self, content_type: str) -> None:
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self.filename: str | None = None
        self.ready = bytearray()
        media_type, options = parse_options_header(content_type)
        if media_type != b"multipart/form-data" or not options.get(b"boundary"):
            raise ApiError(
                Reason.UNSUPPORTED_MEDIA,
                "content-type must be multipart/form-data with a boundary.",
                "content-type",
            )
        self._parts = 0
        self._name = ""
        self._value: bytearray | None = None
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._complete = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._collect(0),
            "on_header_value": self._collect(1),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open_part,
            "on_part_data": self._take,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)
        except FormParserError as error:
            raise _bad_form(error) from None

    def write(self, data: bytes) -> None:
        """Take in more of the body. Raises ApiError: 400, it is no form, or not one with a file."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _bad_form(error) from None

    def finish(self) -> None:
        """The body has ended. Raises ApiError: 400, the form is incomplete or has no file."""
        if not self._complete:
            raise invalid("The form ends before its last boundary.")
        if self.filename is None:
            raise invalid("The form must have a file, in the part 'file'.", _FILE)

    def _collect(self, index: int) -> Callable[[bytes, int, int], None]:
        # The parser bounds the length of a header and their number.
        def collect(data: bytes, start: int, end: int) -> None:
            self._header[index].extend(data[start:end])

        return collect

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise invalid(f"The form must have at most {MAX_PARTS} parts.")
        self._disposition = b""

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        name.clear()
        value.clear()

    def _open_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if not self._name:
            raise invalid("Each part of the form must have a name.")
        if self._name == _FILE:
            if self.filename is not None:
                raise invalid("The form must have one file, got several.", _FILE)
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self._value = None
        elif self._name in self.fields:
            raise invalid(f"{shown(self._name)} must be given once, got it several times.")
        else:
            self._value = bytearray()

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self.ready += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise invalid(
                f"{shown(self._name)} must have at most {MAX_FIELD_BYTES} bytes.", self._name[:64]
            )

    def _end_part(self) -> None:
        if self._value is None:
            return
        try:
            value = self._value.decode("utf-8")
        except UnicodeDecodeError:
            raise invalid(f"{shown(self._name)} must be UTF-8.", self._name[:64]) from None
        if self._name.endswith("[]"):
            self.lists.setdefault(self._name, []).append(value)
        else:
            self.fields[self._name] = value

    def _end(self) -> None:
        self._complete = True


async def receive(
    request: Request,
    take: Callable[[bytes], Awaitable[None]],
    max_bytes: int,
    timeout_s: float,
    held: HeldBytes | None = None,
) -> Form:
    """The form without its file, whose pieces (at most ``max_bytes``) go to ``take`` in order.
    Raises ApiError: 400, 413, 415; 503 or 429, the budget in ``held`` is exhausted. Raises OSError:
    from ``take``. Raises starlette.requests.ClientDisconnect: the client left."""
    check_plain(request)
    if announces_more(request, max_bytes + MAX_OVERHEAD_BYTES):
        raise _too_large(max_bytes)
    form = Form(request.headers.get("content-type", ""))
    received = taken = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                received += len(chunk)
                if held is not None:
                    held.add(len(chunk))
                form.write(chunk)
                size = taken + len(form.ready)
                if size > max_bytes or received > max_bytes + MAX_OVERHEAD_BYTES:
                    raise _too_large(max_bytes)
                if len(form.ready) >= PIECE_BYTES:
                    await take(bytes(form.ready))
                    taken = size
                    form.ready.clear()
            form.finish()
            await take(bytes(form.ready))
    except TimeoutError:
        raise ApiError(
            Reason.BODY_TOO_SLOW, f"The file did not arrive within {timeout_s:g} seconds."
        ) from None
    return form


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(Reason.TOO_LARGE, f"The file is too large; allowed: {max_bytes} bytes.")


def _bad_form(error: Exception) -> ApiError:
    return invalid(f"The request body is not a form: {shown(str(error), 200)}.")


# A request for a transcription or a translation: a form with audio, read into a body as if it were
# JSON, with the audio as bytes in its field ``file``.

TIMEOUT_S = 120.0  # longest time that a client may take to send its form, seconds

_FLAGS: Final = (
    "stream",
    "stream_include_usage",
    "stream_continuous_usage_stats",
    "use_beam_search",
)
_COUNTS: Final = ("max_completion_tokens", "n")
"""Fields that the router or a replica reads as another type than text."""

_AS_FLAG: Final = {"true": True, "1": True, "false": False, "0": False}
_COUNT: Final = re.compile(r"([0-9]{1,10})(\.0{1,10})?")
_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,20})?")
_TEXTS: Final = (wire.CLASS, "id")
"""Keys of an objective whose values are text, also if they look like a number."""


async def read_speech(request: Request, max_bytes: int, held: HeldBytes | None) -> RequestBody:
    """The body in a form with a file of at most ``max_bytes``. Raises ApiError: 400, 413, 415; 503
    or 429, the budget in ``held`` is exhausted. Raises starlette.requests.ClientDisconnect."""
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
    """A form's fields, typed as in JSON; objects come as ``slo[ttft_ms]``. Raises ApiError: 400."""
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
