"""From an HTTP request to a validated call."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final, TypeVar

from starlette.requests import Request

from sluice.protocol.requests import (
    SPEECH,
    UNSCHEDULED,
    Endpoint,
    RequestBody,
    Turn,
    request_key,
)
from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.errors import invalid, shown
from sluice.router.request.arrival import Arrival
from sluice.router.request.body import parse_object, read_body
from sluice.router.request.form import read_speech
from sluice.router.request.loop import Loop, loop_in, loop_of
from sluice.router.request.prompt import (
    PromptSize,
    TokenLimits,
    longest_ids,
    measure,
    output_limit,
    prefix_of,
    salted,
)
from sluice.router.request.session import SessionReader
from sluice.router.request.slo import SloReader
from sluice.router.request.validation import check_body, engine_body, refuse_structured
from sluice.router.tenancy.limits import ANYONE, NO_CHARGE, Charge, Client
from sluice.router.wire import NO_CLASS
from sluice.scheduling.fleet.prefix import NO_PREFIX, PromptPrefix
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from sluice.telemetry.tracing import Span

# The longest wait in an admission queue that a client accepts, in the llm-d router's header.
#
# That router reads it as a bound on the wait in its own queue before a request is sent to a
# replica, which can only shorten the configured one (its `pkg/epp/flowcontrol/README.md`). It is
# no end-to-end deadline. The value is a duration as in Go: numbers with units, such as ``1m30s``.

MAX_TTL_S: Final = 86_400.0  # longest wait that may be stated, seconds

_TTL_HEADER: Final = wire.QUEUE_TTL_HEADER.encode()
_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0}
_PART: Final = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ns|us|ms|s|m|h)"
_DURATION: Final = re.compile(rf"(?:{_PART}){{1,6}}")
_PARTS: Final = re.compile(_PART)


def queue_ttl_s(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """Longest wait by these raw headers, seconds; infinite if unstated. Raises ApiError: 400."""
    values = [value for name, value in headers if name == _TTL_HEADER]
    if not values:
        return inf
    if len(values) > 1:
        raise invalid(
            f"{wire.QUEUE_TTL_HEADER} must be given once, got it several times",
            wire.QUEUE_TTL_HEADER,
        )
    text = values[0].decode("latin-1").strip(" ")
    ttl_s = 0.0
    if _DURATION.fullmatch(text):
        ttl_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PARTS.findall(text))
    if not 0 < ttl_s <= MAX_TTL_S:
        raise invalid(
            f"{wire.QUEUE_TTL_HEADER} must be a duration such as 1500ms or 1m30s, more than 0 and "
            f"at most {MAX_TTL_S / 3_600:g}h, got {shown(text)}",
            wire.QUEUE_TTL_HEADER,
        )
    return ttl_s


_QUOTE_HEADER: Final = wire.QUOTE_HEADER.encode()
_TOKEN: Final = re.compile(rb"[0-9a-f]{32}")


def quote_key(token: bytes) -> int:
    """The key by which the controller knows a quote's token. Raises ApiError: 400."""
    if not _TOKEN.fullmatch(token):
        raise invalid(
            f"{wire.QUOTE_HEADER} must be the token of a quote or of an offer, 32 hexadecimal "
            f"digits, got {shown(token.decode('latin-1'))}",
            wire.QUOTE_HEADER,
        )
    return request_key(token.decode())


_UNCHANGED: Mapping[str, str] = {}
_UNSCHEDULED_SLO: Final = SLO(service_class=NO_CLASS)

MAX_AUDIO_BYTES = 25 << 20
"""Maximum size of audio to be transcribed or translated, bytes: that of OpenAI's API."""

MAX_INLINE_BYTES = 64 << 10
"""Largest body that is parsed and checked on the event loop, bytes: some 2 ms at worst."""

_Made = TypeVar("_Made")

ModelLength = Callable[[Any, int], Awaitable[int | None]]
"""A model's maximum in tokens if a prompt exceeds it; ``None``: not, or unknown."""


@dataclass(frozen=True, slots=True)
class Call:
    """A validated API call.

    ``output_tokens``: maximum; 0: the model's length. ``session``: the answer's header.
    ``affinity``: key of the requests that it goes together with, 0: none.
    ``prefix``: hashes of the prompt's beginning. ``clamped``: fields that the client's limits
    changed. ``degraded``: those that an alternative of its class changed. ``charge``: tokens
    reserved in its rate limit. ``queue_ttl_s``: longest wait it accepts, seconds. ``only``:
    replicas with their pools' roles, empty: any. ``scheduled``: it uses an engine, so is placed.
    ``takes``: the key of the quote or offer that it takes up, 0: none."""

    request_id: str
    endpoint: Endpoint
    body: dict[str, Any]
    slo: SLO
    prompt: PromptSize
    received_s: float
    best_effort: bool = False
    output_tokens: int = 0
    turn: Turn | None = None
    session: str = ""
    affinity: int = 0
    prefix: PromptPrefix = NO_PREFIX
    client: Client = ANYONE
    clamped: Mapping[str, str] = field(default_factory=dict)
    degraded: Mapping[str, str] = field(default_factory=dict)
    charge: Charge = NO_CHARGE
    span: Span | None = None
    client_request_id: str = ""
    service_tier: str | None = None
    loop: Loop | None = None
    queue_ttl_s: float = inf
    only: Mapping[str, Role] = field(default_factory=dict)
    takes: int = 0

    scheduled: bool = field(init=False)
    model: str | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheduled", self.endpoint not in UNSCHEDULED)
        object.__setattr__(self, "model", self.body.get("model"))


class CallReader:
    """Turns a request into a validated call. Bodies over :data:`MAX_INLINE_BYTES` are parsed in a
    thread, one at a time. ``model_length``: refuses long token prompts before each id is checked.
    """

    def __init__(self, config: RouterConfig, model_length: ModelLength | None = None) -> None:
        self._max_body_bytes = config.max_body_bytes
        self._objectives = SloReader(config)
        self._sessions = SessionReader(config.sessions.headers)
        classes = config.classes.items()
        self._loops = {name: each.loop for name, each in classes if each.loop is not None}
        self._tokens = TokenLimits(config)
        self._fetch_media = config.fetch_media
        self._structured_output = config.structured_output
        self._keys_apart = config.prefix_sharing == "key"
        self._model_length = model_length
        self._large = asyncio.Lock()

    async def read(self, request: Request, endpoint: Endpoint) -> Call:
        """The call in ``request``. Raises ApiError: a 4xx; nothing has reached a replica. Raises
        starlette.requests.ClientDisconnect: the client left while it sent the body."""
        arrival: Arrival = request.state.arrival
        rest = (request.headers.raw, endpoint, arrival)
        if endpoint in SPEECH:
            form = await read_speech(request, MAX_AUDIO_BYTES, arrival.held)
            return self.make(form, *rest)
        raw = await read_body(request, self._max_body_bytes, arrival.held)
        if len(raw) <= MAX_INLINE_BYTES:
            return self.make(parse_object(raw), *rest)
        body = await self.in_turn(parse_object, raw)
        await self._check_length(endpoint, body)
        return await self.in_turn(self.make, body, *rest)

    async def in_turn(self, work: Callable[..., _Made], *given: Any) -> _Made:
        """Run in a thread, one at a time, then pause for as long, so that others get answers."""
        async with self._large:
            began_s = time.monotonic()
            try:
                return await asyncio.to_thread(work, *given)
            finally:
                await asyncio.sleep(time.monotonic() - began_s)

    async def _check_length(self, endpoint: Endpoint, body: RequestBody) -> None:
        """Refuse token prompts too long for every engine. ``O(prompts)``. Raises ApiError: 400."""
        name, tokens = longest_ids(endpoint, body)
        if not tokens or self._model_length is None:
            return
        most = await self._model_length(body.get("model"), tokens)
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
        """The call with this parsed body and raw headers. Raises ApiError: a 4xx."""
        client = arrival.client
        body: dict[str, Any] = parsed
        if None in body.values():  # the default, in every field of every API
            body = {name: value for name, value in body.items() if value is not None}
        sent = dict(headers)
        slo, clamped, tier, stated = _UNSCHEDULED_SLO, _UNCHANGED, None, None
        turn, session, affinity, expected_tokens, ttl_s = None, "", 0, 0, inf
        if endpoint not in UNSCHEDULED:
            if _TTL_HEADER in sent:
                ttl_s = queue_ttl_s(headers)
            slo, clamped, stated, expected_tokens = self._objectives.read(
                body, headers, client.caps, endpoint
            )
            if body.get(wire.SERVICE_TIER_FIELD) is not None:
                tier = self._objectives.tier_of(slo.service_class)
        body = check_body(endpoint, body, self._fetch_media)
        known = self._sessions
        # Most requests name no session, and no agent calls without tools.
        names_none = known.headers.isdisjoint(sent) and known.fields.isdisjoint(body)
        loop_session = 0
        if not names_none or body.get("tools") or stated is not None:
            found = known.read(endpoint, body, headers, client.owner)
            turn, session, affinity = found
            loop_session = found.loop
        if expected_tokens:
            turn = (turn or Turn())._replace(expected_tokens=expected_tokens)
        loop: Loop | None = None
        if stated is not None:
            loop = loop_of(stated, client.owner, self._loops.get(slo.service_class))
        elif loop_session and slo.service_class in self._loops:
            loop = loop_in(slo.service_class, self._loops[slo.service_class], loop_session)
        # A sub-agent's end is not its loop's.
        if loop is not None and turn is not None and turn.final and turn.session == turn.program:
            loop = loop._replace(final=True)
        if not (self._structured_output and client.caps.structured_output):
            refuse_structured(body)
        body, shortened = self._tokens.hold(endpoint, body, client.caps)
        if self._keys_apart and endpoint not in UNSCHEDULED:
            body = salted(body, client.owner)
        prompt = measure(endpoint, body)
        if turn is not None and turn.session:
            prompt = replace(prompt, conversation=turn.session)
        return Call(
            request_id=arrival.request_id,
            endpoint=endpoint,
            body=engine_body(parsed, body),
            slo=slo,
            prompt=prompt,
            received_s=arrival.received_s,
            output_tokens=output_limit(endpoint, body),
            turn=turn,
            session=session,
            affinity=affinity,
            prefix=prefix_of(endpoint, body),
            client=client,
            clamped={**clamped, **shortened} if shortened else clamped,
            client_request_id=arrival.client_request_id,
            service_tier=tier,
            loop=loop,
            queue_ttl_s=ttl_s,
            takes=quote_key(sent[_QUOTE_HEADER]) if _QUOTE_HEADER in sent else 0,
        )
