"""An API call as a router sends it to a replica, and the items of its response."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, NamedTuple

import msgspec

from sluice.scheduling.fleet.prefix import NO_PREFIX, PromptPrefix
from sluice.scheduling.request.job import Key, Tokens
from sluice.scheduling.request.objective import SLO

# The body of a request on its way from a router to a replica.

_DECODER = msgspec.json.Decoder(dict[str, Any])


class RequestBody(dict[str, Any]):
    """A read-only JSON object, pickled as its original bytes and the changes to them: pickling a
    list of a million token ids takes several times as long as copying its bytes."""

    __slots__ = ("_changed", "_raw", "_removed")

    def __init__(self, fields: Mapping[str, Any], raw: bytes) -> None:
        super().__init__(fields)
        self._raw = raw
        self._changed: dict[str, Any] = {}
        self._removed: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, raw: bytes) -> RequestBody:
        """The object in ``raw``. ``O(len(raw))`` under Python's global lock. Raises
        msgspec.DecodeError: no JSON object, or a number not finite; UnicodeDecodeError;
        RecursionError: nested too deeply."""
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
        """The body with these ``parts``. Raises what ``parse`` raises."""
        sent = cls.parse(raw)
        for name in removed:
            sent.pop(name, None)
        sent.update(changed)
        sent._changed, sent._removed = dict(changed), removed
        return sent

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

UNABLE = 501
"""Status of an engine that cannot give what its cache has of a prompt."""


def request_key(request_id: str) -> int:
    """The request's 63-bit key in state tables and controller messages."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Turn(NamedTuple):
    """A request as a turn of an agent. Hashes of 63 bits, the first two distinct for each owner of
    keys; 0: none.

    ``session`` is exactly one conversation: its loop and its KV. ``program`` is what the work
    counts for: the session, or the one that a sub-agent belongs to, or all conversations of one
    name, such as those of a person (``session`` may then be 0).
    ``tool``: :func:`tool_key` of the tools that the turn before has called, if this one brings
    their results. ``expected_tokens``: of output, as the client expects; 0: it does not say.
    ``final``: the client says that its session ends with this turn."""

    session: Key = 0
    program: Key = 0
    tool: Key = 0
    expected_tokens: Tokens = 0
    final: bool = False


NO_TURN = Turn()


def tool_key(names: Iterable[str]) -> int:
    """The 63-bit key of the tools that one turn calls, whatever their order and number of calls.
    It is the same for all owners; never 0."""
    text = "\n".join(sorted(set(names)))
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, person=b"tool")
    return int.from_bytes(digest.digest(), "big") >> 1 or 1


class KVHandle(NamedTuple):
    """The KV of a prompt, or of its first ``prompt_tokens``, that one replica has computed, for
    transfer to another one. ``params``: plain data that only the engines interpret; in vLLM its
    ``kv_transfer_params``."""

    replica_id: str
    params: Mapping[str, Any]
    prompt_tokens: int


class Resume(NamedTuple):
    """The part of a stream that its client has, so that another replica can resume it.
    ``token_ids``: output of the first choice; ``chunks``: tokens in each received chunk, 0 for
    none. The engine repeats these chunks, and the caller drops them; ``response_id`` is the id
    in them."""

    token_ids: tuple[int, ...]
    chunks: tuple[int, ...]
    response_id: str


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One API call for an engine. Raises ValueError: ``waited_s`` is negative or not finite.

    ``body`` is without SLO fields. ``waited_s`` is from the arrival at the edge to the sending,
    so hosts need no common clock. A ``best_effort`` request runs on what promised ones leave; if
    ``promised`` and late, it gets the time that others can spare. ``prefix`` is what the replica
    later reports as cached. ``trace`` has its W3C headers; empty: not traced.

    With ``prefill_only`` the response is a head and a tail with a ``KVHandle``, or a refusal;
    the engine first stops its request ``kv_of_request``, which has most of the KV, without a
    tail. With ``cached_only`` it gives what its cache has of the prompt. The prompt is recomputed
    if ``kv_handle`` cannot be fetched. ``resume`` is what the client has already; ``resumable``
    chunks say which tokens they carry. With ``confirm`` the first item is a ``ResponseTaken``.
    ``direct_patience_s``: the replica sends the stream to the client, and gives up when nothing is
    read for that many seconds; ``None``: the caller gets it.

    ``tenant`` is a 63-bit hash; best-effort tenants take turns by ``weight`` (> 0). ``rank`` is
    of the engine with data parallelism; ``None``: the replica chooses. ``turn``: ``None`` for a
    request that names no session and brings no tool's result. ``client``: the tenant's name in
    metrics; empty: the request is not a client's."""

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
    cached_only: bool = False
    rank: int | None = None
    turn: Turn | None = None
    client: str = ""

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
    """Precedes the head where the sender may not know which replica has the request."""

    replica_id: str


class ResponseHead(NamedTuple):
    """First item of a response. ``media_type``: without parameters, ``EVENT_STREAM`` for a
    stream. ``fetch``: where the client's side gets a direct stream, ``HOST:PORT TICKET``."""

    status: int
    media_type: str
    replica_id: str = ""
    fetch: str = ""


class ResponseChunk(NamedTuple):
    """Bytes of the body, and the first choice's output tokens in them: their number, and ids if
    resumable. The reasoning ended with the ``reasoned``-th; 0: it did not, or is not tracked.
    ``offset_s``: with stages, when they left the engine, seconds after the request came; 0:
    untracked."""

    data: bytes
    tokens: int = 0
    token_ids: tuple[int, ...] = ()
    reasoned: int = 0
    offset_s: float = 0.0


class ResponseSent(NamedTuple):
    """Chunks sent directly to the client since the last report: tokens of each, and when,
    seconds after the request came. Reasoning ended with the ``reasoned``-th of all; 0: it did
    not."""

    tokens: tuple[int, ...]
    offsets_s: tuple[float, ...]
    reasoned: int = 0


class ResponseTail(NamedTuple):
    """Last item of a response that was not cut short. Times are in seconds after the request
    reached the replica.

    ``token_offsets_s`` (of each token of the first choice) and ``reasoned`` (the token that
    ended the reasoning, from 1; 0: none, or untracked) are for plain responses only.
    ``queued_s``: until its first batch, if reported. ``kv_handle`` answers ``prefill_only``.
    ``cached_tokens``: of the prompt, in the engine's prefix cache. ``late_parts``: of a promised
    request that was late, see ``StateTable.late_parts``."""

    prompt_tokens: int
    output_tokens: int
    token_offsets_s: tuple[float, ...] = ()
    queued_s: float | None = None
    kv_handle: KVHandle | None = None
    cached_tokens: int = 0
    reasoned: int = 0
    late_parts: tuple[float, ...] = ()


ResponseItem = ResponseTaken | ResponseHead | ResponseChunk | ResponseSent | ResponseTail


class Progress(NamedTuple):
    """Whether a replica makes progress. ``hung``: its engine makes no step although requests
    wait; ``unknown``: ids in the question that it does not serve."""

    replica_id: str
    hung: bool
    unknown: tuple[str, ...] = ()


class EngineDeadError(RuntimeError):
    """The engine cannot serve any more; the replica must be replaced."""


class ClientLeftError(RuntimeError):
    """A stream that the replica sends directly to the client has no reader any more."""


class ClientStalledError(ClientLeftError):
    """The client has read nothing of such a stream for too long."""
