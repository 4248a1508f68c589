"""A collector of spans: it takes OTLP over HTTP, as an OpenTelemetry collector does."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(ThreadingHTTPServer):
    """``spans`` holds the name of the service and the span of each that came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.spans: list[tuple[str, Span]] = []
        self.authorizations: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def of_trace(self, trace: str) -> dict[str, tuple[str, Span]]:
        return {
            span.name: (service, span)
            for service, span in list(self.spans)
            if span.trace_id.hex() == trace
        }


class _Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        export = ExportTraceServiceRequest.FromString(raw)
        self.server.authorizations.add(self.headers.get("authorization"))
        for group in export.resource_spans:
            named = {each.key: each.value.string_value for each in group.resource.attributes}
            for scope in group.scope_spans:
                self.server.spans += [(named["service.name"], span) for span in scope.spans]
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
