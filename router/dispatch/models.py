"""The models behind the endpoint, and how a router reaches the replicas of each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from sluice.protocol.requests import Endpoint
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.dispatch.placement import retrieved
from sluice.router.errors import ApiError, Reason, shown
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.serve.contract import ReplicaFailedError, Replicas, error_of

Value = TypeVar("Value")


@dataclass(slots=True)
class Recent(Generic[Value]):
    """An answer computed at most once in ``ttl_s`` seconds and one at a time, for all callers.

    A cancelled caller does not cancel it: callers that come and leave would start it each time."""

    make: Callable[[], Awaitable[Value]]
    ttl_s: float
    clock: Callable[[], float]
    task: asyncio.Task[Value] | None = None
    made_s: float = -inf

    async def get(self) -> Value:
        """An answer that is at most ``ttl_s`` old."""
        task = self.task
        if task is None or (task.done() and self.clock() - self.made_s >= self.ttl_s):
            task = self.task = asyncio.create_task(self._run())
            task.add_done_callback(retrieved)
        return await asyncio.shield(task)

    def drop(self) -> None:
        """Something changed: later calls get a new answer."""
        self.task = None

    async def _run(self) -> Value:
        try:
            return await self.make()
        finally:
            self.made_s = self.clock()


_log = logging.getLogger(__name__)

TTL_S = 1.0  # how long an answer, or its failure, is kept, seconds
TIMEOUT_S = 2.0  # longest wait for a replica, seconds


class Catalog:
    """Asks at most one replica at a time for either answer; none if that would start a replica.

    ``names``: listed before the model has had a replica. ``dynamic``: replicas load adapters; then
    all are asked, and an adapter whose files differ between them is not listed."""

    def __init__(
        self,
        replicas: Replicas,
        names: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        dynamic: bool = False,
    ) -> None:
        self._replicas = replicas
        entries = [{"id": name, "object": "model", "owned_by": "sluice"} for name in names]
        self._listed: dict[str, Any] = {"object": "list", "data": entries}
        listed = self._agreed if dynamic else replicas.models
        self._models = Recent(lambda: self._asked(listed()), TTL_S, clock)
        self._differ: frozenset[str] = frozenset()
        self._ready = Recent(lambda: self._asked(replicas.check()), TTL_S, clock)
        self._longest: int | None = None
        self._endpoints: Sequence[str] = ()

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body, the last one while asleep. Raises ApiError: 503."""
        if not self._replicas.asleep:
            self._listed = await self._models.get()
        return self._listed

    async def lists(self, name: str) -> bool:
        """Whether a replica lists ``name``. Raises ApiError: 503, no answer or differing files."""
        found = any(entry["id"] == name for entry in (await self.models())["data"])
        if name in self._differ:
            raise ApiError(
                Reason.NO_REPLICA,
                f"The adapter {shown(name)} has other files at some replicas than at others; it is "
                "served once all have the same.",
                "model",
            )
        return found

    async def check(self) -> None:
        """Raises ApiError: 503, no replica takes requests, and a request would start none."""
        if not self._replicas.asleep:
            await self._ready.get()

    async def exceeded(self, tokens: int) -> int | None:
        """The engines' maximum length if a prompt of ``tokens`` exceeds it, else ``None``. A
        replica is asked again before a refusal: an update may have brought a larger maximum."""
        if self._longest is None or tokens > self._longest:
            with contextlib.suppress(ApiError):
                lengths = [entry.get("max_model_len") for entry in (await self.models())["data"]]
                self._longest = max(filter(None, lengths), default=None)
        return self._longest if self._longest is not None and tokens > self._longest else None

    async def offers_without(self, endpoint: Endpoint) -> Sequence[str] | None:
        """The engines' endpoints if ``endpoint`` is not one (asked again first), else ``None``."""
        if endpoint not in self._endpoints:
            with contextlib.suppress(ApiError):
                self._endpoints = (await self.models()).get("endpoints", ())
        return self._endpoints if self._endpoints and endpoint not in self._endpoints else None

    async def _agreed(self) -> dict[str, Any]:
        """The models of all replicas without the adapters whose files differ."""
        bodies = await self._replicas.all_models()
        digests: dict[str, set[str]] = {}
        for body in bodies:
            for name, digest in body.pop("digests", {}).items():
                digests.setdefault(name, set()).add(digest)
        differ = frozenset(name for name, found in digests.items() if len(found) > 1)
        for name in differ - self._differ:
            _log.warning(
                "the files of the adapter %s differ between replicas; not serving it", name
            )
        for name in self._differ - differ:
            _log.info("the files of the adapter %s are the same at all replicas again", name)
        self._differ = differ
        entries = {entry["id"]: entry for body in reversed(bodies) for entry in body["data"]}
        data = [entry for name, entry in entries.items() if name not in differ]
        return {**bodies[0], "data": data}

    async def _asked(self, question: Awaitable[Value]) -> Value:
        """A replica's answer. Raises ApiError: 503, none answered."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await question
        except TimeoutError:
            message, given_up = f"No replica answered within {TIMEOUT_S:g} seconds.", False
        except ReplicaFailedError as error:
            message, given_up = f"No replica is available: {error}", error.given_up
        failure = ReplicaFailedError(Reason.NO_REPLICA, message, given_up=given_up)
        raise error_of(failure, self._replicas)


class Model(NamedTuple):
    """The replicas of one model, and the names of its LoRA adapters, which requests name in its
    place. ``dynamic``: its replicas may load and list further adapters while they serve."""

    model: str
    dispatcher: Dispatcher
    catalog: Catalog
    metrics: RouterMetrics
    adapters: Sequence[str] = ()
    dynamic: bool = False


class ModelRegistry:
    """Every fleet by its names in requests; one per router process. ``edge``: metrics of requests
    whose model is not known. Raises ValueError: there is no fleet, or two share a name."""

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
        """The fleet of a model or adapter; ``None``: the only one. Names not ``allowed`` are
        unknown. Raises ApiError: 404; unknown. 400; there are several, and none is named."""
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
        """As :meth:`of`, also by an adapter that replicas list. Raises ApiError: as :meth:`of`;
        404: no ``endpoint`` there; 503: the replicas that might list the adapter do not answer."""
        fleet: Model | None = None
        if model is not None and model not in self._by_name:
            fleet = await self._dynamic(model, allowed)
        if fleet is None:
            fleet = self.of(model, allowed)
        offered = None if endpoint is None else await fleet.catalog.offers_without(endpoint)
        if offered is not None:
            raise ApiError(
                Reason.NOT_OFFERED,
                f"The model {shown(model or fleet.model)} does not offer {endpoint}; it offers "
                f"{', '.join(offered)}.",
                "model",
            )
        return fleet

    async def _dynamic(self, adapter: str, allowed: Collection[str] | None) -> Model | None:
        """The model whose replicas have loaded this adapter while they serve."""
        for fleet in self._fleets:
            may = fleet.dynamic and (allowed is None or adapter in allowed)
            if may and await fleet.catalog.lists(adapter):
                return fleet
        return None

    async def exceeded(self, model: Any, tokens: int) -> int | None:
        """The maximum length of ``model`` if ``tokens`` exceed it; ``None``: not, or unknown."""
        if model is None and len(self._fleets) == 1:
            model = self._fleets[0].model
        fleet = self._by_name.get(model) if isinstance(model, str) else None
        return None if fleet is None else await fleet.catalog.exceeded(tokens)

    async def models(self, allowed: Collection[str] | None = None) -> dict[str, Any]:
        """The ``allowed`` models of the fleets that answer. Raises ApiError: 503, none answered."""
        found, failed = await self._ask(lambda fleet: fleet.catalog.models())
        if not found:
            raise next(iter(failed.values()))
        entries = [entry for body in found.values() for entry in body["data"]]
        if allowed is not None:
            entries = [entry for entry in entries if entry["id"] in allowed]
        return {"object": "list", "data": entries}

    async def model(self, name: str, allowed: Collection[str] | None = None) -> dict[str, Any]:
        """One model's or adapter's body. Raises ApiError: 404, unknown; 503, no answer."""
        listed = (await (await self.find(name, allowed)).catalog.models())["data"]
        found = next((entry for entry in listed if entry["id"] == name), None)
        if found is None:  # an adapter that its replicas do not list
            raise _no_model(name)
        entry: dict[str, Any] = found
        return entry

    async def health(self) -> dict[str, Any]:
        """``ok``, or ``degraded`` with the models that take no requests. Raises ApiError: 503, none
        does."""
        found, failed = await self._ask(lambda fleet: fleet.catalog.check())
        if not found:
            raise next(iter(failed.values()))
        return {"status": "degraded", "unavailable": list(failed)} if failed else {"status": "ok"}

    async def _ask(
        self, question: Callable[[Model], Coroutine[Any, Any, Value]]
    ) -> tuple[dict[str, Value], dict[str, ApiError]]:
        """Each fleet's answer or ApiError by model; concurrent, so that timeouts do not add up."""
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
