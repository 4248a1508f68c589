"""``/v1/batches``: create, list, inspect and cancel batches of requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from sluice.router.batches.expiry import expiry_s
from sluice.router.batches.files_api import owner_of
from sluice.router.batches.paging import listed, page_of
from sluice.router.batches.records import BatchRecord, Status, new_batch_id
from sluice.router.batches.run import Resources
from sluice.router.batches.runner import Runner
from sluice.router.batches.state import BatchState, file_not_found
from sluice.router.config import window_s
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.request.arrival import BATCH_PATHS
from sluice.router.request.body import parse_object, read_body

MAX_BODY_BYTES = 64 << 10
"""Maximum body of a request to create a batch, bytes."""

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
"""Maximum entries of a batch's metadata, and maximum characters of their keys and values."""

PAGE = 20
MAX_PAGE = 100
"""Batches in one page of the list."""

_FIELDS = (
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

    def routes(self) -> APIRouter:
        """The endpoints."""
        routes = APIRouter(prefix="/v1/batches")
        routes.post("", response_model=None)(self._create)
        routes.get("", response_model=None)(self._list)
        routes.get("/{batch_id}", response_model=None)(self._retrieve)
        routes.post("/{batch_id}/cancel", response_model=None)(self._cancel)
        return routes

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
        """The batch that ``body`` asks for.

        Raises:
            ApiError: 400; the message names the field and what is allowed.
        """
        for name in body:
            if name not in _FIELDS:
                raise invalid(
                    f"{shown(name)} is not a known field; allowed: {', '.join(_FIELDS)}", name[:64]
                )
        config, now_s = self._resources.config, self._resources.now()
        window = _one_of(body, "completion_window", config.completion_windows)
        file_id = body.get("input_file_id")
        if not isinstance(file_id, str):
            raise invalid(
                f"input_file_id must be the id of a file, got {shown(file_id)}", "input_file_id"
            )
        return BatchRecord(
            id=new_batch_id(),
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
        page = page_of(request, PAGE, MAX_PAGE)
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
