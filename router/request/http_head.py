"""HTTP heads as the router's server reads them: without trailers, and without headers that control
Serve.

uvicorn's parser adds trailers, the headers after a chunked body, to those of the head. A key or an
SLO there would count although a proxy in front of the router has not seen it. Serve reads headers
before the application does: it ends requests by ``x-request-timeout-seconds``, and answers 500 to
text that it cannot decode.
"""

from __future__ import annotations

from typing import Final

from uvicorn import config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

FOR_SERVE: Final = frozenset(
    (
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"x-session-id",
        b"serve-multiplexed-model-id",
    )
)
"""Headers that control Serve; also with ``_`` in place of ``-``."""

AS_TEXT: Final = frozenset((b"x-request-id", b"traceparent", b"tracestate"))
"""Headers that Serve decodes, and clients may send."""


class StrictHeadProtocol(HttpToolsProtocol):
    """uvicorn's protocol without trailers and without :data:`FOR_SERVE`."""

    _in_head = False

    def on_message_begin(self) -> None:
        """Called by the parser, like the other methods."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the head."""
        name = name.lower()
        if not self._in_head or name.replace(b"_", b"-") in FOR_SERVE:
            return
        if name in AS_TEXT and not value.isascii():
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """What follows is the body and its trailers."""
        self._in_head = False
        super().on_headers_complete()


def use_strict_heads() -> None:
    """Make servers that this process starts later use :class:`StrictHeadProtocol`. Serve has no
    setting for the protocol of its servers, those of replicas and of its own proxy."""
    config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{StrictHeadProtocol.__name__}"
