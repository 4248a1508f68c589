"""The admin API: the state of the fleet, explained routing decisions, and draining replicas.

Access is checked before, see :mod:`sluice.router.ingress.access`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from sluice.router.admin.service import FEW_DECISIONS, FORCE, MAX_DECISIONS, AdminService
from sluice.router.errors import invalid, shown
from sluice.router.ingress.access import ADMIN_PREFIX, PAGE_PATH
from sluice.router.request.arrival import Arrival, noted

# The live page: files without data, which ask the admin API for what they show.

_FOLDER = Path(__file__).with_name("static")

_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

HEADERS: Final = {
    # No content of other origins, nothing inline, and no other page may embed this one in a frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes() -> APIRouter:
    """The page and its parts.

    Raises:
        OSError: a file is missing from the installation.
    """
    routes = APIRouter()
    for file in sorted(_FOLDER.iterdir()):
        path = PAGE_PATH if file.suffix == ".html" else f"{PAGE_PATH}/{file.name}"
        _add(routes, path, file.read_bytes(), _TYPES[file.suffix])
    return routes


def _add(routes: APIRouter, path: str, content: bytes, media_type: str) -> None:
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    routes.get(path, response_model=None)(send)


_DIGITS = re.compile(r"[0-9]{1,9}")
_log = logging.getLogger(__name__)

_REPLICA_ID = re.compile(r"[!-~]{1,256}")


def admin_routes(admin_service: AdminService) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(prefix=f"{ADMIN_PREFIX}v1")

    @routes.get("/fleet", response_model=None)
    async def fleet(request: Request) -> JSONResponse:
        _check_parameters(request, ())
        return _answer(await admin_service.fleet())

    @routes.get("/decisions", response_model=None)
    async def decisions(request: Request) -> JSONResponse:
        _check_parameters(request, ("limit", "request_id"))
        found = await admin_service.decisions(_limit(request), _request_id(request))
        return _answer({"decisions": found})

    @routes.post("/replicas/{replica_id}/drain", response_model=None)
    async def drain(request: Request, replica_id: str) -> JSONResponse:
        return await change(request, replica_id, True, (FORCE,))

    @routes.delete("/replicas/{replica_id}/drain", response_model=None)
    async def reopen(request: Request, replica_id: str) -> JSONResponse:
        return await change(request, replica_id, False)

    async def change(
        request: Request, replica_id: str, to: bool, parameters: Collection[str] = ()
    ) -> JSONResponse:
        _check_parameters(request, parameters)
        if not _REPLICA_ID.fullmatch(replica_id):
            raise invalid(f"{shown(replica_id)} is not a valid replica id", "replica_id")
        told = await admin_service.drain(replica_id, to, _force(request))
        arrival: Arrival = request.state.arrival
        _log.warning(
            "replica %s was %s by the admin key %s, with %d requests left",
            replica_id,
            "drained" if to else "taken back",
            arrival.client.name,
            told["left"],
        )
        return _answer(told)

    return routes


def _answer(body: dict[str, Any]) -> JSONResponse:
    return JSONResponse(body, headers={"cache-control": "no-store"})


def _check_parameters(request: Request, known: Collection[str]) -> None:
    for name in request.query_params:
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise invalid(f"{shown(name)} is not a known parameter; allowed: {allowed}", name[:64])
    if len(request.query_params.multi_items()) > len(request.query_params):
        raise invalid("a parameter is given twice")


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(FEW_DECISIONS))
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= MAX_DECISIONS:
        raise invalid(
            f"limit must be an integer from 1 to {MAX_DECISIONS}, got {shown(text)}", "limit"
        )
    return int(text)


def _force(request: Request) -> bool:
    text = request.query_params.get(FORCE, "false")
    if text not in ("true", "false"):
        raise invalid(f"{FORCE} must be true or false, got {shown(text)}", FORCE)
    return text == "true"


def _request_id(request: Request) -> str | None:
    text = request.query_params.get("request_id")
    if text == "":
        raise invalid(
            "request_id must be an answer's x-sluice-request-id, or the x-request-id that its "
            "client sent; got nothing",
            "request_id",
        )
    return None if text is None else noted(text)
