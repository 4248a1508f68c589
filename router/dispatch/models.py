"""The models behind the endpoint, and how a router reaches the replicas of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from sluice.protocol.requests import Endpoint
from sluice.router.dispatch.catalog import Catalog
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.dispatch.recent import Value
from sluice.router.errors import ApiError, Reason, shown
from sluice.router.metrics.instruments import RouterMetrics


class Model(NamedTuple):
    """The replicas of one model.

    Attributes:
        model: its name in requests.
        dispatcher: opens responses of its replicas.
        catalog: the models that its replicas list, and their readiness.
        metrics: of its requests.
        adapters: names of its LoRA adapters; a request names one in place of the model.
        dynamic: its replicas may list further adapters, which they load while they serve.
    """

    model: str
    dispatcher: Dispatcher
    catalog: Catalog
    metrics: RouterMetrics
    adapters: Sequence[str] = ()
    dynamic: bool = False


class ModelRegistry:
    """Every fleet by its names in requests. One per router process.

    Args:
        fleets: at least one.
        edge: metrics of requests whose model is not known yet. With a single fleet it may be that
            fleet's metrics.

    Raises:
        ValueError: there is no fleet, or two share a name.
    """

    def __init__(self, fleets: Sequence[Model], edge: RouterMetrics) -> None:
        self.edge = edge
        self._fleets = tuple(fleets)
        self._by_name: dict[str, Model] = {}
        for fleet in self._fleets:
            for name in (fleet.model, *fleet.adapters):
                if name in self._by_name:
                    raise ValueError(f"two models or adapters are called {name!r}")
                self._by_name[name] = fleet
        if not self._fleets:
            raise ValueError("there must be at least one model")

    def __iter__(self) -> Iterator[Model]:
        return iter(self._fleets)

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic seconds, the same for all fleets."""
        return self._fleets[0].dispatcher.clock

    def of(self, model: str | None, allowed: Collection[str] | None = None) -> Model:
        """The fleet that serves ``model``, the name of a model or of an adapter. ``None`` selects
        the model if there is only one. Names that are not ``allowed`` are treated as unknown.

        Raises:
            ApiError: 404; the model does not exist. 400; there are several, and none is named.
        """
        if model is None and len(self._fleets) == 1:
            model = self._fleets[0].model
        if model is None:
            raise ApiError(
                Reason.INVALID_VALUE, "model must be given: several are served here.", "model"
            )
        fleet = self._by_name.get(model)
        if fleet is None or (allowed is not None and model not in allowed):
            raise _no_model(model)
        return fleet

    async def find(
        self,
        model: str | None,
        allowed: Collection[str] | None = None,
        endpoint: Endpoint | None = None,
    ) -> Model:
        """As :meth:`of`; also the fleet whose replicas list ``model`` as an adapter. With an
        ``endpoint``, the fleet offers it, as far as is known.

        Raises:
            ApiError: as :meth:`of`. 404; the model does not offer ``endpoint``. 503; the replicas
                that might list it do not answer.
        """
        fleet = await self._named(model, allowed)
        offered = None if endpoint is None else await fleet.catalog.offers_without(endpoint)
        if offered is not None:
            raise ApiError(
                Reason.NOT_OFFERED,
                f"The model {shown(model or fleet.model)} does not offer {endpoint}; it offers "
                f"{', '.join(offered)}.",
                "model",
            )
        return fleet

    async def _named(self, model: str | None, allowed: Collection[str] | None) -> Model:
        known = model is None or model in self._by_name
        if not known and (allowed is None or model in allowed):
            for fleet in self._fleets:
                if fleet.dynamic and await fleet.catalog.lists(str(model)):
                    return fleet
        return self.of(model, allowed)

    async def exceeded(self, model: Any, tokens: int) -> int | None:
        """The maximum length of ``model`` if a prompt of ``tokens`` exceeds it; ``None`` if it does
        not, or the length or the model is unknown."""
        if model is None and len(self._fleets) == 1:
            model = self._fleets[0].model
        fleet = self._by_name.get(model) if isinstance(model, str) else None
        return None if fleet is None else await fleet.catalog.exceeded(tokens)

    async def models(self, allowed: Collection[str] | None = None) -> dict[str, Any]:
        """The OpenAI list-models body: the ``allowed`` models of every fleet with a replica that
        answers.

        Raises:
            ApiError: 503, no replica of any model answered.
        """
        found, failed = await self._ask(lambda fleet: fleet.catalog.models())
        if not found:
            raise next(iter(failed.values()))
        entries = [entry for body in found.values() for entry in body["data"]]
        if allowed is not None:
            entries = [entry for entry in entries if entry["id"] in allowed]
        return {"object": "list", "data": entries}

    async def model(self, name: str, allowed: Collection[str] | None = None) -> dict[str, Any]:
        """The OpenAI body of one model or adapter.

        Raises:
            ApiError: 404, the name is unknown or not ``allowed``. 503, no replica of the model
                answered.
        """
        listed = (await (await self.find(name, allowed)).catalog.models())["data"]
        found = next((entry for entry in listed if entry["id"] == name), None)
        if found is None:  # an adapter that its replicas do not list
            raise _no_model(name)
        entry: dict[str, Any] = found
        return entry

    async def health(self) -> dict[str, Any]:
        """Whether requests are taken: ``status`` is ``ok``, or ``degraded`` with the names of the
        models whose replicas take none.

        Raises:
            ApiError: 503, no model's replicas take any.
        """
        found, failed = await self._ask(lambda fleet: fleet.catalog.check())
        if not found:
            raise next(iter(failed.values()))
        return {"status": "degraded", "unavailable": list(failed)} if failed else {"status": "ok"}

    async def _ask(
        self, question: Callable[[Model], Coroutine[Any, Any, Value]]
    ) -> tuple[dict[str, Value], dict[str, ApiError]]:
        """Each fleet's answer, or its error, by its model's name. All are asked concurrently, so
        that the timeouts of unreachable fleets do not add up.

        Raises:
            Exception: what a question raises besides ``ApiError``.
        """
        answers = await asyncio.gather(*map(question, self._fleets), return_exceptions=True)
        found: dict[str, Value] = {}
        failed: dict[str, ApiError] = {}
        for fleet, answer in zip(self._fleets, answers, strict=True):
            if isinstance(answer, ApiError):
                failed[fleet.model] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[fleet.model] = answer
        return found, failed


def _no_model(name: str) -> ApiError:
    return ApiError(
        Reason.MODEL_NOT_FOUND,
        f"The model {shown(name)} does not exist; GET /v1/models lists those that do.",
        "model",
    )
