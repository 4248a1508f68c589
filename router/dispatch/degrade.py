"""Degrading by consent: what a class accepts of a request that cannot be promised as asked.

The request is asked about as it is, then with each alternative. The controller declines what it
cannot promise, and counts nothing of it. Without any promise the request is handled as if its class
accepted nothing, so a class without alternatives has no cost."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from sluice.protocol.requests import RequestBody
from sluice.router.config import Alternative, RouterConfig
from sluice.router.dispatch.models import Model, ModelRegistry
from sluice.router.errors import ApiError
from sluice.router.request.call import Call
from sluice.router.request.prompt import output_limit, outputs_of, prefix_of, shortened
from sluice.scheduling.request.job import RouteDecision

_THINKING = "thinking_token_budget"
"""vLLM's field, of chats and completions."""


class Placed(NamedTuple):
    """The call as it is served, by which model, and its promise if it has one."""

    call: Call
    model: Model
    decision: RouteDecision | None = None


class Degrading:
    """The alternatives of all classes; one per router process."""

    def __init__(self, config: RouterConfig, models: ModelRegistry) -> None:
        self.classes = {n: each.accepts for n, each in config.classes.items() if each.accepts}
        """Alternatives by class, of the classes that have any."""
        self._models = models

    def applies(self, call: Call) -> bool:
        """Whether a call of these classes may be degraded. A turn of a loop keeps what its loop was
        promised, and what takes up a quote or an offer has another objective or none."""
        placed = call.scheduled and not call.best_effort and not call.takes
        return placed and call.slo.stated and call.loop is None

    async def place(self, call: Call, model: Model) -> Placed:
        """A promise for the call as asked, or for its first alternative that has one."""
        for alternative in (None, *self.classes[call.slo.service_class]):
            asked = call if alternative is None else degraded(call, alternative)
            found = None if asked is None else await self._model_of(asked, call, model)
            if asked is None or found is None:
                continue
            decision = await found.dispatcher.promised(asked)
            if decision is None:  # the controller does not answer
                break
            if decision.replica_id is not None:
                return Placed(asked, found, decision)
        return Placed(call, model)

    async def _model_of(self, changed: Call, call: Call, model: Model) -> Model | None:
        """The model of a changed call; ``None`` if it cannot serve it."""
        if changed.model == call.model:
            return model
        if call.only:
            return None  # another model has other replicas
        try:
            found = await self._models.find(changed.model, call.client.caps.models, call.endpoint)
        except ApiError:  # unknown to this key, or without this endpoint
            return None
        output = changed.output_tokens // outputs_of(call.endpoint, changed.body)
        tokens = found.dispatcher.estimator.estimate(call.prompt) + output
        return None if await found.catalog.exceeded(tokens) is not None else found


def degraded(call: Call, alternative: Alternative) -> Call | None:
    """The call with an alternative; ``None`` if it asks for no more already."""
    slo, body, applied = call.slo, dict(call.body), dict[str, str]()
    if not slo.stages:
        for name, own_s in zip(("ttft", "tpot", "e2e"), slo.times_s, strict=True):
            wanted_ms = getattr(alternative, f"{name}_ms")
            if wanted_ms is not None and own_s is not None and wanted_ms > 1e3 * own_s:
                slo = structs.replace(slo, **{f"{name}_s": wanted_ms / 1e3})
                applied[f"{name}_ms"] = f"{wanted_ms:.15g}"
    if alternative.max_tokens is not None:
        shorter = shortened(call.endpoint, body, alternative.max_tokens)
        if shorter is not body:
            body, applied["max_tokens"] = shorter, str(alternative.max_tokens)
    budget = alternative.thinking_tokens
    if budget is not None and call.endpoint in ("chat", "completions"):
        stated = body.get(_THINKING)
        if not isinstance(stated, int) or stated > budget:
            body[_THINKING], applied["thinking_tokens"] = budget, str(budget)
    if alternative.model is not None and body.get("model") != alternative.model:
        body["model"] = applied["model"] = alternative.model
    if not applied:
        return None
    if isinstance(call.body, RequestBody):
        body = call.body.with_fields(body)
    return replace(
        call,
        slo=slo,
        body=body,
        output_tokens=output_limit(call.endpoint, body),
        prefix=prefix_of(call.endpoint, body) if "model" in applied else call.prefix,
        degraded=applied,
    )
