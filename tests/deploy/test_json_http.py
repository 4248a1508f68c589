from __future__ import annotations

import contextlib
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from sluice.deploy.json_http import AnswerError, JsonServer, UnreachableError, checked_address
from tests.deploy.certificate import make_certificate

ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "/fine": (200, {}, b'{"a": 1}'),
    "/empty": (200, {}, b""),
    "/text": (200, {}, b"hello \x1b[31mred"),
    "/no": (403, {}, b'{"error": {"message": "not \\u001b[2J you"}}'),
    "/moved": (307, {"location": "https://elsewhere.example/moved"}, b""),
    "/other": (404, {}, b"404: Not Found"),
    "/broken": (502, {}, b""),
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
    assert "ask at https://elsewhere.example instead" in str(moved.value)


def test_a_refusal_says_what_to_do_where_that_is_known(address: str) -> None:
    with pytest.raises(AnswerError, match="is the address right") as lost:
        JsonServer(address).ask("GET", "/other")
    assert not lost.value.passing
    with pytest.raises(AnswerError, match="Bad Gateway") as broken:
        JsonServer(address).ask("GET", "/broken")
    assert broken.value.passing


@contextmanager
def speaker(says: bytes, context: ssl.SSLContext | None = None) -> Iterator[str]:
    """HOST:PORT of a server that says the same to everybody and hangs up, perhaps in TLS."""

    class Says(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                talk = self.request
                if context is not None:
                    talk = context.wrap_socket(talk, server_side=True)
                talk.recv(65_536)
                talk.sendall(says)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Says) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def why(address: str) -> str:
    with pytest.raises(UnreachableError) as failed:
        JsonServer(address).ask("GET", "/fine")
    assert str(failed.value).isprintable()
    return str(failed.value)


def test_what_does_not_speak_http_steers_no_terminal() -> None:
    with speaker(b"SSH-2.0-Open\x1b[31m\r\n") as place:
        assert "SSH-2.0-Open [31m" in why(f"http://{place}")
    for half in (
        b"200 fine\r\ncontent-length: 9\r\n\r\nhalf",
        b"200 fine\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhalf",
        b"500 no\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhalf",
    ):
        with speaker(b"HTTP/1.1 " + half) as place:
            assert "IncompleteRead" in why(f"http://{place}")


def test_tls_on_one_side_only_is_named(address: str, tmp_path: Path) -> None:
    assert "use http://" in why(address.replace("http:", "https:"))
    certificate, _ = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    with speaker(b"", context) as place:
        assert "use https://" in why(f"http://{place}")
        assert "SSL_CERT_FILE" in why(f"https://{place}")


@pytest.mark.parametrize(
    "address",
    ["", "head:8265", "ftp://head", "http://", "http://a:b", "http://u:p@h", "http://h/?q"],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        checked_address(address)
