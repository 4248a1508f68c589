"""Finding, starting and stopping the actors of an application: its controller, or the cells of it,
and its observer. All calls block."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig, fingerprint_of
from sluice.controller.observability.cells import Cells, ControllerHandle
from sluice.controller.observability.observer import Observer
from sluice.controller.transport import checks
from sluice.scheduling.placement.cells import MAX_CELLS
from sluice.scheduling.placement.warm_up import warm_up_placement
from sluice.telemetry.phases import phase

# The controller and its observer as detached actors that belong to no job and end by themselves
# when unused.

END_AFTER_S = 600.0
"""Silence of all replicas and clients after which an actor ends, seconds. Replicas report and
processes push metrics every few seconds, so this silence means that the application is gone."""

_CHECKS = 10


@phase("controller: policies")
def compile_loops(config: ControllerConfig) -> None:
    """Compile all that a controller's decisions and reports run, so that none waits for that."""
    warm_up_placement(config.make_routing, config.make_admission)
    checks.compile_now()


class DetachedController(Controller):
    """A ``Controller`` that ends after ``end_after_s`` seconds without calls."""

    def __init__(self, config: ControllerConfig, end_after_s: float = END_AFTER_S) -> None:
        compile_loops(config)
        super().__init__(config)
        _end_when_silent(lambda: self.silent_s, end_after_s)
        # A collection would look at all that was imported, which holds up every decision.
        gc.freeze()


class DetachedObserver(Observer):
    """An ``Observer`` that ends after ``end_after_s`` seconds without calls. ``names``: of the
    controller, or of all its cells."""

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


NAMESPACE = "sluice"
"""Ray namespace of the actors."""

_MAX_CONCURRENCY = 10_000
_CPUS = 0.1
"""Ray CPUs of each actor. With 0, Ray may start it on a head node without CPUs, whose end the
rest of the cluster can outlive, or on a node that counts as idle and is removed."""

_CELL_CPUS = 1.0
"""The same of one of several controllers: each has so much to do that it needs its own core."""

_ASK_TIMEOUT_S = 10.0
_RETRY_S = 0.1
_MAX_REPLACED = 3

Part = Literal["controller", "observer"]

_log = logging.getLogger(__name__)


def fleet_name(app_name: str, key: str | None) -> str:
    """The name that the controller of one of an application's models uses as its application name:
    the application's own name if it has only one model (``key`` is ``None``)."""
    return app_name if key is None else f"{app_name}.{key}"


def controller_actor_name(app_name: str, cell: int = 0) -> str:
    """Name of an application's controller in :data:`NAMESPACE`, or of one of its cells."""
    return _actor_name(app_name, "controller", cell)


def observer_actor_name(app_name: str) -> str:
    """Name of an application's observer in :data:`NAMESPACE`."""
    return _actor_name(app_name, "observer")


def find_or_start(
    app_name: str, config: ControllerConfig, part: Part = "controller", cell: int = 0
) -> Any:
    """The handle of the application's controller, cell or observer of any version and
    configuration; started if there is none. It belongs to no job, and Ray restarts it when its
    process dies, but never retries its calls: the caller's request would be placed twice."""
    actor: Any = DetachedController
    args: tuple[Any, ...] = (config,)
    if part == "observer":
        actor = DetachedObserver
        names = tuple(controller_actor_name(app_name, each) for each in range(config.cells))
        args = (config, names, NAMESPACE)
    options = ray.remote(actor).options(
        name=_actor_name(app_name, part, cell),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=_CELL_CPUS if part == "controller" and config.cells > 1 else _CPUS,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=_MAX_CONCURRENCY,
        # Not within the placement group of a replica that spans GPUs and is the first to ask: it
        # has no CPUs to spare, and ends with the replica.
        scheduling_strategy="DEFAULT",
    )
    return options.remote(*args)


def ensure_controller(
    app_name: str, config: ControllerConfig, wait_s: float = 180.0, cell: int = 0
) -> Any:
    """The handle of a controller, or of one of its cells, of this version with this
    configuration; its observer starts beside it and is not waited for.

    One with another fingerprint is replaced, so this is for deployment and for processes that
    start with it: a process that only lost its controller uses ``find_or_start``, or an old and
    a new router would stop each other's controllers in turn. A first start also compiles the
    loops. Raises TimeoutError: none was ready within ``wait_s`` seconds; RuntimeError: every new
    one has another fingerprint (mixed versions, or a name used twice)."""
    find_or_start(app_name, config, "observer")
    if cell == 0:
        for other in range(1, config.cells):
            find_or_start(app_name, config, cell=other)  # they start at the same time
    return _ensure(app_name, config, "controller", wait_s, cell)


def ensure_observer(app_name: str, config: ControllerConfig, wait_s: float = 10.0) -> Any:
    """As ``ensure_controller``, with a short wait: the application works without an observer."""
    return _ensure(app_name, config, "observer", wait_s)


def stop_controller(app_name: str) -> bool:
    """Stop an application's controller, all its cells and its observer; whether there was one.
    For after the application's routers and replicas are gone: their clients would start new
    ones."""
    _stop(app_name, "observer")
    # Of any configuration: also the cells of one that had more.
    stopped = [_stop(app_name, "controller", cell) for cell in range(MAX_CELLS)]
    return any(stopped)


def _actor_name(app_name: str, part: Part, cell: int = 0) -> str:
    return f"{app_name}-{part}-{cell}" if cell else f"{app_name}-{part}"


def _ensure(
    app_name: str, config: ControllerConfig, part: Part, wait_s: float, cell: int = 0
) -> Any:
    wanted = fingerprint_of(config)
    deadline_s = time.monotonic() + wait_s
    replaced = 0
    while time.monotonic() < deadline_s:
        handle = find_or_start(app_name, config, part, cell)
        left_s = max(_RETRY_S, deadline_s - time.monotonic())
        try:
            found = ray.get(handle.fingerprint.remote(), timeout=min(left_s, _ASK_TIMEOUT_S))
        except (ActorDiedError, ActorUnavailableError, GetTimeoutError) as error:
            _log.info("the %s of %s is not ready: %s", part, app_name, error)
        else:
            if found == wanted:
                return handle
            if replaced == _MAX_REPLACED:
                raise RuntimeError(
                    f"the {part} of {app_name!r} is {found} and not {wanted}, "
                    f"although it was replaced {replaced} times"
                )
            _log.info("replacing the %s of %s: it is %s, not %s", part, app_name, found, wanted)
            ray.kill(handle, no_restart=True)
            replaced += 1
        time.sleep(_RETRY_S)
    raise TimeoutError(f"no {part} of {app_name!r} was ready within {wait_s} s")


def _stop(app_name: str, part: Part, cell: int = 0) -> bool:
    try:
        handle = ray.get_actor(_actor_name(app_name, part, cell), namespace=NAMESPACE)
    except ValueError:
        return False
    ray.kill(handle, no_restart=True)
    return True
