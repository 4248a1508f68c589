"""Completion windows as objectives: what is promised, and which promised batches are behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from sluice.protocol.requests import Endpoint
from sluice.router.batches.lines import Lines
from sluice.router.batches.state import BatchRecord, LineFault
from sluice.router.dispatch.models import ModelRegistry
from sluice.router.errors import ApiError
from sluice.router.request.prompt import PromptSize
from sluice.router.tenancy.limits import Client
from sluice.scheduling.placement.windows import (
    Leftover,
    Promised,
    Spare,
    behind_until_s,
    nearest_window_s,
)
from sluice.scheduling.request.job import MAX_TOKENS, RouteQuery
from sluice.scheduling.request.objective import SLO

SEEN_PART: Final = 0.05
SEEN_S: Final = 10.0
"""Share of a batch's lines, or of its time and seconds, after which its own speed tells when it
ends."""


@dataclass(frozen=True)
class Need:
    """What a batch takes of each model, engine seconds, and what is left there."""

    work_s: Mapping[str, float]
    spare: Mapping[str, Spare]

    def nearest_s(self, others: Sequence[BatchRecord], now_s: float) -> float:
        """The nearest window in which it and the ``others`` can be done."""
        return max(
            nearest_window_s(rests(others, model, now_s), work_s, self.spare[model])
            for model, work_s in self.work_s.items()
        )


def rests(batches: Iterable[BatchRecord], model: str, now_s: float) -> list[Promised]:
    """What is left of promised batches for ``model``."""
    return [
        Promised(each.expires_s - now_s, each.work_s[model] * each.rest)
        for each in batches
        if model in each.work_s and not each.cancelling
    ]


def refused(record: BatchRecord, nearest_s: float) -> LineFault:
    """Why the window of a batch cannot be promised."""
    instead = "no window could be promised now"
    if nearest_s < inf:
        instead = f"the nearest that could be promised now is {ceil(nearest_s / 60)}m"
    return LineFault(
        code="window_unattainable",
        message=f"The engine time that promised requests leave does not suffice for "
        f"completion_window {record.completion_window}: {instead}.",
        param="completion_window",
    )


class Windows:
    """Asks the controllers of the models; remembers how fast the first batch in turn is."""

    def __init__(self, fleets: ModelRegistry, service_class: str, in_flight: int) -> None:
        self._fleets = fleets
        self._class = service_class
        self._in_flight = in_flight
        self._first: tuple[str, float, float] = ("", 0.0, 0.0)

    async def need(
        self, lines: Mapping[str | None, Lines], endpoint: Endpoint, client: Client
    ) -> Need | None:
        """What a batch of ``lines`` takes; lines that no model serves take nothing. ``None``: a
        controller knows nothing yet, or does not answer."""
        work_s: dict[str, float] = {}
        spare: dict[str, Spare] = {}
        for name, own in lines.items():
            try:
                fleet = await self._fleets.find(name, client.caps.models, endpoint)
            except ApiError:
                continue
            size = PromptSize(own.characters, own.tokens)
            tokens = min(ceil(fleet.dispatcher.estimator.estimate(size) / own.number), MAX_TOKENS)
            query = self._query(tokens, own.most_tokens // own.number, client.tenant)
            found = await fleet.dispatcher.leftover(query, self._in_flight)
            if found is None:
                return None
            spare[fleet.model] = found.spare
            work_s[fleet.model] = work_s.get(fleet.model, 0.0) + own.number * found.line_s
        return Need(work_s, spare)

    async def behind(self, batches: Sequence[BatchRecord], now_s: float) -> set[str]:
        """Ids of the promised ``batches`` that will not be in time."""
        promised = sorted(
            (each for each in batches if each.work_s), key=lambda each: each.expires_s
        )
        found = set()
        for model in {model for each in promised for model in each.work_s}:
            left = await self._left(model)
            last_s = -inf if left is None else behind_until_s(rests(promised, model, now_s), left)
            found |= {each.id for each in promised if each.expires_s - now_s <= last_s}
        if promised and self._slow(promised[0], now_s):
            found.add(promised[0].id)
        return found

    async def _left(self, model: str) -> Spare | None:
        try:
            dispatcher = self._fleets.of(model).dispatcher
        except ApiError:  # it is not served any more
            return None
        found: Leftover | None = await dispatcher.leftover(self._query(1, 1, 0), self._in_flight)
        return None if found is None else found.spare

    def _slow(self, batch: BatchRecord, now_s: float) -> bool:
        """Whether the first batch in turn is late at the speed that it has had since it was."""
        name, rest, since_s = self._first
        if name != batch.id:
            self._first = batch.id, batch.rest, now_s
            return False
        done = rest - batch.rest
        seen_s = max(SEEN_S, SEEN_PART * (batch.expires_s - since_s))
        if now_s - since_s < seen_s and done < SEEN_PART:
            return False
        return (now_s - since_s) * batch.rest > done * (batch.expires_s - now_s)

    def _query(self, prompt_tokens: int, output_tokens: int, tenant: int) -> RouteQuery:
        slo = SLO(service_class=self._class)
        return RouteQuery(1, slo, prompt_tokens, output_tokens=output_tokens, tenant=tenant)
