"""A controller with its observer, both in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.observer import Observer
from sluice.protocol.messages import (
    FirstTokenWait,
    LateNotice,
    MetricsPush,
    RequestEnding,
    SyncReply,
)
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.roles import Role


class ObservedController(Controller):
    """Answers as the two actors together do."""

    def __init__(
        self, config: ControllerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, clock)
        self.observer = Observer(self, config, clock)

    async def push_metrics(
        self,
        push: MetricsPush,
        endings: Sequence[RequestEnding] = (),
        late: Sequence[LateNotice] = (),
        waits: Sequence[FirstTokenWait] = (),
    ) -> SyncReply:
        """What a router sends once a second."""
        reply = await self.sync(endings, late, waits)
        await self.observer.push_metrics(push)
        return reply

    async def render_metrics(self) -> bytes:
        return await self.observer.render_metrics()

    async def load(self, role: Role | None = None) -> Load:
        load = await self.observer.load(role)
        assert load is not None
        return load

    async def snapshot(self) -> dict[str, Any]:
        view = await self.observer.snapshot()
        assert view is not None
        return view

    async def decisions(self, limit: int) -> list[dict[str, Any]]:
        told = await self.observer.decisions(limit)
        assert told is not None
        return told
