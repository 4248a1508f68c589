"""The admin API: fleet state, explained decisions, drains. Callers have checked access."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from sluice.controller.client import ControllerClient, NoAnswerError
from sluice.router.dispatch.models import Recent
from sluice.router.errors import ApiError, Reason, invalid, shown
from sluice.router.ingress.access import ADMIN_PREFIX, PAGE_PATH
from sluice.router.request.arrival import Arrival, noted

# The controllers of all models as one: their fleets, their decisions, and draining replicas.

TTL_S = 1.0  # how long a controller's answer is reused, seconds
MAX_DECISIONS = 256  # maximum decisions in one answer; a controller keeps as many
FORCE = "force"  # query parameter that allows to drain the last replica of a model
FEW_DECISIONS = 50  # that the live page shows, which asks often
REMEMBER_LIMIT_S = 3.0  # a drain's answer waits so long until the replica remembers it


class AdminService:
    """One per router process; asks each of ``controllers`` at most once in :data:`TTL_S`."""

    def __init__(
        self,
        controllers: Mapping[str, ControllerClient],
        clock: Callable[[], float] = time.monotonic,
        gpu_hour_price: float | None = None,
        currency: str = "USD",
    ) -> None:
        self._price = {"gpu_hour_price": gpu_hour_price, "currency": currency}
        self._controllers = dict(controllers)
        self._clock = clock
        self._fleet = Recent(self._make_fleet, TTL_S, clock)
        self._usage = Recent(self._make_usage, TTL_S, clock)
        self._decisions = {
            most: Recent(lambda most=most: self._make_decisions(most), TTL_S, clock)  # type: ignore[misc]
            for most in (FEW_DECISIONS, MAX_DECISIONS)
        }

    async def fleet(self) -> dict[str, Any]:
        """Every replica, class and controller. Raises ApiError: 503; no controller answered."""
        return await self._fleet.get()

    async def usage(self) -> dict[str, Any]:
        """Engine time by model, tenant and class. Raises ApiError: 503; an observer is silent."""
        return await self._usage.get()

    async def decisions(self, limit: int, request_id: str | None = None) -> list[dict[str, Any]]:
        """The last decisions, latest first; the id may be the client's. Raises ApiError: 503."""
        few = limit <= FEW_DECISIONS and request_id is None
        made = await self._decisions[FEW_DECISIONS if few else MAX_DECISIONS].get()
        if request_id is not None:
            ids = ("request_id", "client_request_id")
            made = [each for each in made if request_id in [each[name] for name in ids]]
        return made[:limit]

    async def drain(self, replica_id: str, drain: bool, force: bool = False) -> dict[str, Any]:
        """Close a replica to new requests, or open it; ``force``: also the last one of its model.
        Waits up to :data:`REMEMBER_LIMIT_S` until the replica remembers it (``remembered``). Raises
        ApiError: 404, unknown; 409, the last one; 503, a controller did not answer."""
        silent = False
        for model, controller in self._controllers.items():
            try:
                drained = await controller.drain(replica_id, drain, not force)
            except NoAnswerError:
                silent = True
                continue
            if drained is not None:
                if drained.pop("last"):
                    raise _last(replica_id, model)
                self._fleet.drop()
                remembered = await self._remembered(controller, replica_id)
                return {"model": model, **drained, "remembered": remembered}
        if silent:
            raise _no_controller()
        message = f"There is no replica {shown(replica_id)}; `sluice status` lists them."
        raise ApiError(Reason.NOT_FOUND, message, "replica_id")

    async def _remembered(self, controller: ControllerClient, replica_id: str) -> bool:
        since_s = self._clock()
        while (remembers := await controller.remembers(replica_id)) is False:
            if self._clock() - since_s > REMEMBER_LIMIT_S:
                break
            await asyncio.sleep(0.05)
        return bool(remembers)

    async def _make_fleet(self) -> dict[str, Any]:
        found = await self._ask(lambda controller: controller.snapshot())
        models: dict[str, dict[str, Any]] = {}
        replicas: list[dict[str, Any]] = []
        classes: list[dict[str, Any]] = []
        for model, view in found.items():
            if view is None:
                models[model] = {"up": False}
                continue
            recent = view["recent"]
            facts = {name: view[name] for name in view if name not in ("recent", "replicas")}
            figures = {name: recent[name] for name in ("window_ms", "period_ms", "series")}
            models[model] = {"up": True, **facts, **figures}
            replicas += [{**row, "model": model} for row in view["replicas"]]
            classes += [{"model": model, **row} for row in recent["classes"]]
        return {
            "controller": next(facts for facts in models.values() if facts["up"]),
            "models": models,
            "unavailable": [model for model, facts in models.items() if not facts["up"]],
            "replicas": replicas,
            "classes": classes,
            "admission": {
                name: sum(row["admission"][name] for row in classes)
                for name in ("guaranteed", "best_effort", "refused")
            },
        }

    async def _make_usage(self) -> dict[str, Any]:
        found = await self._ask(lambda controller: controller.usage())
        if None in found.values():  # a sum without a model would look complete
            raise _no_controller()
        now = datetime.now(UTC)
        counted_s = max(each["counted_s"] for each in found.values())
        return {
            "since": _iso(now - timedelta(seconds=counted_s)),
            "until": _iso(now),
            **self._price,
            "rows": [
                {"model": model, **row} for model, each in found.items() for row in each["rows"]
            ],
        }

    async def _make_decisions(self, limit: int) -> list[dict[str, Any]]:
        found = await self._ask(lambda controller: controller.decisions(limit))
        made = [{"model": model, **each} for model, own in found.items() for each in own or ()]
        return sorted(made, key=lambda each: float(each["age_ms"]))[:limit]

    async def _ask(self, question: Callable[[ControllerClient], Any]) -> dict[str, Any]:
        """Each controller's answer, or ``None``. Raises ApiError: 503; none answered."""
        answers = await asyncio.gather(*map(question, self._controllers.values()))
        if all(answer is None for answer in answers):
            raise _no_controller()
        return dict(zip(self._controllers, answers, strict=True))


def _iso(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _last(replica_id: str, model: str) -> ApiError:
    return ApiError(
        Reason.LAST_REPLICA,
        f"{replica_id} is the last replica that takes requests for the model {shown(model)}. Once "
        "it is drained, each of them gets a 503 until a replica is taken back. "
        f"{FORCE}=true drains it all the same.",
        FORCE,
    )


def _no_controller() -> ApiError:
    return ApiError(
        Reason.CONTROLLER_DOWN,
        "The controller or its observer does not answer. Requests are still served; without the "
        "controller, by Serve's own choice.",
    )


# The live page: files without data, which ask the admin API for what they show.

_FOLDER = Path(__file__).with_name("static")

_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

HEADERS: Final = {
    # No content of other origins, nothing inline, and no other page may embed this one in a frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes() -> APIRouter:
    """The page and its parts. Raises OSError: a file is missing from the installation."""
    routes = APIRouter()
    for file in sorted(_FOLDER.iterdir()):
        path = PAGE_PATH if file.suffix == ".html" else f"{PAGE_PATH}/{file.name}"
        _add(routes, path, file.read_bytes(), _TYPES[file.suffix])
    return routes


def _add(routes: APIRouter, path: str, content: bytes, media_type: str) -> None:
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    routes.get(path, response_model=None)(send)


_DIGITS = re.compile(r"[0-9]{1,9}")
_log = logging.getLogger(__name__)

_REPLICA_ID = re.compile(r"[!-~]{1,256}")


def admin_routes(admin_service: AdminService) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(prefix=f"{ADMIN_PREFIX}v1")

    @routes.get("/fleet", response_model=None)
    async def fleet(request: Request) -> JSONResponse:
        _check_parameters(request, ())
        return _answer(await admin_service.fleet())

    @routes.get("/usage", response_model=None)
    async def usage(request: Request) -> JSONResponse:
        _check_parameters(request, ())
        return _answer(await admin_service.usage())

    @routes.get("/decisions", response_model=None)
    async def decisions(request: Request) -> JSONResponse:
        _check_parameters(request, ("limit", "request_id"))
        found = await admin_service.decisions(_limit(request), _request_id(request))
        return _answer({"decisions": found})

    @routes.post("/replicas/{replica_id}/drain", response_model=None)
    async def drain(request: Request, replica_id: str) -> JSONResponse:
        return await change(request, replica_id, True, (FORCE,))

    @routes.delete("/replicas/{replica_id}/drain", response_model=None)
    async def reopen(request: Request, replica_id: str) -> JSONResponse:
        return await change(request, replica_id, False)

    async def change(
        request: Request, replica_id: str, to: bool, parameters: Collection[str] = ()
    ) -> JSONResponse:
        _check_parameters(request, parameters)
        if not _REPLICA_ID.fullmatch(replica_id):
            raise invalid(f"{shown(replica_id)} is not a valid replica id", "replica_id")
        drained = await admin_service.drain(replica_id, to, _force(request))
        arrival: Arrival = request.state.arrival
        _log.warning(
            "replica %s was %s by the admin key %s, with %d requests left",
            replica_id,
            "drained" if to else "taken back",
            arrival.client.name,
            drained["left"],
        )
        return _answer(drained)

    return routes


def _answer(body: dict[str, Any]) -> JSONResponse:
    return JSONResponse(body, headers={"cache-control": "no-store"})


def _check_parameters(request: Request, known: Collection[str]) -> None:
    for name in request.query_params:
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise invalid(f"{shown(name)} is not a known parameter; allowed: {allowed}", name[:64])
    if len(request.query_params.multi_items()) > len(request.query_params):
        raise invalid("a parameter is given twice")


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(FEW_DECISIONS))
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= MAX_DECISIONS:
        raise invalid(
            f"limit must be an integer from 1 to {MAX_DECISIONS}, got {shown(text)}", "limit"
        )
    return int(text)


def _force(request: Request) -> bool:
    text = request.query_params.get(FORCE, "false")
    if text not in ("true", "false"):
        raise invalid(f"{FORCE} must be true or false, got {shown(text)}", FORCE)
    return text == "true"


def _request_id(request: Request) -> str | None:
    text = request.query_params.get("request_id")
    if text == "":
        raise invalid(
            "request_id must be an answer's x-sluice-request-id, or the x-request-id that its "
            "client sent; got nothing",
            "request_id",
        )
    return None if text is None else noted(text)
