"""Fetches the KV of a prompt from the engine that computed it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from sluice.replica.transfer.wire import (
    ANSWER,
    MAGIC,
    OK,
    PROTOCOL,
    QUESTION,
    REASONS,
    Handle,
    TransferError,
    receive_into,
    set_timeout,
)

_CONNECT_S = 1.0
"""Timeout of a connection attempt, seconds: a dead host does not answer."""


class Source(NamedTuple):
    """Where the KV of a prompt is: an address, the layout that it must have, and its handle."""

    host: str
    port: int
    layout: bytes
    handle: Handle


class MemoryLimit:
    """Memory that several threads share. A thread that needs more than is left waits.

    Args:
        max_bytes: total memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int, deadline_s: float) -> Iterator[None]:
        """Hold ``nbytes`` for as long as the context lasts.

        Raises:
            TransferError: ``nbytes`` is more than the total, or was not free in time.
        """
        if nbytes > self._max_bytes:
            raise TransferError(f"{nbytes} bytes of KV are more than the limit, {self._max_bytes}")
        with self._changed:
            left_s = deadline_s - time.monotonic()
            fits = self._changed.wait_for(
                lambda: self._used + nbytes <= self._max_bytes, max(0.0, left_s)
            )
            if not fits:
                raise TransferError("no memory for the KV became free in time")
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


def fetch(
    source: Source, first: int, count: int, layer_bytes: Sequence[int], deadline_s: float
) -> list[bytearray]:
    """Blocks ``first`` to ``first + count`` of each layer, one buffer a layer.

    Args:
        layer_bytes: bytes of one block in each layer.
        deadline_s: when the fetch must be complete, monotonic seconds.

    Raises:
        TransferError: the KV is not there, has another layout, or did not arrive in time.
    """
    expected = count * sum(layer_bytes)
    try:
        with _connected(source, deadline_s) as peer:
            question = (MAGIC, PROTOCOL, source.layout, bytes(source.handle), first, count)
            set_timeout(peer, deadline_s)
            peer.sendall(QUESTION.pack(*question))
            _check_answer(peer, expected, deadline_s)
            layers = [bytearray(count * size) for size in layer_bytes]
            for layer in layers:
                receive_into(peer, memoryview(layer), deadline_s)
            return layers
    except OSError as error:
        raise TransferError(f"{source.host}:{source.port}: {error or type(error).__name__}") from (
            error
        )


def _connected(source: Source, deadline_s: float) -> socket.socket:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TransferError("no time left to connect")
    return socket.create_connection((source.host, source.port), min(_CONNECT_S, left_s))


def _check_answer(peer: socket.socket, expected: int, deadline_s: float) -> None:
    answer = bytearray(ANSWER.size)
    receive_into(peer, memoryview(answer), deadline_s)
    magic, status, nbytes = ANSWER.unpack(answer)
    if magic != MAGIC:
        raise TransferError("the peer is no engine of this kind")
    if status != OK:
        raise TransferError(REASONS.get(status, f"unknown status {status}"))
    if nbytes != expected:
        raise TransferError(f"{nbytes} bytes are offered where {expected} are needed")
