"""The transfer of a prompt's KV between engines: handle, offer, store, server and client.

On the wire: one fixed question, one fixed head, raw bytes; nothing is decoded into objects. The
client knows from its own layout how many bytes must come, and allocates for no other number."""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
import struct
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hmac import compare_digest
from ipaddress import ip_address
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

MAGIC = b"SluiceKV"
PROTOCOL = 1
LAYOUT_BYTES = 16  # Length of the digest of KV's model and memory layout

NAME_BYTES = 8
SECRET_BYTES = 16
HANDLE_BYTES = NAME_BYTES + SECRET_BYTES

QUESTION = struct.Struct(f"!8sH{LAYOUT_BYTES}s{HANDLE_BYTES}sII")
"""Magic, protocol, layout, handle, first block, number of blocks."""

ANSWER = struct.Struct("!8sBQ")  # Magic, status, bytes that follow

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
    """Identifies kept KV and authorises its fetch; ``secret``: 128 bits, constant-time
    comparison."""

    name: Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]

    @classmethod
    def new(cls) -> Handle:
        """A new handle that cannot be guessed."""
        return cls(secrets.token_bytes(NAME_BYTES), secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def of(cls, data: bytes) -> Handle:
        """Read :data:`HANDLE_BYTES` bytes back."""
        return cls(data[:NAME_BYTES], data[NAME_BYTES:])

    def __bytes__(self) -> bytes:
        return self.name + self.secret

    def __repr__(self) -> str:
        """Without the secret, for logs."""
        return f"Handle({self.name.hex()})"


def receive_into(peer: socket.socket, buffer: memoryview, deadline_s: float) -> None:
    """Fill ``buffer`` by ``deadline_s`` (monotonic), however slowly the peer sends. Raises
    TransferError: the connection ended early. Raises OSError: it failed, or took too long."""
    got = 0
    while got < len(buffer):
        set_timeout(peer, deadline_s)
        count = peer.recv_into(buffer[got:])
        if not count:
            raise TransferError(f"the connection ended after {got} of {len(buffer)} bytes")
        got += count


def set_timeout(peer: socket.socket, deadline_s: float) -> None:
    """Bound ``peer``'s next operation. Raises TimeoutError: ``deadline_s`` has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    peer.settimeout(left_s)


class Kept(NamedTuple):
    """The KV of one prompt: the bytes of each layer, block after block, until a monotonic time."""

    secret: bytes
    layers: tuple[memoryview, ...]
    blocks: int
    until_s: float

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(layer.nbytes for layer in self.layers)


class KeptPrompts:
    """KV by handle, each given away once; without memory or time the oldest is dropped.
    Thread-safe. ``max_bytes`` includes KV that is being sent, until ``sent``."""

    def __init__(
        self, max_bytes: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._bytes = 0
        # The part of it that is being sent: this memory cannot be reused yet.
        self._sending = 0

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, handle: Handle, layers: Sequence[memoryview], blocks: int) -> bool:
        """Keep a prompt's KV; returns whether there is memory for it at all."""
        kept = Kept(handle.secret, tuple(layers), blocks, self._clock() + self._keep_s)
        with self._lock:
            self._drop_expired()
            if self._sending + kept.nbytes > self._max_bytes:
                return False
            while self._bytes + kept.nbytes > self._max_bytes:
                self._drop_oldest()
            self._kept[handle.name] = kept
            self._bytes += kept.nbytes
        return True

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` could be kept; KV that is being sent cannot be dropped."""
        return self._sending + nbytes <= self._max_bytes

    def take(self, handle: Handle) -> Kept | None:
        """``handle``'s KV; ``None``: none, or a wrong secret. Its memory counts until ``sent``."""
        with self._lock:
            self._drop_expired()
            kept = self._kept.get(handle.name)
            if kept is None or not compare_digest(kept.secret, handle.secret):
                return None
            self._sending += kept.nbytes
            return self._kept.pop(handle.name)

    def sent(self, kept: Kept) -> None:
        """The KV that :meth:`take` returned is no longer needed."""
        with self._lock:
            self._bytes -= kept.nbytes
            self._sending -= kept.nbytes

    def drop_expired(self) -> None:
        """Free KV that was kept for too long. :meth:`take` and :meth:`keep` do that, too."""
        with self._lock:
            self._drop_expired()

    def _drop_expired(self) -> None:
        now_s = self._clock()
        # All are kept equally long, so the oldest expires first.
        while self._kept and next(iter(self._kept.values())).until_s <= now_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, kept = self._kept.popitem(last=False)
        self._bytes -= kept.nbytes


class Source(NamedTuple):
    """Where the KV of a prompt is: an address, the layout that it must have, and its handle."""

    host: str
    port: int
    layout: bytes
    handle: Handle


class MemoryLimit:
    """Memory that several threads share. A thread that needs more than is left waits."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int, deadline_s: float) -> Iterator[None]:
        """Hold ``nbytes`` in this context. Raises TransferError: too many, or not free in time."""
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
    """Blocks ``first`` to ``first + count`` of each layer, of ``layer_bytes`` bytes each, one
    buffer a layer. Raises TransferError: the KV is not there, has another layout, or is late."""
    expected = count * sum(layer_bytes)
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TransferError("no time left to connect")
    try:
        # A dead host does not answer.
        address = source.host, source.port
        with socket.create_connection(address, min(1.0, left_s)) as peer:
            question = (MAGIC, PROTOCOL, source.layout, bytes(source.handle), first, count)
            set_timeout(peer, deadline_s)
            peer.sendall(QUESTION.pack(*question))
            answer = bytearray(ANSWER.size)
            receive_into(peer, memoryview(answer), deadline_s)
            magic, status, nbytes = ANSWER.unpack(answer)
            if magic != MAGIC:
                raise TransferError("the peer is no engine of this kind")
            if status != OK:
                raise TransferError(REASONS.get(status, f"unknown status {status}"))
            if nbytes != expected:
                raise TransferError(f"{nbytes} bytes are offered where {expected} are needed")
            layers = [bytearray(count * size) for size in layer_bytes]
            for layer in layers:
                receive_into(peer, memoryview(layer), deadline_s)
            return layers
    except OSError as error:
        raise TransferError(f"{source.host}:{source.port}: {error or type(error).__name__}") from (
            error
        )


DIGEST_BYTES = 16


_Port = Annotated[int, Meta(gt=0, lt=65_536)]


class Offer(msgspec.Struct, frozen=True):
    """KV kept for another engine: address of each worker by tensor-parallel rank, digest of model
    and memory layout, handle, and the tokens and the ``prompt_digest`` of the prompt, or of the
    beginning that was cached."""

    addresses: Annotated[tuple[tuple[str, _Port], ...], Meta(min_length=1, max_length=1024)]
    layout: Annotated[bytes, Meta(min_length=LAYOUT_BYTES, max_length=LAYOUT_BYTES)]
    handle: Handle
    prompt_tokens: Annotated[int, Meta(ge=1)]
    prompt: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]

    def __post_init__(self) -> None:
        for host, _ in self.addresses:
            ip_address(host)  # a name would need a lookup, which no time-out covers

    def to_params(self) -> dict[str, Any]:
        """As vLLM's ``kv_transfer_params``: plain data."""
        return {"do_remote_prefill": True, **msgspec.to_builtins(self)}

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Offer:
        """Read it back. Raises ValueError: ``params`` is no output of :meth:`to_params`."""
        try:
            return msgspec.convert(params, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    def source(self, rank: int) -> Source:
        """Where the worker of this rank fetches its part."""
        host, port = self.addresses[rank]
        return Source(host, port, self.layout, self.handle)


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes of a block of vLLM's KV cache in one worker, of all layers."""
    return sum(
        group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    )


def prompt_digest(request: Any, tokens: int | None = None) -> bytes | None:
    """Digest of what the KV of a prompt, or of its first ``tokens``, depends on besides the model:
    tokens, adapter, cache salt. ``None``: also on images or embeddings, and not transferred."""
    if request.prompt_token_ids is None or getattr(request, "mm_features", None):
        return None
    if getattr(request, "prompt_embeds", None) is not None:
        return None
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    lora = request.lora_request
    for part in (request.cache_salt, None if lora is None else lora.lora_name):
        digest.update(repr(part).encode())
    digest.update(array("q", request.prompt_token_ids[:tokens]).tobytes())
    return digest.digest()


logger = logging.getLogger(__name__)

_MAX_PEERS = 32  # Max connections at once; further ones wait to be accepted


_TICK_S = 1.0  # Interval of dropping expired KV while there are no connections


class TransferServer:
    """Answers questions for KV in threads of its own; without a handle with an error only.
    ``timeout_s``: to send one prompt's KV. Raises OSError: it cannot listen on ``host``."""

    def __init__(self, store: KeptPrompts, layout: bytes, host: str, timeout_s: float) -> None:
        if len(layout) != LAYOUT_BYTES:
            raise ValueError(f"a layout's digest has {LAYOUT_BYTES} bytes, got {len(layout)}")
        self._store = store
        self._layout = layout
        self._timeout_s = timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_PEERS)
        self._listener.settimeout(_TICK_S)
        self._room = threading.BoundedSemaphore(_MAX_PEERS)
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
        receive_into(peer, memoryview(question), now_s + min(0.5, self._timeout_s))
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
            pieces = []
            for layer in kept.layers:
                size = layer.nbytes // kept.blocks
                pieces.append(layer[first * size : (first + count) * size])
            _send(peer, OK, deadline_s, sum(piece.nbytes for piece in pieces))
            for piece in pieces:
                # The limit is on the total time of a call, not on the time per byte.
                set_timeout(peer, deadline_s)
                peer.sendall(piece)
        finally:
            self._store.sent(kept)
        return None


def _send(peer: socket.socket, status: int, deadline_s: float, nbytes: int = 0) -> None:
    set_timeout(peer, deadline_s)
    peer.sendall(ANSWER.pack(MAGIC, status, nbytes))
