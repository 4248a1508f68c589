"""Reading an upload: ``multipart/form-data``, its file straight to the store, each part bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from sluice.router.batches.store import Upload
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.request.body import announces_more, check_plain

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELDS = 16
"""Most parts of a form."""

MAX_FIELD_BYTES = 4 << 10
"""Largest value of a form field that is not the file, bytes."""

MAX_OVERHEAD_BYTES = 128 << 10
"""Most bytes of a form besides its file: more than the fields and headers may have together."""

WRITE_BYTES = 1 << 20
"""Bytes that are gathered before they are written."""

_FILE = "file"


class Form:
    """A form as it comes in. Feed it with :meth:`write`, and store :attr:`ready` between.

    Attributes:
        fields: the values of the fields that are not the file.
        filename: as the client calls the file; ``None`` until there is one.
        ready: bytes of the file that were not taken yet.
    """

    def __init__(self, content_type: str) -> None:
        self.fields: dict[str, str] = {}
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
        """Take in more of the body.

        Raises:
            ApiError: 400, it is no form, or not one with a file.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _bad_form(error) from None

    def finish(self) -> None:
        """Take in the end of the body.

        Raises:
            ApiError: 400, the form is not complete, or has no file.
        """
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
        if self._parts > MAX_FIELDS:
            raise invalid(f"The form must have at most {MAX_FIELDS} parts.")
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
            self.fields[self._name] = self._value.decode("utf-8")
        except UnicodeDecodeError:
            raise invalid(f"{shown(self._name)} must be UTF-8.", self._name[:64]) from None

    def _end(self) -> None:
        self._complete = True


async def receive(request: Request, upload: Upload, max_bytes: int, timeout_s: float) -> Form:
    """Write the file of the form in ``request`` to ``upload``, and return the rest of the form.

    Raises:
        ApiError: 400, 413 or 415.
        OSError: it could not be written.
        starlette.requests.ClientDisconnect: the client left.
    """
    check_plain(request)
    if announces_more(request, max_bytes + MAX_OVERHEAD_BYTES):
        raise _too_large(max_bytes)
    form = Form(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(timeout_s):
            await _copy(request, form, upload, max_bytes)
    except TimeoutError:
        raise ApiError(
            Reason.BODY_TOO_SLOW, f"The upload did not arrive within {timeout_s:g} seconds."
        ) from None
    return form


async def _copy(request: Request, form: Form, upload: Upload, max_bytes: int) -> None:
    received = written = 0
    async for chunk in request.stream():
        received += len(chunk)
        form.write(chunk)
        size = written + len(form.ready)
        if size > max_bytes or received > max_bytes + MAX_OVERHEAD_BYTES:
            raise _too_large(max_bytes)
        if len(form.ready) >= WRITE_BYTES:
            await upload.write(bytes(form.ready))
            written = size
            form.ready.clear()
    form.finish()
    await upload.write(bytes(form.ready))
    form.ready.clear()


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(Reason.TOO_LARGE, f"The file is too large; allowed: {max_bytes} bytes.")


def _bad_form(error: Exception) -> ApiError:
    return invalid(f"The request body is not a form: {shown(str(error), 200)}.")
