"""An API call as a router sends it to a replica, and the items of its response."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, NamedTuple

import msgspec

from sluice.scheduling.fleet.prefix import NO_PREFIX, PromptPrefix
from sluice.scheduling.request.objective import SLO

# The body of a request on its way from a router to a replica.

_DECODER = msgspec.json.Decoder(dict[str, Any])


class RequestBody(dict[str, Any]):
    """A JSON object that is pickled as its original bytes and the changes to them.

    Pickling a list of a million token ids takes several times as long as copying its bytes. Treat
    it as read-only: :meth:`with_fields` makes a changed one.
    """

    __slots__ = ("_changed", "_raw", "_removed")

    def __init__(self, fields: Mapping[str, Any], raw: bytes) -> None:
        super().__init__(fields)
        self._raw = raw
        self._changed: dict[str, Any] = {}
        self._removed: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, raw: bytes) -> RequestBody:
        """The object in ``raw``. ``O(len(raw))``; the parser keeps Python's global lock.

        Raises:
            msgspec.DecodeError: ``raw`` is no JSON object, or a number is not finite.
            UnicodeDecodeError: it is not UTF-8.
            RecursionError: it is nested too deeply for the parser.
        """
        return cls(_DECODER.decode(raw), raw)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> RequestBody:
        """A body of parsed ``fields``."""
        return cls(fields, msgspec.json.encode(fields))

    def with_fields(self, fields: Mapping[str, Any]) -> RequestBody:
        """The body with ``fields`` in place of its own. ``O(fields)``: unchanged values (the same
        objects) are sent in the original bytes."""
        body = RequestBody(fields, self._raw)
        changed = {n: v for n, v in fields.items() if n not in self or v is not self[n]}
        kept = {n: v for n, v in self._changed.items() if n in fields}
        body._changed = kept | changed
        body._removed = self._removed | (self.keys() - fields.keys())
        return body

    @property
    def parts(self) -> tuple[bytes, Mapping[str, Any], frozenset[str]]:
        """Its serialized form: the original bytes, the changed fields, and the names of the removed
        fields."""
        return self._raw, self._changed, self._removed

    @classmethod
    def of_parts(
        cls, raw: bytes, changed: Mapping[str, Any], removed: frozenset[str]
    ) -> RequestBody:
        """The body with these :attr:`parts`.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: as :meth:`parse`.
        """
        sent = cls.parse(raw)
        fields = {name: value for name, value in sent.items() if name not in removed}
        return sent.with_fields({**fields, **changed})

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestBody.of_parts, self.parts


Endpoint = Literal[
    "chat",
    "completions",
    "responses",
    "messages",
    "count_tokens",
    "embeddings",
    "classify",
    "pooling",
    "score",
    "rerank",
    "transcriptions",
    "translations",
    "tokenize",
    "detokenize",
]
"""What is asked of an engine: OpenAI's endpoints, Anthropic's messages, and vLLM's own."""

ANTHROPIC: frozenset[Endpoint] = frozenset(("messages", "count_tokens"))
"""Endpoints of Anthropic's API; the others are OpenAI's, or like them."""

SPEECH: frozenset[Endpoint] = frozenset(("transcriptions", "translations"))
"""Endpoints that transcribe or translate audio: the body has it as ``file``, bytes."""

GENERATING: frozenset[Endpoint] = SPEECH | {"chat", "completions", "responses", "messages"}
"""Endpoints that generate text: they have sampling parameters and can be streamed."""

EMBEDDING: frozenset[Endpoint] = frozenset(("embeddings", "classify", "pooling"))
"""Endpoints that answer with vectors of their inputs, which are embedded, classified or pooled."""

POOLING: frozenset[Endpoint] = EMBEDDING | {"score", "rerank"}
"""Endpoints that answer with vectors or scores; the engine counts each as an output token."""

UNSCHEDULED: frozenset[Endpoint] = frozenset(("tokenize", "detokenize", "count_tokens"))
"""Endpoints whose requests never reach an engine's scheduler: they have no SLO, and any replica
answers them."""

EVENT_STREAM = "text/event-stream"
"""Media type of a streamed response's head."""


def request_key(request_id: str) -> int:
    """The request's 63-bit key in state tables and controller messages."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class KVHandle(NamedTuple):
    """The KV of a prompt that one replica has computed, for transfer to another one.

    Attributes:
        replica_id: the replica that has it.
        params: how to fetch it, plain data that only the engines interpret; in vLLM its
            ``kv_transfer_params``.
        prompt_tokens: tokens of the prompt.
    """

    replica_id: str
    params: Mapping[str, Any]
    prompt_tokens: int


class Resume(NamedTuple):
    """The part of a streamed response that its client has received, so that another replica can
    resume it.

    Attributes:
        token_ids: the output tokens of the first choice, in order.
        chunks: how many of them each received chunk carried, in order; 0 for a chunk without
            tokens. The engine repeats these chunks, and the caller drops them.
        response_id: the request's id in these chunks.
    """

    token_ids: tuple[int, ...]
    chunks: tuple[int, ...]
    response_id: str


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One API call for an engine.

    Attributes:
        request_id: unique in the fleet.
        endpoint: which OpenAI endpoint ``body`` is for.
        body: the OpenAI request body, SLO fields removed.
        slo: its SLO.
        waited_s: seconds between its arrival at the edge and its sending; the engine adds them to
            the request's age, so hosts need no common clock.
        best_effort: it has no SLO guarantee, and runs on the capacity that guaranteed requests
            leave.
        prefix: the prefix of its prompt, by which the replica later reports what it has cached of
            it.
        trace: its W3C trace context, by header; empty: it is not traced.
        prefill_only: the engine computes only its prompt, and keeps its KV for another replica: the
            response is a head and a tail with a :class:`KVHandle`, or a refusal.
        kv_of_request: with ``prefill_only``: id of a request of this engine that has most of the
            KV. The engine stops it first, without a tail.
        kv_handle: where the KV of its prompt is. If that cannot be fetched, the engine recomputes
            the prompt.
        resume: the part of the response that its client has already; ``None``: none.
        resumable: the chunks say which tokens they carry, so that another replica can resume the
            stream.
        confirm: the first item is a :class:`ResponseTaken`, which names the replica.
        direct_patience_s: the replica sends the stream directly to the client, and gives up on a
            client that reads nothing for this long, seconds; ``None``: the caller gets the stream.
        tenant: hash of its tenant, 63 bits; best-effort requests of several tenants take turns.
            weight: of the tenant's share, > 0.
        promised: its SLO was guaranteed: if it will be late, it gets the time that other requests
            can spare.
        rank: of the replica's engine, with data parallelism; ``None``: the replica chooses.

    Raises:
        ValueError: ``waited_s`` is negative or not finite.
    """

    request_id: str
    endpoint: Endpoint
    body: dict[str, Any]
    slo: SLO
    waited_s: float = 0.0
    best_effort: bool = False
    prefix: PromptPrefix = NO_PREFIX
    trace: Mapping[str, str] = field(default_factory=dict)
    prefill_only: bool = False
    kv_handle: KVHandle | None = None
    resume: Resume | None = None
    resumable: bool = False
    tenant: int = 0
    weight: float = 1.0
    confirm: bool = False
    direct_patience_s: float | None = None
    promised: bool = False
    kv_of_request: str = ""
    rank: int | None = None

    def at(self, rank: int | None) -> EngineRequest:
        """The same request for this rank."""
        return self if rank == self.rank else replace(self, rank=rank)

    @property
    def resumed_tokens(self) -> int:
        """Output tokens that its client has received already."""
        return 0 if self.resume is None else len(self.resume.token_ids)

    def __post_init__(self) -> None:
        if not 0 <= self.waited_s < inf:
            raise ValueError(f"waited_s must be finite and at least 0, got {self.waited_s}")


class ResponseTaken(NamedTuple):
    """Comes before the head of a response if the sender may not know which replica has the
    request."""

    replica_id: str


class ResponseHead(NamedTuple):
    """First item of a response. ``media_type`` is without parameters: :data:`EVENT_STREAM` for a
    streamed response, ``text/plain`` for a transcription that is asked for as text,
    ``application/json`` for any other. ``fetch`` is where the client's side
    fetches a stream that the replica sends directly, ``HOST:PORT TICKET``."""

    status: int
    media_type: str
    replica_id: str = ""
    fetch: str = ""


class ResponseChunk(NamedTuple):
    """Bytes of the body, and the output tokens (of the first choice) that they carry: their number,
    and in a resumable stream their ids. The reasoning ended with the ``reasoned``-th of them; 0: it
    did not end, or its end is not tracked. Of a request of stages ``offset_s`` is when they left
    the engine, in seconds after the request reached the replica; 0: that is not tracked."""

    data: bytes
    tokens: int = 0
    token_ids: tuple[int, ...] = ()
    reasoned: int = 0
    offset_s: float = 0.0


class ResponseSent(NamedTuple):
    """Chunks that the replica has sent directly to the client since its last report: the output
    tokens of each, and when it was sent, in seconds after the request reached the replica.
    The reasoning ended with the ``reasoned``-th of all these tokens; 0: it did not end."""

    tokens: tuple[int, ...]
    offsets_s: tuple[float, ...]
    reasoned: int = 0


class ResponseTail(NamedTuple):
    """Last item of a response that was not cut short.

    ``token_offsets_s`` is filled for plain (not streamed) responses only: for each output token of
    the first choice, when it left the engine, in seconds after the request reached the replica.
    ``queued_s`` is the time from there to its first batch, if the engine reports it.
    ``kv_handle`` is the answer to a request for its prompt only. ``cached_tokens`` of the prompt
    were in the engine's prefix cache. ``reasoned`` is filled for plain responses only: the
    reasoning ended with this output token of the first choice, counted from 1; 0: it did not end,
    or its end is not tracked.
    """

    prompt_tokens: int
    output_tokens: int
    token_offsets_s: tuple[float, ...] = ()
    queued_s: float | None = None
    kv_handle: KVHandle | None = None
    cached_tokens: int = 0
    reasoned: int = 0


ResponseItem = ResponseTaken | ResponseHead | ResponseChunk | ResponseSent | ResponseTail


class Progress(NamedTuple):
    """A replica's answer to the question whether it makes progress.

    Attributes:
        replica_id: the replica that answers.
        hung: its engine makes no step although requests wait for one.
        unknown: ids in the question of requests that it does not serve.
    """

    replica_id: str
    hung: bool
    unknown: tuple[str, ...] = ()


class EngineDeadError(RuntimeError):
    """The engine cannot serve any more; the replica must be replaced."""


class ClientLeftError(RuntimeError):
    """A stream that the replica sends directly to the client has no reader any more."""


class ClientStalledError(ClientLeftError):
    """The client has read nothing of such a stream for too long."""
