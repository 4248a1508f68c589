"""A conversation with a real server of this process, well-behaved or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from deploy.json_http import AnswerError, JsonServer, UnreachableError, checked_address
from tests.own_ray import free_port

ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "/fine": (200, {}, b'{"a": 1}'),
    "/empty": (200, {}, b""),
    "/text": (200, {}, b"hello \x1b[31mred"),
    "/no": (403, {}, b'{"error": {"message": "not \\u001b[2J you"}}'),
    "/moved": (307, {"location": "/fine"}, b""),
}


class Handler(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["authorization"]))
        status, headers, body = ANSWERS[self.path]
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_it_answers_json_or_nothing_and_gets_the_key(address: str) -> None:
    server = JsonServer(address, "secret")
    assert server.ask("GET", "/fine") == {"a": 1}
    assert server.ask("GET", "/empty") is None
    assert ("/fine", "Bearer secret") in Handler.seen


def test_a_refusal_has_its_status_and_nothing_that_steers_a_terminal(address: str) -> None:
    with pytest.raises(AnswerError, match=r"^not  \[2J you$") as refused:
        JsonServer(address).ask("GET", "/no")
    assert refused.value.status == 403
    with pytest.raises(AnswerError, match=r"is not JSON: hello  \[31mred"):
        JsonServer(address).ask("GET", "/text")


def test_the_key_follows_no_redirect(address: str) -> None:
    Handler.seen.clear()
    with pytest.raises(AnswerError) as moved:
        JsonServer(address, "secret").ask("GET", "/moved")
    assert moved.value.status == 307
    assert [path for path, _ in Handler.seen] == ["/moved"]


def test_nobody_there() -> None:
    with pytest.raises(UnreachableError, match="refused"):
        JsonServer(f"http://127.0.0.1:{free_port()}").ask("GET", "/fine")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "head:8265",
        "ftp://head",
        "http://",
        "http://a:b",
        "http://u:p@h",
        "http://h/?q",
        "ray://h:1",
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        checked_address(address)
