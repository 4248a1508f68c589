"""The controller and its observer as detached actors that belong to no job and end by themselves
when unused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import ray

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.cells import Cells
from sluice.controller.observability.controller_handle import ControllerHandle
from sluice.controller.observability.observer import Observer
from sluice.controller.transport import report_rows
from sluice.scheduling.placement.warm_up import warm_up_placement

END_AFTER_S = 600.0
"""Silence of all replicas and clients after which an actor ends, seconds. Replicas report and
processes push metrics every few seconds, so this silence means that the application is gone."""

_CHECKS = 10


def compile_loops(config: ControllerConfig) -> None:
    """Compile all that a controller's decisions and reports run, so that none waits for that."""
    warm_up_placement(config.make_routing, config.make_admission)
    report_rows.compile_now()


class DetachedController(Controller):
    """A :class:`Controller` that ends after a time without calls.

    Args:
        config: see :class:`ControllerConfig`.
        end_after_s: silence after which it ends, seconds; checked ten times in that time.
    """

    def __init__(self, config: ControllerConfig, end_after_s: float = END_AFTER_S) -> None:
        compile_loops(config)
        super().__init__(config)
        _end_when_silent(lambda: self.silent_s, end_after_s)


class DetachedObserver(Observer):
    """An :class:`Observer` that ends after a time without calls.

    Args:
        config: the controller's configuration.
        names: of the controller, or of all its cells. namespace: of these.
        end_after_s: as of :class:`DetachedController`.
    """

    def __init__(
        self,
        config: ControllerConfig,
        names: Sequence[str],
        namespace: str,
        end_after_s: float = END_AFTER_S,
    ) -> None:
        handles = [ControllerHandle(name, namespace) for name in names]
        super().__init__(handles[0] if len(handles) == 1 else Cells(handles), config)
        _end_when_silent(lambda: self.silent_s, end_after_s)


def _end_when_silent(silent_s: Callable[[], float], end_after_s: float) -> None:
    """Kill this actor without restart once it was silent for long enough: Ray does not start it
    again, and a client that still needs it starts a new one, as after any other end."""
    this = ray.get_runtime_context().current_actor

    def watch() -> None:
        while silent_s() < end_after_s:
            time.sleep(end_after_s / _CHECKS)
        ray.kill(this, no_restart=True)

    # A thread, not a task: it depends on no event loop and on no first call.
    threading.Thread(target=watch, name="silence", daemon=True).start()
