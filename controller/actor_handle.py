"""A process's link to the controller or observer: its handle, whether it answers, its repair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError

from sluice.controller.config import ControllerConfig
from sluice.controller.discovery import Part, ensure_controller, ensure_observer, find_or_start
from sluice.controller.transport.failure import NoAnswerError

_PROBE_TIMEOUTS_S = (0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1.0)
"""Timeouts of successive probes; short at first, because a probe in flight when the actor's process
dies gets its error only about a second later."""

_PROBE_PAUSE_S = 0.05

_TELLING = frozenset(("route", "hello", "report"))
"""Methods that are answered at once, so a timeout means that the actor is unresponsive. The others
may take long."""

_log = logging.getLogger(__name__)


class Link:
    """Calls an actor with a deadline; after a failure, repairs itself in the background.

    A failure here is the actor's death, or a timeout of a call that it answers at once.
    While the actor does not answer (:attr:`up` is false) every call fails at once, so that no
    request waits for a second timeout. A background task looks the actor up again if its handle is
    dead, starts an actor if the name is gone, and probes until there is an answer.

    Use it from one event loop. It blocks only in its constructor.

    Args:
        app_name: name of the application.
        config: the controller's configuration.
        on_down: called when calls begin to fail.
        part: the actor to call. cell: which of the controllers.
    """

    def __init__(
        self,
        app_name: str,
        config: ControllerConfig,
        on_down: Callable[[], None],
        part: Part = "controller",
        cell: int = 0,
    ) -> None:
        ensure: Callable[..., Any] = ensure_observer
        if part == "controller":
            ensure = partial(ensure_controller, cell=cell)
        self._part = part
        self._cell = cell
        self._app_name = app_name
        self._config = config
        self._on_down = on_down
        self._repair_task: asyncio.Task[None] | None = None
        self._handle: Any = None
        try:
            # In a thread, because Ray warns of blocking calls on an actor's event loop.
            with ThreadPoolExecutor(1) as executor:
                self._handle = executor.submit(ensure, app_name, config).result()
        except (RayError, TimeoutError, RuntimeError) as error:
            _log.warning("the %s of %s is not reachable yet: %s", part, app_name, error)
        self.up = self._handle is not None
        """Whether the actor answered when it was last called."""

    def check(self) -> None:
        """Return if calls may be made; otherwise start a repair of the link.

        Raises:
            NoAnswerError: the actor is known to be unresponsive.
        """
        if not self.up:
            self._repair()
            raise NoAnswerError("unavailable")

    async def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        on_late: Callable[[Any], None] | None = None,
    ) -> Any:
        """The result of the actor's ``method``. An actor that stalled runs the queued calls
        when it recovers: ``on_late`` is called with a result that arrives after the timeout.

        Raises:
            NoAnswerError: it could not be called or did not answer in time.
            ValueError: the actor refused the arguments.
        """
        self.check()
        try:
            return await self._ask(method, *args, timeout_s=timeout_s, on_late=on_late)
        except RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise ValueError(str(error.cause)) from None
            _log.error("the %s failed in %s: %s", self._part, method, error)
            raise NoAnswerError("error") from None
        except TimeoutError:
            if method in _TELLING:
                self.lost()
            raise NoAnswerError("timeout") from None
        except RayError as error:
            if isinstance(error, ActorDiedError):
                self._handle = None
            self.lost()
            raise NoAnswerError("unavailable") from None

    async def close(self) -> None:
        """Stop repairing. The actor keeps running."""
        self.up = False
        task, self._repair_task = self._repair_task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _ask(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        on_late: Callable[[Any], None] | None = None,
    ) -> Any:
        answer = asyncio.ensure_future(getattr(self._handle, method).remote(*args))
        try:
            done, _ = await asyncio.wait((answer,), timeout=timeout_s)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if done:
            return answer.result()
        if on_late is None:
            answer.cancel()
        else:
            answer.add_done_callback(partial(_came_late, on_late))
        raise TimeoutError

    def lost(self) -> None:
        """The actor was found unresponsive: fail calls until it answers again."""
        if self.up:
            self.up = False
            _log.warning("the %s of %s does not answer", self._part, self._app_name)
            self._on_down()
        self._repair()

    def _repair(self) -> None:
        if self._repair_task is None:
            self._repair_task = asyncio.get_running_loop().create_task(self._until_up())

    async def _until_up(self) -> None:
        last = len(_PROBE_TIMEOUTS_S) - 1
        attempts = 0
        try:
            while not await self._probe(_PROBE_TIMEOUTS_S[min(attempts, last)]):
                await asyncio.sleep(_PROBE_PAUSE_S)
                attempts += 1
            self.up = True
        finally:
            self._repair_task = None
        _log.info("the %s of %s answers again", self._part, self._app_name)

    async def _probe(self, timeout_s: float) -> bool:
        """Whether the actor answers."""
        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(
                    find_or_start, self._app_name, self._config, self._part, self._cell
                )
            await self._ask("fingerprint", timeout_s=timeout_s)
        except ActorDiedError:
            self._handle = None
            return False
        except (RayError, TimeoutError, ValueError, RuntimeError, OSError) as error:
            _log.debug("the %s of %s does not answer: %s", self._part, self._app_name, error)
            return False
        except Exception:
            # The actor must come back, so probing must continue after any error.
            _log.exception("probing the %s of %s failed", self._part, self._app_name)
            return False
        return True


def _came_late(on_late: Callable[[Any], None], answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled() and answer.exception() is None:
        on_late(answer.result())
