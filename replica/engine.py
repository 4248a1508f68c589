"""The contract between a replica and its engine, which speaks OpenAI: it takes a validated body."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import EngineRequest, ResponseChunk, ResponseHead, ResponseItem
from sluice.scheduling.fleet.state import EngineState
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.roles import Role

MAX_CHUNK_BYTES = 1 << 20
"""Max chunk of a response that is not streamed: a long one blocks an event loop for a while."""


def table_capacity(max_live_requests: int) -> int:
    """Rows of an engine's state table: one for each sequence of a request (``n`` > 1)."""
    return 4 * max_live_requests


def chunks_of(data: bytes, tokens: int = 0) -> Iterator[ResponseChunk]:
    """A body in chunks of at most ``MAX_CHUNK_BYTES``; the last one carries its ``tokens``."""
    *starts, last = range(0, max(1, len(data)), MAX_CHUNK_BYTES)
    for start in starts:
        yield ResponseChunk(data[start : start + MAX_CHUNK_BYTES])
    yield ResponseChunk(data[last:], tokens)


async def status_of(response: AsyncIterator[ResponseItem]) -> tuple[int, bytes]:
    """Reads a response; its status (500 without a head) and the body of a refusal."""
    status, body = 500, b""
    async for item in response:
        if isinstance(item, ResponseHead):
            status = item.status
        elif isinstance(item, ResponseChunk) and status != 200:
            body += item.data
    return status, body


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Constants of a running engine. ``policy_options`` have defaults and what the replica's role
    decides; ``preempts``: it suspends a running prefill for a more urgent one."""

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


Forward = Callable[[ResponseChunk], bool]
"""Takes a chunk at once; false: there is no space, and it must come from the iterator."""


class Engine(Protocol):
    """An inference engine with Sluice's local scheduler in it."""

    async def start(self) -> EngineInfo:
        """Load the model, profile the step time if no profile is known, and be ready."""

    def generate(
        self, request: EngineRequest, forward: Forward | None = None
    ) -> AsyncIterator[ResponseItem]:
        """Serve one request: a head, chunks, and a tail unless the response was cut short. Chunks
        may go to ``forward`` while the iterator waits.

        Closing the iterator aborts the request. A client's mistake is a head with a 4xx status, not
        an exception. Raises EngineDeadError: the engine died; items sent before stay valid."""

    async def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored."""

    def set_role(self, role: Role) -> None:
        """Plan as this role from the next batch on, and still serve every request."""

    def state(self) -> EngineState:
        """The scheduler's state as of its last step. Cheap: no call into the engine."""

    def waits_since_s(self) -> float | None:
        """Since when the request that has waited longest waits for the engine, on the state's
        clock. Waits for a slow consumer or for another engine do not count."""

    async def pulse(self) -> None:
        """Return after the loop's next iteration, with or without requests."""

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body, and as ``endpoints`` the names of those that the engine
        offers. If adapters are loaded from a directory, ``digests`` has those of their files."""

    async def check_health(self) -> None:
        """Raises EngineDeadError: it is dead; a stalled engine is alive (``server.Watchdog``)."""

    async def drain(self) -> None:
        """Wait until no request is live. The caller refuses new ones."""

    async def stop(self) -> None:
        """Free everything. Idempotent."""


# Resuming a stream that another replica began: checks that are common to all engines.


def check_resume(request: EngineRequest) -> None:
    """Check the part to resume. Raises RequestError: several choices, or inconsistent counts."""
    resume = request.resume
    if resume is None:
        return
    body = request.body
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    choices = body.get("n") or 1
    if request.endpoint not in ("chat", "completions") or several or choices != 1:
        raise RequestError("Only a stream with one prompt and one choice can be resumed.", None)
    if not body.get("stream"):
        raise RequestError("Only a stream can be resumed.", "stream")
    if sum(resume.chunks) != len(resume.token_ids) or min(resume.chunks, default=0) < 0:
        raise RequestError(
            f"The chunks of a stream to resume carry {sum(resume.chunks)} tokens, but "
            f"{len(resume.token_ids)} are given.",
            None,
        )


# Checks of the KV transfer fields in requests.

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""vLLM's fields that say where an engine fetches KV, or which KV it gives away. A client that could
set them could make an engine connect anywhere, or take the prompt of another client."""

NOT_GIVEN = "This engine gives nothing of what its cache has of a prompt."


def check_transfer(request: EngineRequest) -> None:
    """Check the KV transfer fields of a request. Raises RequestError: it sets a field that only
    engines may set, or asks for KV but is not one prompt with one answer."""
    refuse_transfer_fields(request.body)
    if not request.prefill_only:
        if request.kv_of_request or request.cached_only:
            raise RequestError("Only a request for its prompt hands KV over.", None)
        return
    prompt = request.body.get("prompt")
    one_prompt = not isinstance(prompt, list) or len(prompt) < 2 or isinstance(prompt[0], int)
    one_choice = request.body.get("n") in (None, 1)
    if not (request.endpoint in ("chat", "completions") and one_prompt and one_choice):
        raise RequestError(
            "Prefill only is possible for a chat or a completion with one prompt and one choice.",
            None,
        )


def refuse_transfer_fields(body: Mapping[str, Any]) -> None:
    """Raises RequestError: a client's body or extra arguments name KV to fetch or to give away."""
    for name in TRANSFER_FIELDS:
        if body.get(name) is not None:
            raise RequestError(f"{name} cannot be set by clients.", name)
