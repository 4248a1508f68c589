"""CORS: the origins whose pages may call the API from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.router import wire
from sluice.router.ingress.access import is_for_operators


class Cors:
    """ASGI middleware outside the ingress middleware, because a browser's preflight request carries
    no key. It never allows cookies, nor the paths for operators.

    Args:
        origins: allowed ones, such as ``https://app.example``; ``*``: any.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._shared = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=wire.RESPONSE_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight request, or forward the request."""
        shared = scope["type"] == "http" and not is_for_operators(scope["path"].removesuffix("/"))
        await (self._shared if shared else self._app)(scope, receive, send)
