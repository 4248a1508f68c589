"""Files and batches of one router: the endpoints, and the runner that lives as long as they do."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, BinaryIO

from fastapi import APIRouter, FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from sluice.router.batches.byte_store import READ_BYTES
from sluice.router.batches.lines import BatchMetrics, LineCaller
from sluice.router.batches.run import LinePlaces, Resources, Runner
from sluice.router.batches.state import (
    BatchRecord,
    BatchState,
    FileRecord,
    Page,
    Status,
    file_not_found,
)
from sluice.router.batches.store import Store
from sluice.router.batches.windows import Windows
from sluice.router.config import DAY_S, HOUR_S, RouterConfig, window_s
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.models import ModelRegistry
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.request.arrival import BATCH_PATHS
from sluice.router.request.body import parse_object, read_body
from sluice.router.request.form import Form, receive
from sluice.router.request.validation import as_integer
from sluice.router.tenancy.limits import ANYONE, RateLimiter
from sluice.router.tenancy.tokens import ApiClients

# OpenAI's lists: pages of objects, each page after the last object of the one before.

_DIGITS = re.compile(r"[0-9]{1,9}")


def page_of(request: Request, default: int, most: int) -> Page:
    """The page that a query asks for with ``after`` and ``limit``. Raises ApiError: 400."""
    query = request.query_params
    limit = query.get("limit", str(default))
    if not _DIGITS.fullmatch(limit) or not 1 <= int(limit) <= most:
        raise invalid(f"limit must be an integer from 1 to {most}, got {shown(limit)}", "limit")
    return Page(int(limit), query.get("after"))


def listed(records: Sequence[FileRecord | BatchRecord], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    data = [record.shown() for record in records]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


MAX_S = 30 * DAY_S


def expiry_s(name: str, anchor: Any, seconds: Any) -> int:
    """Seconds that ``name`` asks for. Raises ApiError: 400."""
    if anchor != "created_at":
        raise invalid(f"{name}.anchor must be created_at, got {shown(anchor)}", f"{name}.anchor")
    seconds = as_integer(seconds)
    if type(seconds) is not int or not HOUR_S <= seconds <= MAX_S:
        raise invalid(
            f"{name}.seconds must be an integer from {HOUR_S} to {MAX_S}, got {shown(seconds)}",
            f"{name}.seconds",
        )
    return int(seconds)


MAX_FILES_PAGE = 10_000  # maximum and default number of files in one page of the list
MAX_UPLOADS = 4  # into one router at once; with API keys, each may have half of them
MAX_FILE_BYTES = 200_000_000  # of an upload: that of OpenAI's API
UPLOAD_TIMEOUT_S = 600.0  # timeout of one upload, seconds
MAX_FILENAME = 255  # stored characters of a name, which is only shown and never used as a path
_FILE_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class FilesApi:
    """The endpoints over one store."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._uploads: Counter[str] = Counter()

    def add_to(self, routes: APIRouter) -> None:
        """Add the endpoints."""
        routes.post("/v1/files", response_model=None)(self._create)
        routes.get("/v1/files", response_model=None)(self._list)
        routes.get("/v1/files/{file_id}", response_model=None)(self._retrieve)
        routes.get("/v1/files/{file_id}/content", response_model=None)(self._content)
        routes.delete("/v1/files/{file_id}", response_model=None)(self._delete)

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
        most = MAX_UPLOADS
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
        upload = await self._resources.store.begin_upload(owner_of(request))
        try:
            form = await receive(request, upload.write, MAX_FILE_BYTES, UPLOAD_TIMEOUT_S)
            name = form.filename or ""
            shown_name = "".join(c if c.isprintable() else "_" for c in name[:MAX_FILENAME])
            changes: dict[str, Any] = {"filename": shown_name or "upload"}
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
        page = page_of(request, MAX_FILES_PAGE, MAX_FILES_PAGE)._replace(
            newest_first=order == "desc"
        )
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
    """How long the file is kept, seconds, or ``None``. Raises ApiError: 400."""
    fields = form.fields
    for name in (*fields, *form.lists):
        if name not in _FILE_FIELDS:
            raise invalid(
                f"{shown(name)} is not a known field; allowed: file, {', '.join(_FILE_FIELDS)}",
                name[:64],
            )
    purpose = fields.get("purpose")
    if purpose != "batch":
        raise invalid(f"purpose must be batch, got {shown(purpose)}", "purpose")
    anchor, seconds = fields.get(_FILE_FIELDS[1]), fields.get(_FILE_FIELDS[2])
    if anchor is None and seconds is None:
        return None
    number = int(seconds) if seconds is not None and _DIGITS.fullmatch(seconds) else seconds
    return expiry_s("expires_after", anchor, number)


MAX_BODY_BYTES = 64 << 10  # maximum body of a request to create a batch, bytes
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
"""Maximum entries of a batch's metadata, and maximum characters of their keys and values."""

MAX_BATCHES_PAGE = 100  # batches in one page of the list
_BATCH_FIELDS = (
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "output_expires_after",
)


class BatchesApi:
    """The endpoints over one store, and the runner that is notified of changes."""

    def __init__(self, resources: Resources, runner: Runner) -> None:
        self._resources = resources
        self._runner = runner

    def add_to(self, routes: APIRouter) -> None:
        """Add the endpoints."""
        routes.post("/v1/batches", response_model=None)(self._create)
        routes.get("/v1/batches", response_model=None)(self._list)
        routes.get("/v1/batches/{batch_id}", response_model=None)(self._retrieve)
        routes.post("/v1/batches/{batch_id}/cancel", response_model=None)(self._cancel)

    async def _create(self, request: Request) -> Response:
        try:
            body = parse_object(await read_body(request, MAX_BODY_BYTES))
        except ClientDisconnect:
            return Response(status_code=400)  # never read: the client has left
        store = self._resources.store
        record = self._new(owner_of(request), body)
        source = await store.ask(BatchState.file, record.owner, record.input_file_id)
        if source is None:
            raise file_not_found(record.input_file_id, "input_file_id")
        if source.purpose != "batch":
            raise invalid(
                f"input_file_id must name a file with the purpose batch, got {source.purpose}",
                "input_file_id",
            )
        await store.ask(BatchState.add_batch, record)
        self._runner.wake()
        return JSONResponse(record.shown())

    def _new(self, owner: str, body: dict[str, Any]) -> BatchRecord:
        """The batch that ``body`` asks for. Raises ApiError: 400, with the field."""
        for name in body:
            if name not in _BATCH_FIELDS:
                raise invalid(
                    f"{shown(name)} is not a known field; allowed: {', '.join(_BATCH_FIELDS)}",
                    name[:64],
                )
        config, now_s = self._resources.config, self._resources.now()
        window = _one_of(body, "completion_window", config.completion_windows)
        file_id = body.get("input_file_id")
        if not isinstance(file_id, str):
            raise invalid(
                f"input_file_id must be the id of a file, got {shown(file_id)}", "input_file_id"
            )
        return BatchRecord(
            id=f"batch_{uuid.uuid4().hex}",
            owner=owner,
            endpoint=_one_of(body, "endpoint", BATCH_PATHS),
            input_file_id=file_id,
            completion_window=window,
            metadata=_metadata(body.get("metadata")),
            created_s=now_s,
            expires_s=now_s + window_s(window),
            output_expires_s=_output_expiry_s(body.get("output_expires_after"))
            or config.retention_s,
        )

    async def _list(self, request: Request) -> dict[str, Any]:
        page = page_of(request, 20, MAX_BATCHES_PAGE)
        found = await self._resources.store.ask(BatchState.batches, owner_of(request), page)
        return listed(*found)

    async def _retrieve(self, request: Request, batch_id: str) -> dict[str, Any]:
        return (await self._batch(request, batch_id)).shown()

    async def _cancel(self, request: Request, batch_id: str) -> dict[str, Any]:
        record = await self._batch(request, batch_id)
        if record.ended or record.status is Status.FINALIZING:
            raise invalid(f"The batch cannot be cancelled any more: it is {record.status.value}.")
        await self._resources.store.ask(BatchState.cancel, batch_id)
        self._runner.wake()
        return (await self._batch(request, batch_id)).shown()

    async def _batch(self, request: Request, batch_id: str) -> BatchRecord:
        record = await self._resources.store.ask(BatchState.batch, owner_of(request), batch_id)
        if record is None:
            raise ApiError(Reason.NOT_FOUND, f"There is no batch {shown(batch_id)}.")
        return record


def _one_of(body: dict[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    value = body.get(name)
    if not isinstance(value, str) or value not in allowed:
        raise invalid(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}", name)
    return value


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if (
        not isinstance(value, dict)
        or len(value) > MAX_METADATA
        or any(
            not isinstance(text, str)
            or len(key) > MAX_METADATA_KEY
            or len(text) > MAX_METADATA_VALUE
            for key, text in value.items()
        )
    ):
        raise invalid(
            f"metadata must be an object of at most {MAX_METADATA} texts of at most "
            f"{MAX_METADATA_VALUE} characters, with keys of at most {MAX_METADATA_KEY}",
            "metadata",
        )
    return value


def _output_expiry_s(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not value.keys() <= {"anchor", "seconds"}:
        raise invalid(
            "output_expires_after must be an object with anchor and seconds",
            "output_expires_after",
        )
    return expiry_s("output_expires_after", value.get("anchor"), value.get("seconds"))


def batch_routes(
    config: RouterConfig,
    fleets: ModelRegistry,
    clients: ApiClients,
    limiter: RateLimiter,
    now: Callable[[], float] = time.time,
    telemetry: Telemetry | None = None,
) -> APIRouter:
    """The endpoints; batches run between the application's start and end. Raises OSError."""
    if config.batches.directory is None:
        return _routes_when_off()
    batch_metrics = BatchMetrics(fleets.edge.registry)
    service_class, in_flight = config.batches.service_class, config.batches.max_lines_in_flight
    resources = Resources(
        config=config.batches,
        max_line_bytes=config.max_body_bytes,
        store=Store(config.batches, config.batches.directory, now),
        caller=LineCaller(config, fleets, limiter, batch_metrics, telemetry=telemetry),
        places=LinePlaces(in_flight),
        metrics=batch_metrics,
        windows=Windows(fleets, service_class, in_flight),
        promises_only=config.classes[service_class].when_unattainable != "best_effort",
        now=now,
    )
    runner = Runner(resources, clients.holder, fleets.clock)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        runner.start()
        yield
        await runner.stop()
        await resources.store.close()

    routes = APIRouter(lifespan=lifespan)
    FilesApi(resources).add_to(routes)
    BatchesApi(resources, runner).add_to(routes)
    return routes


def _routes_when_off() -> APIRouter:
    routes = APIRouter()

    async def off(_: Request) -> Response:
        raise ApiError(
            Reason.BATCHES_OFF,
            "Files and batches are not enabled here: set router.batches.directory.",
        )

    for path in ("/v1/files", "/v1/batches"):
        for each in (path, path + "/{rest:path}"):
            routes.api_route(each, methods=["GET", "POST", "DELETE"], response_model=None)(off)
    return routes
