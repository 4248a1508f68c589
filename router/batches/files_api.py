"""``/v1/files``: the input and result files of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from sluice.router.batches.byte_store import READ_BYTES
from sluice.router.batches.expiry import expiry_s
from sluice.router.batches.paging import listed, page_of
from sluice.router.batches.records import FileRecord
from sluice.router.batches.run import Resources
from sluice.router.batches.state import BatchState, file_not_found
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.request.form import Form, receive
from sluice.router.tenancy.limits import ANYONE

MAX_PAGE = 10_000
"""Maximum and default number of files in one page of the list."""

MAX_FILENAME = 255
"""Maximum stored characters of a file's name. It is only shown, and never used as a path."""

_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class FilesApi:
    """The endpoints over one store."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._uploads: Counter[str] = Counter()

    def routes(self) -> APIRouter:
        """The endpoints."""
        routes = APIRouter(prefix="/v1/files")
        routes.post("", response_model=None)(self._create)
        routes.get("", response_model=None)(self._list)
        routes.get("/{file_id}", response_model=None)(self._retrieve)
        routes.get("/{file_id}/content", response_model=None)(self._content)
        routes.delete("/{file_id}", response_model=None)(self._delete)
        return routes

    async def _create(self, request: Request) -> Response:
        owner = owner_of(request)
        self._check_places(owner)
        self._uploads[owner] += 1
        try:
            record = await self._receive(request)
        except ClientDisconnect:
            return Response(status_code=400)  # never read: the client has left
        finally:
            self._uploads[owner] -= 1
            self._uploads += Counter()  # drops what is zero: keys come and go
        return JSONResponse(record.shown())

    def _check_places(self, owner: str) -> None:
        most = self._resources.config.max_uploads
        if self._uploads.total() >= most:
            raise ApiError(
                Reason.ROUTER_FULL, f"The router accepts {most} uploads at once; try again."
            )
        # Otherwise one client with slow uploads blocks all others.
        own = max(1, most // 2)
        if owner != ANYONE.owner and self._uploads[owner] >= own:
            raise ApiError(
                Reason.CLIENT_FULL,
                f"The router accepts {own} uploads at once with this API key; try again.",
            )

    async def _receive(self, request: Request) -> FileRecord:
        limits = self._resources.config
        upload = await self._resources.store.begin_upload(owner_of(request))
        try:
            form = await receive(
                request, upload.write, limits.max_file_bytes, limits.upload_timeout_s
            )
            changes: dict[str, Any] = {"filename": _printable(form.filename or "")}
            kept_s = _checked(form)
            record = await upload.close()
            if kept_s is not None:
                changes["expires_s"] = record.created_s + kept_s
            record = record.model_copy(update=changes)
            await self._resources.store.ask(BatchState.finish_upload, record)
            return record
        except BaseException:
            await upload.abandon()
            raise

    async def _list(self, request: Request) -> JSONResponse:
        query = request.query_params
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise invalid(f"order must be asc or desc, got {shown(order)}", "order")
        page = page_of(request, MAX_PAGE, MAX_PAGE)._replace(newest_first=order == "desc")
        files = await self._resources.store.ask(BatchState.files, owner_of(request), purpose, page)
        # FastAPI would check each value of thousands of files on the event loop.
        return JSONResponse(listed(*files))

    async def _retrieve(self, request: Request, file_id: str) -> dict[str, Any]:
        return (await self._file(request, file_id)).shown()

    async def _content(self, request: Request, file_id: str) -> Response:
        record = await self._file(request, file_id)
        return StreamingResponse(
            self._resources.store.stream(record.id, _pieces),
            media_type="application/octet-stream",
            headers={"content-length": str(record.bytes)},
        )

    async def _delete(self, request: Request, file_id: str) -> dict[str, Any]:
        await self._file(request, file_id)
        await self._resources.store.delete_file(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    async def _file(self, request: Request, file_id: str) -> FileRecord:
        record = await self._resources.store.ask(BatchState.file, owner_of(request), file_id)
        if record is None:
            raise file_not_found(file_id)
        return record


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    return iter(partial(file.read, READ_BYTES), b"")


def owner_of(request: Request) -> str:
    """The owner whose files and batches a request can access."""
    owner: str = request.state.arrival.client.owner
    return owner


def _checked(form: Form) -> int | None:
    """How long the file is to be kept, seconds; ``None`` if the form does not state it.

    Raises:
        ApiError: 400, a field is missing, unknown or wrong.
    """
    fields = form.fields
    for name in (*fields, *form.lists):
        if name not in _FIELDS:
            raise invalid(
                f"{shown(name)} is not a known field; allowed: file, {', '.join(_FIELDS)}",
                name[:64],
            )
    purpose = fields.get("purpose")
    if purpose != "batch":
        raise invalid(f"purpose must be batch, got {shown(purpose)}", "purpose")
    anchor, seconds = fields.get(_FIELDS[1]), fields.get(_FIELDS[2])
    if anchor is None and seconds is None:
        return None
    number = int(seconds) if seconds is not None and _is_number(seconds) else seconds
    return expiry_s("expires_after", anchor, number)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _printable(name: str) -> str:
    kept = "".join(each if each.isprintable() else "_" for each in name[:MAX_FILENAME])
    return kept or "upload"
