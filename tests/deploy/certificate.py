"""A certificate of the tests' own."""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from sluice.deploy.haproxy import TLS_BIND_VARIABLE, TLS_CERTIFICATE_VARIABLE
from sluice.deploy.ray_settings import free_port


@dataclass(frozen=True)
class TlsPort:
    """The TLS port of an application: its URL, and the certificates that a client accepts."""

    url: str
    trust: ssl.SSLContext


@contextmanager
def tls_port(folder: Path) -> Iterator[TlsPort]:
    """A Ray that starts within the block has a TLS port, too. Its certificate is in ``folder``."""
    certificate, trust = make_certificate(folder)
    address = f"127.0.0.1:{free_port()}"
    variables = {TLS_CERTIFICATE_VARIABLE: str(certificate), TLS_BIND_VARIABLE: address}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield TlsPort(f"https://{address}", trust)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make_certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """``tls.crt`` for 127.0.0.1, with its ``tls.key`` beside it, and what a client trusts it by."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sluice tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    path = folder / "tls.crt"
    path.write_bytes(certificate.public_bytes(Encoding.PEM))
    path.with_suffix(".key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return path, ssl.create_default_context(cafile=str(path))
