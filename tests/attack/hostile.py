"""Hostile HTTP requests as bytes, by a seed: broken framing, odd headers and hostile bodies.

Most are a valid request with one defect: a request with many defects fails at the first check.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from sluice.router import wire
from sluice.router.request.arrival import INFERENCE_PATHS
from sluice.router.request.session import SESSION_HEADERS

PATHS = (*INFERENCE_PATHS, "/v1/models", "/health", "/v1/files", "/v1/batches", "/v1/responses/x")

SPEECH_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")

NUMBERS = (
    *("-1", "0", "-0", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e-400", "0x10", "1_0"),
    *(
        "9" * 400,
        "-" + "9" * 40,
        "1.5",
        "٣",
        "\u0661\u0662",
        "²",
        "true",
        "null",
        '"5"',
        "[]",
        "{}",
    ),
    *("0.001", "86400000", "86400000.1", "00012", "+5", " 7", "1,5", "1e3", ""),
)
"""Texts that a parser might accept as a number, and invalid numbers."""

TEXTS = (
    *("", "\x00", "\ud800", "\ufeff", "\u202e", "é" * 9, "a" * 9_000, "../../etc/passwd", "%00"),
    *("'; drop table", "${x}", "{{x}}", "\r\nset-cookie: a=b", "😀" * 300, "null", "\x1b[31m"),
)

HEADER_VALUES = (
    *(b"", b"\xff\xfe", "é".encode(), b"\x00", b"a\rb", b"a\nb", b"\t", b"a" * 9_000, b"1\x7f2"),
    *(text.encode("utf-8", "replace") for text in NUMBERS),
)

HEADERS = (
    *(name.encode() for names in wire.SLO_HEADER_SETS for name in names.values()),
    *(name.encode() for each in SESSION_HEADERS for name in each[:3] if name),
    *(wire.QUEUE_TTL_HEADER.encode(), b"x-slo-", b"x-slo-unknown"),
    *(b"authorization", b"host"),
    *(b"content-type", b"content-encoding", b"content-length", b"transfer-encoding", b"expect"),
    *(b"connection", b"upgrade", b"traceparent", b"x-request-id", b"accept-encoding", b"te"),
    *(b"range", b"if-none-match", b"cookie", b"x-forwarded-for", b"forwarded", b"trailer"),
)

FIELDS = (
    *("model", "messages", "prompt", "input", "tokens", "stream", "n", "max_tokens", "slo"),
    *("max_completion_tokens", "temperature", "top_p", "stop", "logit_bias", "tools", "priority"),
    *("response_format", "logprobs", "top_logprobs", "user", "service_tier", "vllm_xargs", "seed"),
    *("kv_transfer_params", "request_id", "stream_options", "cache_salt", "best_of", "echo"),
    *("nvext", "metadata", "prompt_cache_key", "safety_identifier"),
)

Chance = random.Random


_FORM = b"content-type: multipart/form-data; boundary=B"
_PART = b'--B\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n'
_FILE = b'--B\r\ncontent-disposition: form-data; name="file"; filename="%b"\r\n\r\n{}\r\n'
_END = b"--B--\r\n"

_BOMB = gzip.compress(bytes(1 << 22), mtime=0)
"""Four kilobytes that decompress to four megabytes."""


class Raw(NamedTuple):
    """Bytes for one connection.

    Attributes:
        kind: the defect.
        parts: written one after the other.
        cut: the client half-closes the connection at once.
        whole: the server can see that the request is complete, so it must answer and close.
    """

    kind: str
    parts: tuple[bytes, ...]
    cut: bool = False
    whole: bool = False


class Target(NamedTuple):
    """The server under test. ``headers``, such as a key, are sent with every request."""

    model: str
    headers: tuple[bytes, ...] = ()


def requests(target: Target, count: int, seed: int = 0) -> Iterator[Raw]:
    """``count`` requests, equal for equal arguments. Each kind is equally frequent."""
    kinds = list(_KINDS)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        # A generator of its own: each request can be reproduced without those before it.
        made = _KINDS[kind](Maker(target, random.Random(f"{seed}/{number}")))
        yield made if isinstance(made, Raw) else Raw(kind, (made,), whole=kind in _WHOLE)


class Maker:
    """Makes a request to ``target`` by ``chance``; ``path`` is the endpoint for its body."""

    def __init__(self, target: Target, chance: Chance) -> None:
        self.target = target
        self.chance = chance
        self.path = chance.choice(list(INFERENCE_PATHS))

    def body(self) -> dict[str, Any]:
        """A body that :attr:`path` answers."""
        body: dict[str, Any] = {"model": self.target.model}
        match INFERENCE_PATHS[self.path]:
            case "embeddings" | "classify" | "pooling" | "responses":
                return {**body, "input": "hello"}
            case "score":
                return {**body, "queries": "hello", "documents": ["one", "two"]}
            case "rerank":
                return {**body, "query": "hello", "documents": ["one", "two"]}
            case "detokenize":
                return {**body, "tokens": [1, 2]}
            case "tokenize":
                return {**body, "prompt": "hello"}
            case "completions":
                body["prompt"] = "hello"
            case _:
                body["messages"] = [{"role": "user", "content": "hello"}]
        stream = self.chance.random() < 0.3
        return {**body, "max_tokens": self.chance.randint(1, 4), "stream": stream}

    def any_path(self) -> bytes:
        """A path that is served."""
        return self.chance.choice(PATHS).encode()

    def request(
        self,
        *headers: bytes,
        line: bytes | None = None,
        body: bytes | None = None,
        length: bool = True,
        close: bool = True,
    ) -> bytes:
        """A request, valid if the arguments are."""
        line = b"POST " + self.path.encode() + b" HTTP/1.1" if line is None else line
        if body is None and self.path in SPEECH_PATHS:
            body = _PART % (b"model", self.target.model.encode()) + _FILE % b"a" + _END
            headers = (_FORM, *headers)
        body = json.dumps(self.body()).encode() if body is None else body
        own = [b"host: sluice", *self.target.headers]
        own += [b"content-length: %d" % len(body)] if length else []
        own += [b"connection: close"] if close else []
        return b"\r\n".join((line, *own, *headers, b"", body))

    def nested(self) -> Any:
        """A value of JSON, hostile in its shape."""
        pick = self.chance
        shape = pick.randrange(5)
        value: Any = pick.choice((None, True, -1, 1e308, 2**70, *TEXTS[:4]))
        if shape < 3:
            for _ in range(pick.choice((1, 3, 70))):
                value = [value] if pick.random() < 0.5 else {pick.choice(TEXTS): value}
            return value
        if shape == 3:
            return [value] * pick.choice((0, 1, 5_000))
        return {f"k{index}": value for index in range(pick.choice((0, 1, 5_000)))}


def _fields(make: Maker) -> bytes:
    body = make.body()
    for _ in range(make.chance.randint(1, 3)):
        body[make.chance.choice(FIELDS)] = make.nested()
    return make.request(body=json.dumps(body).encode())


def _numbers(make: Maker) -> bytes:
    """Not by json.dumps: some values must be invalid JSON."""
    pick = make.chance
    name = pick.choice((*FIELDS, *(f"slo.{key}" for key in (*wire.SLO_HEADERS, wire.STAGES))))
    outer, _, inner = name.partition(".")
    text = pick.choice(NUMBERS) or "-"
    value = f'{{"{inner}": {text}}}' if inner else text
    rest = {key: value for key, value in make.body().items() if key != outer}
    body = json.dumps(rest)[:-1] + f', "{outer}": {value}}}'
    return make.request(body=body.encode())


def _objectives(make: Maker) -> bytes:
    names = make.chance.choices(HEADERS[:8], k=make.chance.randint(1, 3))
    return make.request(*(n + b": " + make.chance.choice(HEADER_VALUES) for n in names))


def _json(make: Maker) -> bytes:
    pick = make.chance
    good = json.dumps(make.body()).encode()
    deep = pick.choice((65, 1_000, 100_000))
    body = pick.choice(
        (
            b"[" * deep,
            b'{"a":' * deep,
            b"[" * deep + b"]" * deep,
            good[: pick.randrange(len(good))],
            good + good,
            good.decode().encode("utf-16"),
            b"\xef\xbb\xbf" + good,
            good.replace(b"hello", b"\xc3\x28\xff"),
            good.replace(b"hello", b"\\ud800"),
            good.replace(b'"model"', b'"model": "x", "model"'),
            b"{" + b'"a":0,' * 120_000 + b'"b":1}',
            b"9" * 100_000,
            b"",
        )
    )
    return make.request(body=body)


def _headers(make: Maker) -> bytes:
    pick = make.chance
    odd = pick.choice(
        (
            [pick.choice(HEADERS) + b": " + pick.choice(HEADER_VALUES) for _ in range(4)],
            [b"x-a: b"] * pick.choice((100, 10_000)),
            [b"x-a: " + b"a" * pick.choice((1_000, 70_000))],
            [b"no colon"],
            [b": no name"],
            [b"x y: space in a name"],
            ["é: ü".encode(), b"\xff: \xff"],
            [b"x-a: one", b" folded"],
            [b"x-slo-ttft-ms: 5", b"X-SLO-TTFT-MS: 6"],
            [b"expect: 100-continue"],
            [b"x" * 10_000 + b": a"],
        )
    )
    return make.request(*odd)


def _line(make: Maker) -> bytes:
    pick = make.chance
    method = pick.choice((b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"TRACE", b"X" * 300, b""))
    path = make.any_path()
    address = pick.choice(
        (
            path,
            b"http://sluice" + path,
            b"//" + path,
            b"*",
            b"sluice:443",
            path + b"/..%2f..%2fmetrics",
            path + b"?" + b"a=b&" * 2_000,
            path + b"%00",
            path + "é".encode(),
            path + b"\xff",
            path + b"#/metrics",
            b"/" + b"a" * 70_000,
            b"/v1/batches/" + bytes(pick.randrange(33, 127) for _ in range(30)),
            b"/v1/files/%2e%2e%2f%2e%2e/content",
        )
    )
    version = pick.choice((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"http/1.1", b""))
    return make.request(line=b" ".join((method, address, version)), body=b"")


def _length(make: Maker) -> bytes:
    length = make.chance.choice(
        (
            *(b"-1", b"+5", b"5, 5", b"5,6", b"9" * 30, b"0x5", b"1e1", b" ", b"5\x00"),
            *(b"0", b"3", b"1000000", b"999999999999", "\u0665".encode()),
        )
    )
    again = (b"content-length: 4",) if make.chance.random() < 0.3 else ()
    return make.request(b"content-length: " + length, *again, length=False)


def _chunks(make: Maker) -> bytes:
    pick = make.chance
    body = json.dumps(make.body()).encode()
    good = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    one_by_one = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    chunks = pick.choice(
        (
            good,
            one_by_one,
            good.replace(b"0\r\n\r\n", b"0\r\nx-slo-class: batch\r\n\r\n"),
            b"-5\r\n" + good,
            b"0x5\r\n" + good,
            b"f" * 30 + b"\r\n" + good,
            b"5;" + b"a" * 70_000 + b"\r\n" + good,
            good.replace(b"\r\n", b"\n"),
            b"zz\r\n\r\n",
            good[:-5],
        )
    )
    coding = pick.choice((b"chunked", b"chunked", b"chunked, identity", b"xchunked", b"gzip"))
    return make.request(b"transfer-encoding: " + coding, body=chunks, length=False)


def _smuggled(make: Maker) -> bytes:
    inner = b"GET /metrics HTTP/1.1\r\nhost: sluice\r\n\r\n"
    framing = make.chance.choice(
        (
            (b"content-length: %d" % (len(inner) + 5), b"transfer-encoding: chunked"),
            (b"transfer-encoding: chunked", b"content-length: 5"),
            (b"transfer-encoding: chunked", b"transfer-encoding: identity", b"content-length: 5"),
            (b"transfer-encoding : chunked", b"content-length: 5"),
            (b"transfer-encoding:\x0bchunked", b"content-length: 5"),
            (b"x: y\ntransfer-encoding: chunked", b"content-length: 5"),
            (b"content-length: 5", b"content-length: %d" % (len(inner) + 5)),
        )
    )
    return make.request(*framing, body=b"0\r\n\r\n" + inner, length=False, close=False)


def _cut(make: Maker) -> Raw:
    whole = make.request(close=make.chance.random() < 0.5)
    return Raw("cut", (whole[: make.chance.randrange(len(whole))],), cut=True)


def _slices(make: Maker) -> Raw:
    whole = make.request()
    places = sorted(make.chance.sample(range(1, len(whole)), 5))
    parts = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    return Raw("slices", tuple(parts), whole=True)


def _bytes(make: Maker) -> bytes:
    pick = make.chance
    data = bytearray(make.request())
    for _ in range(pick.choice((1, 1, 3, 20))):
        place = pick.randrange(len(data))
        match pick.randrange(4):
            case 0:
                data[place] = pick.randrange(256)
            case 1:
                del data[place : place + pick.randint(1, 8)]
            case 2:
                data[place:place] = bytes(pick.randrange(256) for _ in range(pick.randint(1, 8)))
            case _:
                data[place:place] = data[place : place + pick.randint(1, 40)]
    return bytes(data)


def _pipelined(make: Maker) -> bytes:
    lines = [b"GET " + make.any_path() + b" HTTP/1.1" for _ in range(make.chance.randint(1, 20))]
    return b"".join(make.request(line=line, body=b"", close=False) for line in lines) + (
        make.request()
    )


def _upgrade(make: Maker) -> bytes:
    socket = (
        b"upgrade: websocket",
        b"sec-websocket-version: 13",
        b"sec-websocket-key: " + b"A" * 22,
    )
    line = b"GET " + make.any_path() + b" HTTP/1.1"
    return make.chance.choice(
        (
            make.request(b"connection: upgrade", *socket, line=line, body=b"", close=False),
            make.request(b"connection: upgrade, http2-settings", b"upgrade: h2c", close=False),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",
            bytes(make.chance.randrange(256) for _ in range(500)) + b"\r\n\r\n",
            b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n" + make.request(),
        )
    )


def _encoded(make: Maker) -> bytes:
    coding = make.chance.choice((b"gzip", b"br", b"identity, gzip", b"deflate", b"x" * 500))
    return make.request(b"content-encoding: " + coding, body=_BOMB)


def _upload(make: Maker) -> bytes:
    pick = make.chance
    name = pick.choice(TEXTS).encode("utf-8", "replace")
    file = _FILE % name
    body = pick.choice(
        (
            _PART % (b"purpose", b"batch") + file + _END,
            _PART % (b"purpose", name) + file + _END,
            _PART % (b"model", b"m") + _PART % (b"slo[%b" % name, name) + file + _END,
            _PART % (name, b"x" * 5_000) + _END,
            _PART % (b"a", b"b") * 100 + _END,
            file + file + _END,
            file[: pick.randrange(len(file))],
            b"--B\r\n" * 1_000,
        )
    )
    media = pick.choice((_FORM, b"content-type: multipart/form-data", b"content-type: text/plain"))
    path = pick.choice(("/v1/files", *SPEECH_PATHS)).encode()
    return make.request(media, line=b"POST " + path + b" HTTP/1.1", body=body)


_KINDS: dict[str, Callable[[Maker], bytes | Raw]] = {
    "valid": lambda make: make.request(),
    "fields": _fields,
    "numbers": _numbers,
    "objectives": _objectives,
    "json": _json,
    "headers": _headers,
    "line": _line,
    "length": _length,
    "chunks": _chunks,
    "smuggled": _smuggled,
    "cut": _cut,
    "slices": _slices,
    "bytes": _bytes,
    "pipelined": _pipelined,
    "upgrade": _upgrade,
    "encoded": _encoded,
    "upload": _upload,
}

_WHOLE = frozenset(("valid", "fields", "numbers", "json", "encoded"))
"""Kinds of which only the body is hostile."""


# Sends hostile requests to a running server and notes the responses. A response is wrong if it is
# a 5xx (except a 503 with Retry-After) or if the connection hangs.


PATIENCE_S = 0.3
"""Silence of the server after which the client half-closes its connection, seconds: many of the
requests announce more bytes than they have."""

HANG_S = 100.0
"""Further silence after which a connection counts as hung, seconds. A router waits 30 s for the
rest of a body."""

MAX_ANSWER = 8 << 20

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Response(NamedTuple):
    """Status and head of one response; status 0: not HTTP."""

    status: int
    head: bytes

    @property
    def failed(self) -> bool:
        """An overloaded router sends a 503 with Retry-After, which is no failure."""
        turned_away = self.status == 503 and b"\r\nretry-after:" in self.head.lower()
        return self.status == 0 or (self.status >= 500 and not turned_away)


class Answer(NamedTuple):
    """The bytes that came back on a connection; ``hung``: the server neither sent nor closed."""

    raw: bytes
    hung: bool

    @property
    def statuses(self) -> list[int]:
        """Of every response, in order; 0 for bytes that are not HTTP."""
        return [response.status for response in responses(self.raw)]


class Found(NamedTuple):
    """By kind, how many were sent and the statuses of all responses; and what was wrong."""

    sent: Counter[str]
    statuses: defaultdict[str, Counter[int]]
    bad: list[tuple[Raw, Answer]]


async def attack(port: int, given: Iterable[Raw], at_once: int = 16) -> Found:
    """Send every one of ``given`` on a connection of its own, ``at_once`` at a time."""
    found = Found(Counter(), defaultdict(Counter), [])
    waiting = iter(given)

    async def work() -> None:
        for raw in waiting:
            answer = await send(port, raw)
            found.sent[raw.kind] += 1
            found.statuses[raw.kind].update(answer.statuses)
            if answer.hung or any(response.failed for response in responses(answer.raw)):
                found.bad.append((raw, answer))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return found


async def send(port: int, raw: Raw) -> Answer:
    """The server's answer to ``raw`` until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = bytearray()
    hung = False
    try:
        for part in raw.parts:
            writer.write(part)
            async with asyncio.timeout(HANG_S):
                await writer.drain()
        if raw.cut:
            writer.write_eof()
        said_end = raw.cut or raw.whole
        while len(got) < MAX_ANSWER:
            try:
                async with asyncio.timeout(HANG_S if said_end else PATIENCE_S):
                    data = await reader.read(1 << 16)
            except TimeoutError:
                if said_end:
                    raise
                said_end = True
                writer.write_eof()
                continue
            if not data:
                break
            got += data
    except TimeoutError:
        hung = True
    except OSError:
        pass  # a server may close the connection instead of reading a request
    finally:
        writer.transport.abort()
    return Answer(bytes(got), hung)


def responses(raw: bytes) -> list[Response]:
    """Every response in ``raw``; one of status 0 ends the list where the bytes are not HTTP."""
    found: list[Response] = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        match = _STATUS.match(head)
        if match is None:
            return [*found, Response(0, head)]
        status = int(match[1])
        found.append(Response(status, head))
        length = _LENGTH.search(head)
        if status < 200 or status in (204, 304):
            raw = rest
        elif length is not None:
            # A response to HEAD has a length and no body, and is the last on its connection.
            raw = rest[int(length[1]) :]
        elif b"chunked" in head.lower():
            raw = _after_chunks(rest)
        else:
            return found
    return found


def _after_chunks(raw: bytes) -> bytes:
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        try:
            length = int(size.partition(b";")[0], 16)
        except ValueError:
            return b""
        raw = raw[length + 2 :]
        if not length:
            return raw
    return raw


def good_request(target: Target) -> Raw:
    """A valid request, which must be served."""
    body = {"model": target.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    text = json.dumps(body).encode()
    lines = (
        *(b"POST /v1/chat/completions HTTP/1.1", b"host: sluice", b"connection: close"),
        *(*target.headers, b"content-length: %d" % len(text), b"", text),
    )
    return Raw("good", (b"\r\n".join(lines),), whole=True)
