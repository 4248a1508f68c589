"""Serves the KV of prompts over TCP to the engines that received their handles."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress

from sluice.replica.transfer.store import Kept, KeptPrompts
from sluice.replica.transfer.wire import (
    ANSWER,
    LAYOUT_BYTES,
    MAGIC,
    MALFORMED,
    OK,
    OTHER_LAYOUT,
    PROTOCOL,
    QUESTION,
    UNKNOWN,
    Handle,
    TransferError,
    receive_into,
    set_timeout,
)

logger = logging.getLogger(__name__)

_MOST_PEERS = 32
"""Max connections at once; further ones wait to be accepted."""

_QUESTION_S = 0.5
"""Timeout for the question on a new connection."""

_TICK_S = 1.0
"""Interval of dropping expired KV while there are no connections."""


class TransferServer:
    """Answers questions for KV in threads of its own.

    A client that knows a handle gets its KV, once. Any other client gets an error without further
    information. Every connection has a deadline.

    Args:
        store: the KV.
        layout: digest of the model and of the memory layout of KV; questions with another digest
            get an error.
        host: address to listen on; the system chooses the port.
        timeout_s: max time to send one prompt's KV, seconds.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, store: KeptPrompts, layout: bytes, host: str, timeout_s: float) -> None:
        if len(layout) != LAYOUT_BYTES:
            raise ValueError(f"a layout's digest has {LAYOUT_BYTES} bytes, got {len(layout)}")
        self._store = store
        self._layout = layout
        self._timeout_s = timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MOST_PEERS)
        self._listener.settimeout(_TICK_S)
        self._room = threading.BoundedSemaphore(_MOST_PEERS)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kv-server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop accepting connections. Idempotent."""
        self._closed.set()
        with suppress(OSError):
            # Closing alone would not wake a thread that is blocked in accept.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._store.drop_expired()
            if not self._room.acquire(timeout=_TICK_S):
                continue
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                self._room.release()
                if not isinstance(error, TimeoutError) and not self._closed.is_set():
                    # Possibly out of file descriptors, which may be temporary.
                    logger.warning("no connection for KV could be accepted: %s", error)
                    self._closed.wait(_TICK_S)
                continue
            threading.Thread(target=self._serve, args=(peer,), name="kv-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer, suppress(OSError, TransferError):
                self._answer(peer)
        finally:
            self._room.release()

    def _answer(self, peer: socket.socket) -> None:
        question = bytearray(QUESTION.size)
        now_s = time.monotonic()
        receive_into(peer, memoryview(question), now_s + min(_QUESTION_S, self._timeout_s))
        magic, protocol, layout, handle, first, count = QUESTION.unpack(question)
        deadline_s = time.monotonic() + self._timeout_s
        if magic != MAGIC or protocol != PROTOCOL:
            return _send(peer, MALFORMED, deadline_s)
        if layout != self._layout:
            return _send(peer, OTHER_LAYOUT, deadline_s)
        kept = self._store.take(Handle.of(handle))
        if kept is None:
            return _send(peer, UNKNOWN, deadline_s)
        try:
            if first + count > kept.blocks:
                return _send(peer, MALFORMED, deadline_s)
            _send_blocks(peer, kept, first, count, deadline_s)
        finally:
            self._store.sent(kept)
        return None


def _send(peer: socket.socket, status: int, deadline_s: float, nbytes: int = 0) -> None:
    set_timeout(peer, deadline_s)
    peer.sendall(ANSWER.pack(MAGIC, status, nbytes))


def _send_blocks(
    peer: socket.socket, kept: Kept, first: int, count: int, deadline_s: float
) -> None:
    pieces = []
    for layer in kept.layers:
        size = layer.nbytes // kept.blocks
        pieces.append(layer[first * size : (first + count) * size])
    _send(peer, OK, deadline_s, sum(piece.nbytes for piece in pieces))
    for piece in pieces:
        # The limit is on the total time of a call, not on the time per byte.
        set_timeout(peer, deadline_s)
        peer.sendall(piece)
