"""The live page: files without data, which ask the admin API for what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from sluice.router.ingress.admin_access import PAGE_PATH

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
