"""KV over TCP, without vLLM: who gets it, how often, and what it costs those who should not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import EngineRequest
from sluice.replica.engine import check_transfer
from sluice.replica.transfer import (
    ANSWER,
    HANDLE_BYTES,
    MAGIC,
    MALFORMED,
    OK,
    PROTOCOL,
    QUESTION,
    UNKNOWN,
    Handle,
    KeptPrompts,
    MemoryLimit,
    Offer,
    Source,
    TransferError,
    TransferServer,
    fetch,
    prompt_digest,
)
from sluice.scheduling.request.objective import SLO
from tests.examples import examples

LAYOUT = b"a model's layout"
SIZES = [6, 10]
"""Bytes of a block in each of two layers."""

LONG_S = 3600.0
"""A time-out that no test waits for."""


def layers(blocks: int, seed: int = 0) -> list[bytes]:
    return [bytes((seed + i) % 251 for i in range(blocks * size)) for size in SIZES]


def soon() -> float:
    return time.monotonic() + 120


class Side(NamedTuple):
    """A server, and what it keeps."""

    server: TransferServer
    store: KeptPrompts

    def keep(self, blocks: int) -> Handle:
        handle = Handle.new()
        assert self.store.keep(handle, [memoryview(layer) for layer in layers(blocks)], blocks)
        return handle

    def fetch(
        self,
        handle: Handle,
        first: int,
        count: int,
        sizes: list[int] = SIZES,
        layout: bytes = LAYOUT,
    ) -> list[bytearray]:
        where = Source("127.0.0.1", self.server.port, layout, handle)
        return fetch(where, first, count, sizes, soon())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), 30)

    def ask(self, data: bytes) -> bytes:
        """What the server says to raw bytes until it hangs up."""
        with self.connect() as peer:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := peer.recv(4096):
                answer += piece
            return answer


@contextmanager
def serving(timeout_s: float = LONG_S, max_bytes: int = 1 << 20) -> Iterator[Side]:
    store = KeptPrompts(max_bytes, LONG_S)
    server = TransferServer(store, LAYOUT, "127.0.0.1", timeout_s)
    try:
        yield Side(server, store)
    finally:
        server.close()


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 40), st.data())
def test_whoever_has_the_handle_gets_the_blocks_asked_for_once(blocks: int, data: Any) -> None:
    first = data.draw(st.integers(0, blocks))
    count = data.draw(st.integers(0, blocks - first))
    with serving() as side:
        handle = side.keep(blocks)
        got = side.fetch(handle, first, count)
        for layer, size, whole in zip(got, SIZES, layers(blocks), strict=True):
            assert bytes(layer) == whole[first * size : (first + count) * size]
        with pytest.raises(TransferError, match="no such KV"):
            side.fetch(handle, first, count)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": bytes(8)}, "no such KV"),
        ({"secret": bytes(16)}, "no such KV"),
        ({"layout": b"an other layout!"}, "another model"),
    ],
)
def test_a_wrong_handle_or_layout_gets_nothing_and_takes_nothing(
    change: dict[str, bytes], reason: str
) -> None:
    with serving() as side:
        handle = side.keep(3)
        layout = change.pop("layout", LAYOUT)
        with pytest.raises(TransferError, match=reason):
            side.fetch(handle._replace(**change), 0, 3, layout=layout)
        assert len(side.fetch(handle, 0, 3)) == 2


def test_what_is_not_there_is_refused_and_no_memory_is_taken_for_it() -> None:
    with serving() as side:
        with pytest.raises(TransferError, match="malformed"):
            side.fetch(side.keep(3), 2, 2)
        # Blocks of other sizes are expected: nothing is read.
        with pytest.raises(TransferError, match="48 bytes are offered where 51"):
            side.fetch(side.keep(3), 0, 3, [7, 10])


@settings(max_examples=examples(50), deadline=None)
@given(st.binary(max_size=2 * QUESTION.size))
def test_garbage_is_answered_with_an_error_or_not_at_all(data: bytes) -> None:
    with serving() as side:
        handle, answer = side.keep(1), side.ask(data)
        if len(data) < QUESTION.size:
            assert answer == b""
        else:
            magic, status, nbytes = ANSWER.unpack(answer)
            assert (magic, nbytes) == (MAGIC, 0)
            assert status != OK
        assert len(side.fetch(handle, 0, 1)) == 2, "it still serves"


def test_another_protocol_is_refused() -> None:
    with serving() as side:
        for protocol, status in ((PROTOCOL + 1, MALFORMED), (PROTOCOL, UNKNOWN)):
            question = QUESTION.pack(MAGIC, protocol, LAYOUT, bytes(HANDLE_BYTES), 0, 1)
            assert ANSWER.unpack(side.ask(question)) == (MAGIC, status, 0)


def test_a_peer_that_says_nothing_delays_no_other_and_is_left() -> None:
    with serving(timeout_s=0.05) as side:
        handle = side.keep(1)
        with side.connect() as silent:
            assert len(side.fetch(handle, 0, 1)) == 2
            assert silent.recv(1) == b""


def test_a_peer_that_reads_nothing_is_left_and_its_memory_freed() -> None:
    with serving(timeout_s=0.2, max_bytes=64 << 20) as side:
        handle = Handle.new()
        assert side.store.keep(handle, [memoryview(bytes(32 << 20))], 1)
        with side.connect() as stuck:
            stuck.sendall(QUESTION.pack(MAGIC, PROTOCOL, LAYOUT, bytes(handle), 0, 1))
            with pytest.raises(OSError):
                while stuck.send(b"x"):
                    pass
        deadline_s = soon()
        while side.store.nbytes and time.monotonic() < deadline_s:
            threading.Event().wait(0.01)
        assert side.store.nbytes == 0


@contextmanager
def impostor(answer: bytes, hang: bool = False) -> Iterator[Source]:
    """A peer that answers one question with bytes of a test's choice."""
    done = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(QUESTION.size, socket.MSG_WAITALL)
            peer.sendall(answer)
            if hang:
                done.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Source("127.0.0.1", listener.getsockname()[1], LAYOUT, Handle.new())
        done.set()
        thread.join()


PART = ANSWER.pack(MAGIC, OK, 48) + bytes(20)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "ended after 0 of"),
        (b"HTTP/1.1 400 Bad Request\r\n", "no engine of this kind"),
        (ANSWER.pack(MAGIC, OK, 1 << 60), "bytes are offered"),
        (ANSWER.pack(MAGIC, 77, 0), "unknown status 77"),
        (PART, "ended after 2 of 30"),
    ],
)
def test_a_peer_that_answers_wrongly_is_an_error(answer: bytes, reason: str) -> None:
    with impostor(answer) as where, pytest.raises(TransferError, match=reason):
        fetch(where, 0, 3, SIZES, soon())


def test_a_peer_that_stops_in_the_middle_or_is_not_there_is_an_error_in_time() -> None:
    with impostor(PART, hang=True) as where, pytest.raises(TransferError, match="timed out"):
        fetch(where, 0, 3, SIZES, time.monotonic() + 0.1)
    with pytest.raises(TransferError, match="refused"):
        fetch(where, 0, 1, SIZES, soon())


# What is kept.


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), st.integers(1, 30)),
            st.tuples(st.just("take"), st.integers(0, 30)),
            st.tuples(st.just("sent"), st.integers(0, 30)),
            st.tuples(st.just("wait"), st.integers(1, 8)),
        ),
        max_size=60,
    )
)
def test_memory_is_bounded_and_the_oldest_goes_first(steps: list[tuple[str, int]]) -> None:
    now = [0.0]
    store = KeptPrompts(100, 10.0, lambda: now[0])
    handles: list[tuple[Handle, float]] = []
    sending = []
    for what, number in steps:
        if what == "keep":
            handle = Handle.new()
            in_flight = sum(kept.nbytes for kept in sending)
            store.drop_expired()
            others = len(store)
            assert store.has_room(number) == (in_flight + number <= 100)
            held = store.keep(handle, [memoryview(bytes(number))], 1)
            assert held == (in_flight + number <= 100)
            assert held or len(store) == others, "nobody goes for what finds no room"
            if held:
                handles.append((handle, now[0]))
        elif what == "take" and handles:
            handle, since_s = handles.pop(number % len(handles))
            kept = store.take(handle)
            assert kept is None or now[0] - since_s < 10
            if kept is not None:
                sending.append(kept)
        elif what == "sent" and sending:
            store.sent(sending.pop(number % len(sending)))
        elif what == "wait":
            now[0] += number
        assert store.nbytes <= 100
    # Of those that are left, none is older than one that went.
    there = [store.take(handle) is not None for handle, _ in handles]
    assert there == sorted(there)
    now[0] += 10.0
    store.drop_expired()
    assert len(store) == 0


def test_memory_on_the_way_is_bounded() -> None:
    limit = MemoryLimit(100)
    with limit.taken(60, soon()):
        with pytest.raises(TransferError, match="no memory"), limit.taken(41, time.monotonic()):
            pass
        with limit.taken(40, soon()):
            pass
    with pytest.raises(TransferError, match="more than the limit"), limit.taken(101, soon()):
        pass


# What is handed on.

OFFER = Offer((("10.0.0.1", 80), ("fd00::1", 9)), LAYOUT, Handle.new(), 77, bytes(16))


def test_an_offer_comes_back_as_it_went() -> None:
    assert Offer.of(OFFER.to_params()) == OFFER
    assert OFFER.source(1) == Source("fd00::1", 9, LAYOUT, OFFER.handle)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"addresses": []}, r"length >= 1 - at `\$.addresses`"),
        ({"addresses": [["host.example", 80]]}, "does not appear to be an IPv4 or IPv6"),
        ({"addresses": [["10.0.0.1", 70_000]]}, r"addresses\[0\]\[1\]"),
        ({"addresses": [["10.0.0.1", True]]}, r"addresses\[0\]\[1\]"),
        ({"addresses": "10.0.0.1"}, r"\$.addresses"),
        ({"handle": [b"", b""]}, r"handle\[0\]"),
        ({"handle": 5}, r"\$.handle"),
        ({"layout": "zz"}, r"\$.layout"),
        ({"layout": "AAAA"}, r"length >= 16 - at `\$.layout`"),
        ({"prompt": None}, r"\$.prompt"),
        ({"prompt_tokens": 0}, r"`int` >= 1 - at `\$.prompt_tokens`"),
        ({"prompt_tokens": True}, r"\$.prompt_tokens"),
    ],
)
def test_what_is_no_offer_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Offer.of({**OFFER.to_params(), **change})


def test_a_secret_is_not_shown() -> None:
    assert OFFER.handle.secret.hex() not in repr(OFFER)
    assert repr(OFFER.handle.secret) not in repr(OFFER)


def test_prompts_differ_by_tokens_adapter_and_salt() -> None:
    def digest(**own: Any) -> bytes | None:
        plain = {"prompt_token_ids": [1, 2, 3], "lora_request": None, "cache_salt": None}
        return prompt_digest(SimpleNamespace(**(plain | own)))

    digests = [
        digest(),
        digest(prompt_token_ids=[1, 2, 4]),
        digest(prompt_token_ids=[1, 2]),
        digest(lora_request=SimpleNamespace(lora_name="adapter")),
        digest(cache_salt="adapter"),
    ]
    assert len({*digests, digest()}) == len(digests)
    # What else its KV depends on is not compared, so it is not transferred.
    for own in ({"mm_features": ["image"]}, {"prompt_embeds": 1}, {"prompt_token_ids": None}):
        assert digest(**own) is None


def test_an_empty_prompt_is_the_engines_to_refuse() -> None:
    """It says so as for any request; here there is only nothing to hand over."""
    for prompt in ([], "", [[1, 2]], [1, 2]):
        request = EngineRequest("r", "completions", {"prompt": prompt}, SLO(), prefill_only=True)
        check_transfer(request)
    several = EngineRequest("r", "completions", {"prompt": ["a", "b"]}, SLO(), prefill_only=True)
    with pytest.raises(RequestError, match="one prompt"):
        check_transfer(several)
