"""The wire protocol of a KV transfer: one fixed question, one fixed head, raw bytes.

Nothing is decoded into objects. The client knows from its own layout how many bytes must come, and
allocates no memory for any other number.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from typing import NamedTuple

MAGIC = b"SluiceKV"
PROTOCOL = 1
LAYOUT_BYTES = 16
"""Length of the digest of KV's model and memory layout."""

NAME_BYTES = 8
SECRET_BYTES = 16
HANDLE_BYTES = NAME_BYTES + SECRET_BYTES

QUESTION = struct.Struct(f"!8sH{LAYOUT_BYTES}s{HANDLE_BYTES}sII")
"""Magic, protocol, layout, handle, first block, number of blocks."""

ANSWER = struct.Struct("!8sBQ")
"""Magic, status, bytes that follow."""

OK = 0
UNKNOWN = 1
"""There is no such KV: it never existed, was fetched or has expired; or the secret is wrong."""
OTHER_LAYOUT = 2
MALFORMED = 3

REASONS = {
    UNKNOWN: "no such KV: unknown, fetched or expired",
    OTHER_LAYOUT: "the KV is of another model or layout",
    MALFORMED: "the question was malformed",
}


class TransferError(Exception):
    """KV could not be fetched; the message gives the reason."""


class Handle(NamedTuple):
    """Identifies kept KV, and authorises its holder to fetch it. ``secret`` is 128 random bits,
    compared in constant time; ``name`` only finds the entry."""

    name: bytes
    secret: bytes

    @classmethod
    def new(cls) -> Handle:
        """A new handle that cannot be guessed."""
        return cls(secrets.token_bytes(NAME_BYTES), secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def of(cls, data: bytes) -> Handle:
        """Read it back.

        Raises:
            ValueError: ``data`` has another length.
        """
        if len(data) != HANDLE_BYTES:
            raise ValueError(f"a handle has {HANDLE_BYTES} bytes, got {len(data)}")
        return cls(data[:NAME_BYTES], data[NAME_BYTES:])

    def __bytes__(self) -> bytes:
        return self.name + self.secret

    def __repr__(self) -> str:
        """Without the secret, for logs."""
        return f"Handle({self.name.hex()})"


def receive_into(peer: socket.socket, buffer: memoryview, deadline_s: float) -> None:
    """Fill ``buffer``, by ``deadline_s`` of the monotonic clock at the latest, however slowly the
    peer sends.

    Raises:
        TransferError: the connection ended early.
        OSError: the connection failed, or it took too long.
    """
    got = 0
    while got < len(buffer):
        set_timeout(peer, deadline_s)
        count = peer.recv_into(buffer[got:])
        if not count:
            raise TransferError(f"the connection ended after {got} of {len(buffer)} bytes")
        got += count


def set_timeout(peer: socket.socket, deadline_s: float) -> None:
    """Have the next operation of ``peer`` end by ``deadline_s``.

    Raises:
        TimeoutError: the deadline has passed.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    peer.settimeout(left_s)
