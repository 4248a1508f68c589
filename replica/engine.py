"""The contract between a replica and the engine inside it.

An engine speaks OpenAI: it takes a validated request body and yields the response, so that chat
templates, tools, log probabilities and errors are the engine's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sluice.protocol.requests import EngineRequest, ResponseChunk, ResponseHead, ResponseItem
from sluice.scheduling.fleet.state import EngineState
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.roles import Role

MAX_CHUNK_BYTES = 1 << 20
"""Max chunk of a response that is not streamed: a long one blocks an event loop for a while."""


_ROWS_PER_REQUEST = 4


def table_capacity(max_live_requests: int) -> int:
    """Rows of an engine's state table: several per live request, as an API call with ``n`` > 1 is
    several sequences of the engine. The table's owner and its reports must agree on it."""
    return _ROWS_PER_REQUEST * max_live_requests


def chunks_of(data: bytes, tokens: int = 0) -> Iterator[ResponseChunk]:
    """The body of a response that is not streamed, in chunks of at most :data:`MAX_CHUNK_BYTES`;
    the last one carries its ``tokens``."""
    *starts, last = range(0, max(1, len(data)), MAX_CHUNK_BYTES)
    for start in starts:
        yield ResponseChunk(data[start : start + MAX_CHUNK_BYTES])
    yield ResponseChunk(data[last:], tokens)


async def status_of(response: AsyncIterator[ResponseItem]) -> tuple[int, bytes]:
    """The status of a response, which is read to its end, and the body of a refusal. 500 if it ends
    without a head."""
    status, body = 500, b""
    async for item in response:
        if isinstance(item, ResponseHead):
            status = item.status
        elif isinstance(item, ResponseChunk) and status != 200:
            body += item.data
    return status, body


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Constants of a running engine.

    Attributes:
        model: model name in requests. policy: name of the batch policy.
        max_model_tokens: max prompt + output. max_batch_tokens: max new tokens of a batch.
        max_sequences: max running sequences. kv_blocks: total KV blocks.
        block_tokens: tokens per block. profile: the latency model it plans with.
        preempts: it suspends a running prefill for a more urgent one.
        policy_options: of the batch policy, with defaults and with what the replica's role decides.
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
    policy_options: Mapping[str, Any] = field(default_factory=dict)


class ConfigurationError(RuntimeError):
    """The engine cannot run with its configuration: a restart does not help."""


class Engine(Protocol):
    """An inference engine with Sluice's local scheduler in it."""

    async def start(self) -> EngineInfo:
        """Load the model, profile the step time if no profile is known, and be ready."""

    def generate(self, request: EngineRequest) -> AsyncIterator[ResponseItem]:
        """Serve one request: a head, chunks, and a tail unless the response was cut short.

        Closing or cancelling the iterator aborts the request in the engine. A client's mistake is
        a head with a 4xx status and an OpenAI error body, not an exception.

        Raises:
            EngineDeadError: the engine died; items sent before stay valid.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored."""

    def set_role(self, role: Role) -> None:
        """Plan as a replica of this role does, from the next batch on. What the engine has it
        finishes, and it still serves every request that comes."""

    def state(self) -> EngineState:
        """The scheduler's state as of its last step. Cheap: no call into the engine."""

    def waits_since_s(self) -> float | None:
        """When the request that has waited longest for its next output from the engine began to
        wait, on the clock of the state; ``None``: none waits. Requests that wait for a slow
        consumer or for another engine do not count."""

    async def pulse(self) -> None:
        """Return after the next iteration of the engine's loop, whether or not there are requests.
        While the engine is stalled this waits."""

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body, and as ``endpoints`` the names of those that the engine
        offers. If adapters are loaded from a directory, ``digests`` has those of their files."""

    async def check_health(self) -> None:
        """Return if the engine is alive. A stalled engine is alive: see
        :class:`~sluice.replica.server.Watchdog`.

        Raises:
            EngineDeadError: it is dead.
        """

    async def drain(self) -> None:
        """Wait until no request is live. The caller refuses new ones."""

    async def stop(self) -> None:
        """Free everything. Idempotent."""
