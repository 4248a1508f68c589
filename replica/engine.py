"""The contract between a replica and the engine inside it.

An engine speaks OpenAI: it takes a validated request body and yields the response, so that chat
templates, tools, log probabilities and errors are the engine's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, NamedTuple, Protocol

from scheduling.latency_profile import LatencyProfile
from scheduling.objective import SLO
from scheduling.prefix import NO_PREFIX, PromptPrefix
from scheduling.state import EngineState

Endpoint = Literal["chat", "completions", "responses", "embeddings", "tokenize", "detokenize"]

UNSCHEDULED: frozenset[Endpoint] = frozenset(("tokenize", "detokenize"))
"""Endpoints whose requests never reach an engine's scheduler: they have no objective, and any
replica answers them."""

MAX_CHUNK_BYTES = 1 << 20
"""Longest chunk of a response that is not streamed: long ones take an event loop a while."""

EVENT_STREAM = "text/event-stream"
"""Media type of a streamed response's head."""


_ROWS_PER_REQUEST = 4


def table_capacity(max_live_requests: int) -> int:
    """Rows of an engine's state table: several a live request, as ``n`` > 1 makes one API call
    several sequences of the engine. The table's owner and its reports must agree on it."""
    return _ROWS_PER_REQUEST * max_live_requests


def request_key(request_id: str) -> int:
    """The request's 63-bit key in state tables and controller messages."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Handoff(NamedTuple):
    """The KV of a prompt that one replica has computed, for another one to take over.

    Attributes:
        replica_id: who has it.
        params: how to get it, plain data; what is in it is between the engines, in vLLM its
            ``kv_transfer_params``.
        prompt_tokens: of the prompt.
    """

    replica_id: str
    params: Mapping[str, Any]
    prompt_tokens: int


class Resume(NamedTuple):
    """The part of a streamed answer that its client has, so that another replica can go on.

    Attributes:
        token_ids: the output tokens of the first choice, in order.
        chunks: how many of them each chunk carried that the client has, in order; 0 for one without
            tokens. The engine gives the same chunks again, and whoever asked leaves them out.
        response_id: the request's id in those chunks.
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
        slo: its objective.
        waited_s: seconds that passed at the edge before it was sent; the engine counts the
            request's age from there, so no two hosts need the same clock.
        best_effort: nothing was promised to it; it runs on what the others leave.
        prefix: how its prompt begins, so that the replica can say later what it holds of it.
        trace: the W3C trace context that it is traced in, by header; empty: it is not traced.
        prefill_only: only its prompt is to be computed, and kept for another replica: the response
            is a head and a tail with a :class:`Handoff`, or a refusal.
        handoff: where the KV of its prompt is. Where it cannot be had, the engine computes it.
        resume: what its client has of the answer already; ``None``: nothing.
        resumable: the chunks are to say which tokens they carry, so that another replica can go on
            with the stream.
        confirm: its replica is to say that it has the request before anything else.
        direct_patience_s: its replica is to send a stream to the client itself, and gives up on a
            client that takes nothing for so long, seconds; ``None``: whoever asks gets the stream.
        tenant: whose it is, a 63-bit hash; best-effort requests of several take turns. weight: of
            the tenant's share, > 0.
        promised: its objective was promised: where it will be late, it gets what time the others
            can spare.

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
    handoff: Handoff | None = None
    resume: Resume | None = None
    resumable: bool = False
    tenant: int = 0
    weight: float = 1.0
    confirm: bool = False
    direct_patience_s: float | None = None
    promised: bool = False

    @property
    def resumed_tokens(self) -> int:
        """Output tokens that its client has already."""
        return 0 if self.resume is None else len(self.resume.token_ids)

    def __post_init__(self) -> None:
        if not 0 <= self.waited_s < inf:
            raise ValueError(f"waited_s must be finite and at least 0, got {self.waited_s}")


class ResponseTaken(NamedTuple):
    """Before the first item of a response, where who sent the request may not know which replica
    has it."""

    replica_id: str


class ResponseHead(NamedTuple):
    """First item of a response. ``media_type`` is without parameters: :data:`EVENT_STREAM` for a
    streamed response, ``application/json`` for any other. ``fetch`` is where the client's side gets
    the stream, ``HOST:PORT TICKET``, where the replica sends it itself."""

    status: int
    media_type: str
    replica_id: str = ""
    fetch: str = ""


class ResponseChunk(NamedTuple):
    """Bytes of the body, and the output tokens (of the first choice) that they carry: how many, and
    in a stream that can be resumed which. With ``reasoned`` of them the reasoning ended; 0: it did
    not, or nobody asked."""

    data: bytes
    tokens: int = 0
    token_ids: tuple[int, ...] = ()
    reasoned: int = 0


class ResponseSent(NamedTuple):
    """Chunks that the replica has sent to the client itself since it last said so: the output
    tokens of each, and when it was sent, in seconds after the request reached the replica.
    ``told``: the client's side knows which tokens, so that another replica can go on. With
    ``reasoned`` of all these tokens the reasoning ended; 0: it did not."""

    tokens: tuple[int, ...]
    offsets_s: tuple[float, ...]
    told: bool
    reasoned: int = 0


class ResponseTail(NamedTuple):
    """Last item of a response that ended by itself.

    ``token_offsets_s`` is filled for plain (not streamed) responses only: for each output token of
    the first choice, when it left the engine, in seconds after the request reached the replica.
    ``queued_s`` is the time from there to the first batch that it was in, where the engine tells.
    ``handoff`` is the answer to a request for its prompt only. ``cached_tokens`` are those of the
    prompt that the engine had in its prefix cache. ``reasoned`` is filled for plain responses only:
    with so many output tokens of the first choice the reasoning ended; 0: it did not, or nobody
    asked.
    """

    prompt_tokens: int
    output_tokens: int
    token_offsets_s: tuple[float, ...] = ()
    queued_s: float | None = None
    handoff: Handoff | None = None
    cached_tokens: int = 0
    reasoned: int = 0


def chunks_of(data: bytes, tokens: int = 0) -> Iterator[ResponseChunk]:
    """The body of a response that is not streamed, in chunks of at most :data:`MAX_CHUNK_BYTES`;
    the last one carries its ``tokens``."""
    *starts, last = range(0, max(1, len(data)), MAX_CHUNK_BYTES)
    for start in starts:
        yield ResponseChunk(data[start : start + MAX_CHUNK_BYTES])
    yield ResponseChunk(data[last:], tokens)


ResponseItem = ResponseTaken | ResponseHead | ResponseChunk | ResponseSent | ResponseTail


class Progress(NamedTuple):
    """What a replica says when it is asked whether it goes on.

    Attributes:
        replica_id: who says it.
        hung: its engine makes no step although requests wait for one.
        unknown: of the requests that it was asked about, those that it does not serve.
    """

    replica_id: str
    hung: bool
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine lives.

    Attributes:
        model: name that requests use. policy: name of the batch policy.
        max_model_tokens: longest prompt + output. max_batch_tokens: token limit of a batch.
        max_sequences: most running sequences. kv_blocks: KV blocks in all.
        block_tokens: tokens per block. profile: the latency model it plans with.
        preempts: it suspends a running prefill for a more urgent one.
    """

    model: str
    policy: str
    max_model_tokens: int
    max_batch_tokens: int
    max_sequences: int
    kv_blocks: int
    block_tokens: int
    profile: LatencyProfile
    preempts: bool = False


class EngineDeadError(RuntimeError):
    """The engine cannot serve any more; the replica must be replaced."""


class ClientLeftError(RuntimeError):
    """Nobody takes a stream any more that the replica sends to the client itself."""


class ClientStalledError(ClientLeftError):
    """The client has taken nothing of such a stream for too long."""


class ConfigurationError(RuntimeError):
    """The engine cannot run as it is configured: to start it again does not help."""


class Engine(Protocol):
    """An inference engine with Sluice's local scheduler in it."""

    async def start(self) -> EngineInfo:
        """Load the model, profile the step time if no profile is known, and be ready."""

    def generate(self, request: EngineRequest) -> AsyncIterator[ResponseItem]:
        """Serve one request: a head, chunks, and a tail where it ended by itself.

        Closing or cancelling the iterator aborts the request in the engine. A client's mistake is
        a head with a 4xx status and an OpenAI error body, not an exception.

        Raises:
            EngineDeadError: the engine died; items sent before stay valid.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored."""

    def state(self) -> EngineState:
        """The scheduler's state as of its last step. Cheap: no call into the engine."""

    def waits_since_s(self) -> float | None:
        """Since when that request waits for the engine which has waited longest for its next
        output, on the clock of the state; ``None``: none does. Who waits for a slow consumer, or
        for another engine, does not count."""

    async def pulse(self) -> None:
        """Return when the engine's loop has gone round, whether or not there are requests. While it
        stands still this waits."""

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body."""

    async def check_health(self) -> None:
        """Return if the engine is alive. One that stands still is: see
        :class:`~replica.watchdog.Watchdog`.

        Raises:
            EngineDeadError: it is not.
        """

    async def drain(self) -> None:
        """Wait until no request is live. New ones are the caller's to refuse."""

    async def stop(self) -> None:
        """Free everything. Idempotent."""
