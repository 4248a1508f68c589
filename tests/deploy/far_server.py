"""A server of this process that answers as a test says, for commands that talk to one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]
"""Status and body: text as it is, everything else as JSON. Status 0 breaks the connection off."""


@contextmanager
def far_server(answer: Callable[[str, str, Any], Answer]) -> Iterator[str]:
    """The address of a server that gives ``answer(method, path, body)``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"] or 0))
            status, body = answer(self.command, self.path, json.loads(raw) if raw else None)
            if status == 0:
                self.close_connection = True
                return
            told = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def do_PUT(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
