"""Small replicas on real Serve. In a module of their own, so that Serve's processes import them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray import serve

from sluice.protocol.requests import (
    EngineDeadError,
    EngineRequest,
    Progress,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
)


class TinyReplica:
    """Does what the body's ``do`` says: serve, answer at length, hang, die, fail, or lose
    its engine."""

    def __init__(self) -> None:
        self.name = serve.get_replica_context().replica_id.unique_id
        self.live: set[str] = set()

    async def generate(
        self, request: EngineRequest, _target: str | None = None
    ) -> AsyncIterator[list[ResponseItem]]:
        others = sorted(self.live)
        self.live.add(request.request_id)
        try:
            if request.body["do"] == "hang":
                await asyncio.Event().wait()
            if request.body["do"] == "die":
                os._exit(1)
            if request.body["do"] == "lose engine":
                raise EngineDeadError("gone")
            if request.body["do"] == "fail":
                raise ZeroDivisionError("a bug")
            yield [ResponseHead(200, "application/json", self.name)]
            if request.body["do"] == "answer at length":
                yield [ResponseChunk(b"x" * request.body["bytes"]), ResponseTail(1, 1)]
                return
            answer = {"replica": self.name, "target": _target, "rank": request.rank}
            answer["live"] = others
            yield [ResponseChunk(json.dumps(answer).encode()), ResponseTail(1, 1)]
        finally:
            self.live.discard(request.request_id)

    async def progress(self, request_ids: Sequence[str], _target: str | None = None) -> Progress:
        if "which process" in request_ids:
            return Progress(self.name, False, (str(os.getpid()),))
        return Progress(self.name, False, tuple(set(request_ids) - self.live))

    async def models(self, _target: str | None = None) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.name}]}


class Front:
    """An application needs an ingress; this one is not used."""

    def __init__(self, replicas: Any) -> None:
        self.replicas = replicas

    async def __call__(self) -> str:
        return "unused"
