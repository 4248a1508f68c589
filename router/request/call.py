"""From an HTTP request to a validated call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from replica.engine import UNSCHEDULED, Endpoint
from replica.request_body import RequestBody
from router import wire
from router.config import RouterConfig
from router.errors import invalid
from router.request.arrival import Arrival
from router.request.body import parse_object, read_body
from router.request.engine_bounds import refuse_structured
from router.request.prompt_prefix import prefix_of, salted
from router.request.prompt_size import PromptSize, longest_ids, measure, output_limit
from router.request.session import session_of
from router.request.slo import SloReader
from router.request.token_limits import TokenLimits
from router.request.validation import check_body, engine_body
from router.tenancy.limits import ANYONE, Client
from router.tenancy.rate_limits import NO_CHARGE, Charge
from router.wire import NO_CLASS
from scheduling.objective import SLO
from scheduling.prefix import NO_PREFIX, PromptPrefix
from telemetry.tracing import Span

_UNCHANGED: Mapping[str, str] = {}

MAX_INLINE_BYTES = 64 << 10
"""Largest body that is parsed and checked on the event loop, bytes: some 2 ms at worst."""

_Made = TypeVar("_Made")

ModelLength = Callable[[Any, int], Awaitable[int | None]]
"""The most tokens that a model takes, where a prompt of so many exceeds them; ``None`` where it
does not, or that is not known."""


@dataclass(frozen=True, slots=True)
class Call:
    """A validated API call.

    Attributes:
        received_s: when it came, on the dispatcher's monotonic clock.
        best_effort: it asks for no promise: it runs on what the promised ones leave.
        output_tokens: the most that it may generate; 0 if only the model's length bounds it.
        session: names what it belongs to, a 63-bit hash; 0 for nothing.
        prefix: how its prompt begins.
        client: who asks.
        clamped: what the client's caps changed in what it asked, and to what, by field.
        charge: the tokens set aside for it of the client's rate.
        span: of the request, where it is traced.
        client_request_id: the client's own id of it, for lookups.
        service_tier: OpenAI's name for its class, where it named one.
    """

    request_id: str
    endpoint: Endpoint
    body: dict[str, Any]
    slo: SLO
    prompt: PromptSize
    received_s: float
    best_effort: bool = False
    output_tokens: int = 0
    session: int = 0
    prefix: PromptPrefix = NO_PREFIX
    client: Client = ANYONE
    clamped: Mapping[str, str] = field(default_factory=dict)
    charge: Charge = NO_CHARGE
    span: Span | None = None
    client_request_id: str = ""
    service_tier: str | None = None

    @property
    def scheduled(self) -> bool:
        """Whether it takes an engine's time, and so is placed and timed."""
        return self.endpoint not in UNSCHEDULED

    @property
    def model(self) -> str | None:
        """The name of a model or an adapter; ``None`` where the endpoint needs none."""
        return self.body.get("model")


async def _takes_any(_: Any, __: int) -> int | None:
    return None


class CallReader:
    """Turns a request into a validated call.

    A body over :data:`MAX_INLINE_BYTES` is parsed and checked in a thread, so that the event loop
    gets its turns between. Python's global lock limits the gain: the JSON parser does not let go
    of it while it parses a piece (:mod:`router.request.large_body`). One such body at a time: more
    threads would only compete with the loop for the lock.

    Args:
        model_length: refuses prompts of token ids that no engine of the model takes, before they
            are looked at one by one.
    """

    def __init__(self, config: RouterConfig, model_length: ModelLength = _takes_any) -> None:
        self._max_body_bytes = config.max_body_bytes
        self._objectives = SloReader(config)
        self._tokens = TokenLimits(config)
        self._fetch_media = config.fetch_media
        self._structured_output = config.structured_output
        self._keys_apart = config.prefix_sharing == "key"
        self._model_length = model_length
        self._large = asyncio.Lock()

    async def read(self, request: Request, endpoint: Endpoint) -> Call:
        """The call in ``request``.

        Raises:
            ApiError: a 4xx; nothing has reached a replica.
            starlette.requests.ClientDisconnect: the client left while it sent the body.
        """
        arrival: Arrival = request.state.arrival
        raw = await read_body(request, self._max_body_bytes, arrival.held)
        rest = (request.headers.raw, endpoint, arrival)
        if len(raw) <= MAX_INLINE_BYTES:
            return self.make(parse_object(raw), *rest)
        body = await self._in_turn(parse_object, raw)
        await self._check_length(endpoint, body)
        return await self._in_turn(self.make, body, *rest)

    async def _in_turn(self, work: Callable[..., _Made], *given: Any) -> _Made:
        """Work for a large body in a thread, one at a time, and then leave the event loop as much
        time before the next: an answer to anybody else takes several turns of the loop."""
        async with self._large:
            began_s = time.monotonic()
            try:
                return await asyncio.to_thread(work, *given)
            finally:
                await asyncio.sleep(time.monotonic() - began_s)

    async def _check_length(self, endpoint: Endpoint, body: RequestBody) -> None:
        """Refuse a prompt of more token ids than any engine of the model takes. ``O(prompts)``.

        Raises:
            ApiError: 400.
        """
        name, tokens = longest_ids(endpoint, body)
        most = await self._model_length(body.get("model"), tokens) if tokens else None
        if most is not None:
            raise invalid(
                f"{name} has {tokens} token ids; this model takes at most {most} tokens, prompt "
                "and output together",
                name,
            )

    def make(
        self,
        parsed: RequestBody,
        headers: Sequence[tuple[bytes, bytes]],
        endpoint: Endpoint,
        arrival: Arrival,
    ) -> Call:
        """The call with this parsed body and these raw headers (lower-case names).

        Raises:
            ApiError: a 4xx.
        """
        client = arrival.client
        body: dict[str, Any] = parsed
        slo, clamped, tier = SLO(service_class=NO_CLASS), _UNCHANGED, None
        if endpoint not in UNSCHEDULED:
            slo, clamped = self._objectives.read(body, headers, client.caps)
            if body.get(wire.SERVICE_TIER_FIELD) is not None:
                tier = self._objectives.tier_of(slo.service_class)
        session = session_of(body, headers, client.owner)
        check_body(endpoint, body, self._fetch_media)
        if not (self._structured_output and client.caps.structured_output):
            refuse_structured(body)
        body, shortened = self._tokens.hold(endpoint, body, client.caps)
        if self._keys_apart and endpoint not in UNSCHEDULED:
            body = salted(body, client.owner)
        return Call(
            request_id=arrival.request_id,
            endpoint=endpoint,
            body=parsed.with_fields(engine_body(body)),
            slo=slo,
            prompt=measure(endpoint, body),
            received_s=arrival.received_s,
            output_tokens=output_limit(endpoint, body),
            session=session,
            prefix=prefix_of(endpoint, body),
            client=client,
            clamped={**clamped, **shortened},
            client_request_id=arrival.client_request_id,
            service_tier=tier,
        )
