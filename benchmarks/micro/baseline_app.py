"""Serve's own path to the same replicas: a thin ingress, and the default request router.

What a team would write without Sluice: parse the body, call the deployment handle, stream.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from sluice.deploy.config import SluiceConfig
from sluice.replica.deployment import ReplicaServer
from sluice.replica.engine import EngineRequest, ResponseChunk
from sluice.scheduling.request.objective import SLO

_api = FastAPI()


@serve.ingress(_api)
class BaselineRouter:
    """Forwards chat completions to the replica that Serve picks."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    @_api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> StreamingResponse:
        """Serve one streamed chat completion."""
        arrived_s = time.monotonic()
        body = await request.json()
        waited_s = time.monotonic() - arrived_s
        call = EngineRequest(uuid.uuid4().hex, "chat", body, SLO(), waited_s)
        return StreamingResponse(self._stream(call), media_type="text/event-stream")

    async def _stream(self, call: EngineRequest) -> AsyncIterator[bytes]:
        async for items in self._replicas.generate.remote(call):
            data = b"".join(item.data for item in items if isinstance(item, ResponseChunk))
            if data:
                yield data


def build_baseline(config: SluiceConfig) -> Application:
    """The application, with the replicas of ``config``."""
    unlimited: dict[str, Any] = {"max_ongoing_requests": 1_000_000}
    replicas = serve.deployment(ReplicaServer).options(
        name="BaselineReplica",
        num_replicas=config.replica.count,
        ray_actor_options={"num_cpus": config.replica.num_cpus},
        **unlimited,
    )
    router = serve.deployment(BaselineRouter).options(
        name="BaselineRouter", ray_actor_options={"num_cpus": 0.1}, **unlimited
    )
    return router.bind(replicas.bind(config.engine, config.replica, config.controller))
