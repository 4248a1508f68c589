"""An issuer of tokens: it signs them, and publishes its keys over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from sluice.router.tenancy.tokens import TokenIssuer

AUDIENCE = "sluice"
RSA_KEY = rsa.generate_private_key(65_537, 2048)

Answer = tuple[int, bytes, dict[str, str]]


def ec_key(curve: ec.EllipticCurve | None = None) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(curve or ec.SECP256R1())


def published(private: Any, kid: str, **more: Any) -> dict[str, Any]:
    """A key as it is published."""
    is_rsa = isinstance(private, rsa.RSAPrivateKey)
    kind: Any = RSAAlgorithm if is_rsa else ECAlgorithm
    return {**kind.to_jwk(private.public_key(), as_dict=True), "kid": kid, **more}


class Issuer:
    """Signs with the key ``kid`` of :attr:`private`, by default the EC key ``one``.

    Attributes:
        keys: what it publishes.
        paths: of every request that it has answered.
        answer: in place of what it publishes, if there is one.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.now_s = time.time()
        self.private: dict[str, Any] = {"one": ec_key(), "rsa": RSA_KEY}
        self.keys = [published(key, kid) for kid, key in self.private.items()]
        self.paths: list[str] = []
        self.answer: Callable[[str], Answer] | None = None

    def config(self, **more: Any) -> TokenIssuer:
        fields: dict[str, Any] = {
            "issuer": self.url,
            "audience": [AUDIENCE],
            "tenant_claim": "tenant",
            "default_limits": {},
            **more,
        }
        return TokenIssuer(**fields)

    def sign(
        self,
        claims: dict[str, Any] | None = None,
        kid: str = "one",
        headers: dict[str, Any] | None = None,
        **signed: Any,
    ) -> str:
        """A token for an hour from :attr:`now_s` on. A claim ``None`` is left out."""
        usual = {"iss": self.url, "aud": AUDIENCE, "tenant": "acme", "exp": self.now_s + 3_600}
        whole = {name: value for name, value in {**usual, **(claims or {})}.items() if value}
        given = {"key": self.private.get(kid), "algorithm": "RS256" if kid == "rsa" else "ES256"}
        return jwt.encode(whole, headers={"kid": kid, **(headers or {})}, **(given | signed))

    def respond(self, path: str) -> Answer:
        self.paths.append(path)
        if self.answer is not None:
            return self.answer(path)
        found = {
            "/jwks": {"keys": self.keys},
            "/.well-known/openid-configuration": {
                "issuer": self.url,
                "jwks_uri": f"{self.url}/jwks",
            },
        }
        return 200, json.dumps(found[path]).encode(), {}


@contextmanager
def issuing() -> Iterator[Issuer]:
    """An issuer that answers in a thread, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = issuer.respond(self.path)
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        issuer = Issuer(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield issuer
        server.shutdown()
