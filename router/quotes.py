"""``POST /v1/slo/quote``: what could be promised to a request now, without serving it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from sluice.protocol.requests import Endpoint, RequestBody
from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.dispatch.models import ModelRegistry
from sluice.router.dispatch.offers import offer_shown
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.request.arrival import Arrival
from sluice.router.request.body import parse_object, read_body
from sluice.router.request.call import MAX_INLINE_BYTES, Call, CallReader
from sluice.router.request.prompt import PromptSize
from sluice.scheduling.fleet.prefix import NO_PREFIX
from sluice.scheduling.placement.quotes import LEVELS, VALID_S, Quote
from sluice.scheduling.request.job import NO_REPLICA, UNATTAINABLE

_Tokens = Annotated[int, Field(ge=1, le=wire.MAX_TOKENS)]


class SizedRequest(BaseModel):
    """A request by its size alone, in place of a body of chat completions."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt_tokens: _Tokens
    output_tokens: _Tokens | None = None
    model: str | None = None
    service_class: str | None = Field(default=None, alias=wire.CLASS)
    slo: dict[str, Any] | None = None
    hold_ms: float | None = None


@dataclass
class Quotes:
    """Answers quotes. The middleware has checked the key and counted the request."""

    config: RouterConfig
    fleets: ModelRegistry
    reader: CallReader

    async def serve(self, request: Request, endpoint: Endpoint) -> Response:
        """The quote, or its error."""
        arrival: Arrival = request.state.arrival
        try:
            raw = await read_body(request, self.config.max_body_bytes, arrival.held)
            read = partial(self._read, raw, request, endpoint, arrival)
            few = len(raw) <= MAX_INLINE_BYTES
            call, hold_ms = read() if few else await self.reader.in_turn(read)
            fleet = await self.fleets.find(call.model, arrival.client.caps.models, endpoint)
            token = secrets.token_hex(16)
            quote = await fleet.dispatcher.quote(call, token, hold_ms / 1000)
            if quote is None:
                message = "The controller, which knows what could be promised, does not answer."
                raise ApiError(Reason.CONTROLLER_DOWN, message)
            if quote.decision.reason == NO_REPLICA:
                raise ApiError(Reason.NO_REPLICA, "No replica takes requests now.")
        except ApiError as error:
            self.fleets.edge.refused(endpoint, error.reason, arrival.client)
            return error.response(endpoint)
        except ClientDisconnect:
            return Response(status_code=400)  # never read: the client has left
        return JSONResponse(document(quote, call, token, hold_ms))

    def _read(
        self, raw: bytes, request: Request, endpoint: Endpoint, arrival: Arrival
    ) -> tuple[Call, float]:
        """The call that a body asks about, and for how long it is to be held, ms."""
        body, headers = parse_object(raw), request.headers.raw
        hold_ms, caps = body.get("hold_ms"), arrival.client.caps
        hold_ms = 0.0 if hold_ms is None else hold_ms
        if type(hold_ms) not in (int, float) or not 0 <= hold_ms <= wire.MAX_OBJECTIVE_MS:
            message = f"hold_ms must be a number of milliseconds from 0 on, got {shown(hold_ms)}"
            raise invalid(message, "hold_ms")
        hold_ms = float(min(hold_ms, caps.max_hold_ms))
        if "prompt_tokens" not in body:
            return self.reader.make(body, headers, endpoint, arrival), hold_ms
        try:
            sized = SizedRequest.model_validate(dict(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"]))[:64]
            raise invalid(f"{name}: {first['msg']}", name) from None
        limits = self.config.max_prompt_tokens, caps.max_prompt_tokens
        most = min([each for each in limits if each is not None], default=sized.prompt_tokens)
        if sized.prompt_tokens > most:
            allowed = f"at most {most} with this API key, got {sized.prompt_tokens}"
            raise invalid(f"prompt_tokens must be {allowed}", "prompt_tokens")
        slo = {wire.CLASS: sized.service_class, **(sized.slo or {})}
        made = {
            "model": sized.model or self.fleets.of(None).model,
            "messages": [{"role": "user", "content": "-"}],
            wire.MAX_TOKENS_FIELD: sized.output_tokens,
            wire.SLO_FIELD: {name: value for name, value in slo.items() if value is not None},
        }
        call = self.reader.make(RequestBody.of(made), headers, endpoint, arrival)
        prompt = PromptSize(tokens=sized.prompt_tokens)
        return replace(call, prompt=prompt, prefix=NO_PREFIX), hold_ms


def document(quote: Quote, call: Call, token: str, hold_ms: float) -> dict[str, Any]:
    """A quote as its client sees it."""
    decision, names = quote.decision, (wire.TTFT, wire.TPOT, wire.E2E)
    stated = zip(names, call.slo.times_s, strict=True)
    found: dict[str, Any] = {
        "object": "slo.quote",
        wire.CLASS: call.slo.service_class,
        "admission": "refused" if decision.reason == UNATTAINABLE else decision.tier,
        "objective": {name: 1000 * time_s for name, time_s in stated if time_s is not None},
        "valid_s": VALID_S,
    }
    for name, times_s in zip(names, quote.times_s, strict=False):
        levels = zip(LEVELS, times_s, strict=True)
        found[name] = {f"{level:g}": round(1000 * time_s, 1) for level, time_s in levels}
    if quote.times_s:
        found["output_tokens"] = round(quote.output_tokens)
        split = decision.prefill_id is not None
        found["roles"] = ["prefill", decision.role] if split else [decision.role]
    if quote.held:
        found |= {"quote": token, "hold_ms": hold_ms}
    if quote.offer is not None:
        found["offer"] = offer_shown(quote.offer, call.slo, token)
    return found
