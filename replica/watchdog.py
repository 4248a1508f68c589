"""Tells an engine that stands still from one that is slow or has nothing to do.

It asks nothing of the engine: the state that the engine writes after each step, and since when
requests wait for it, say all while requests are live. An engine that stood still when its last
request went elsewhere makes no step any more by which one could know, so then it is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from replica.engine import Engine, EngineDeadError, EngineInfo
from scheduling.latency import StepSample
from scheduling.state import EngineState

logger = logging.getLogger(__name__)

PREDICTED_STEPS = 20.0
"""An engine stands still when it has made no step for so many times the predicted time of its last
one."""

LONGEST_STEPS = 3.0
"""The same in longest steps: a full batch may follow one of a few decodes, and is not predicted
here."""

FIRST_STEPS = 5
"""Steps after the start in which code may still be compiled; they may take :data:`REPLACED_AFTER_S`
each."""

REPLACED_AFTER_S = 30.0
"""Least time without a step after which Serve is to replace the replica, seconds."""

REPLACED_AFTER_STEPS = 20.0
"""The same in longest steps, for slow machines."""

OWN_GAP_S = 2.0
"""When nobody has looked for so long this process itself stood still. What the engine did meanwhile
may not have been seen yet."""


class Watchdog:
    """Of one engine. It is to be looked at several times a second while requests are live.

    Args:
        engine: started.
        info: its constants.
        hung_after_s: least time without a step after which it stands still.
        clock: monotonic seconds, those of the engine's state.
    """

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        hung_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._hung_after_s = hung_after_s
        self._clock = clock
        self._longest_s = longest_step_s(info)
        self._summary = engine.state().summary
        self._first_step = int(self._summary["steps"])
        self._looked_s = self._not_before_s = clock()
        self._still_since_s: float | None = None
        self._pulse: asyncio.Task[None] | None = None

    def look(self, state: EngineState | None = None) -> bool:
        """Whether the engine stands still, as of now. ``O(live requests)``.

        Args:
            state: the engine's, where it has just been read.
        """
        now_s = self._clock()
        if now_s - self._looked_s > OWN_GAP_S:
            self._not_before_s = now_s
        self._looked_s = now_s
        before_s = float(self._summary["updated_s"])
        # Where it cannot be read its writer stands still in a write, or is gone: no news.
        with contextlib.suppress(RuntimeError):
            self._summary = (state or self._engine.state()).summary
        stepped_s = float(self._summary["updated_s"])
        waits_s = self._engine.waits_since_s()
        if self._still_since_s is not None:
            if stepped_s > before_s:
                self._moves("it has made a step")
            elif waits_s is None and self._pulse is None:
                self._pulse = asyncio.create_task(self._ask(), name="pulse")
        elif waits_s is not None:
            since_s = max(waits_s, stepped_s, self._not_before_s)
            if now_s - since_s > self._patience_s():
                logger.warning("the engine stands still: no step for %.1f s", now_s - since_s)
                self._still_since_s = since_s
        return self._still_since_s is not None

    def check(self) -> None:
        """Return unless the engine has stood still for so long that another one should be started.

        Raises:
            EngineDeadError: it has.
        """
        self.look()
        if self._still_since_s is None:
            return
        still_s = self._clock() - self._still_since_s
        if still_s > max(REPLACED_AFTER_S, REPLACED_AFTER_STEPS * self._longest_s):
            raise EngineDeadError(f"the engine hangs: it has made no step for {still_s:.0f} s")

    def stop(self) -> None:
        """Ask no more."""
        if self._pulse is not None:
            self._pulse.cancel()

    def _patience_s(self) -> float:
        """The time without a step that is no reason for doubt yet."""
        summary = self._summary
        patience_s = max(
            self._hung_after_s,
            PREDICTED_STEPS * float(summary["predicted_step_s"]),
            LONGEST_STEPS
            * self._longest_s
            * max(float(summary["correction"]), float(summary["fixed_correction"])),
        )
        if int(summary["steps"]) - self._first_step < FIRST_STEPS:
            return max(REPLACED_AFTER_S, patience_s)
        return patience_s

    async def _ask(self) -> None:
        try:
            await self._engine.pulse()
            self._not_before_s = self._clock()
            self._moves("its loop goes round")
        except Exception:
            logger.warning("the engine that stood still did not answer", exc_info=True)
        finally:
            self._pulse = None

    def _moves(self, sign: str) -> None:
        logger.warning("the engine goes on: %s", sign)
        self._still_since_s = None
        if self._pulse is not None and self._pulse is not asyncio.current_task():
            self._pulse.cancel()


def longest_step_s(info: EngineInfo) -> float:
    """Predicted time of the longest batch that an engine may run: a full one, of requests as long
    as the model takes them, with all KV in use."""
    tokens = info.max_batch_tokens
    return info.profile.model.step_s(
        StepSample(
            prefill_tokens=tokens,
            prefill_square=tokens**2,
            prefill_cross=tokens * info.max_model_tokens,
            prefill_context=info.max_model_tokens,
            prefills=1,
            decodes=info.max_sequences,
            decode_context=info.kv_blocks * info.block_tokens,
        )
    )
