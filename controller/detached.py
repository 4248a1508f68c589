"""The controller as a detached actor that belongs to no job and ends by itself when unused."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.controller.transport import report_rows
from sluice.scheduling.placement_warm_up import warm_up_placement

END_AFTER_S = 600.0
"""Silence of all replicas and clients after which the controller ends, seconds. Replicas report and
routers push metrics every few seconds, so this silence means that the application is gone."""

_CHECKS = 10


class DetachedController(Controller):
    """A :class:`Controller` that ends after a time without calls from replicas and clients.

    It ends by a kill without restart, so Ray does not restart it. A client that still needs it
    starts a new one, as after any other end of the actor.

    Args:
        config: see :class:`ControllerConfig`.
        end_after_s: silence after which it ends, seconds; checked ten times in that time.
    """

    def __init__(self, config: ControllerConfig, end_after_s: float = END_AFTER_S) -> None:
        # Compile before the actor answers, so that no call waits for a compiler.
        warm_up_placement(config.make_routing, config.make_admission)
        report_rows.compile_now()
        super().__init__(config)
        self._end_after_s = end_after_s
        this = ray.get_runtime_context().current_actor
        # A thread, not a task: it depends on no event loop and on no first call.
        threading.Thread(target=self._watch, args=(this,), name="silence", daemon=True).start()

    def _watch(self, this: Any) -> None:
        """Kill the actor without restart once it was silent for long enough."""
        while self.silent_s < self._end_after_s:
            time.sleep(self._end_after_s / _CHECKS)
        ray.kill(this, no_restart=True)
