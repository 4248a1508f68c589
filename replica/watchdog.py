"""Distinguishes a stalled engine from a slow or idle one.

While requests are live it makes no call into the engine: it reads the state that the engine writes
after each step, and since when requests wait. After the last request has left a stalled engine
there is no step that would show its recovery, so the watchdog then calls the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from sluice.replica.engine import Engine, EngineDeadError, EngineInfo
from sluice.scheduling.fleet.state import EngineState
from sluice.scheduling.latency.model import StepSample

logger = logging.getLogger(__name__)

PREDICTED_STEPS = 20.0
"""An engine counts as stalled after this many times the predicted time of its last step without a
new one."""

LONGEST_STEPS = 3.0
"""The same limit in longest steps: a full batch may follow one of a few decodes, and its time is
not predicted here."""

FIRST_STEPS = 5
"""First steps, in which code may still be compiled; each may take :data:`REPLACED_AFTER_S`."""

REPLACED_AFTER_S = 30.0
"""Min time without a step after which Serve replaces the replica, seconds."""

REPLACED_AFTER_STEPS = 20.0
"""The same limit in longest steps, for slow machines."""

OWN_GAP_S = 2.0
"""If the watchdog was not called for this long, its own process was stalled. Steps that the engine
made meanwhile may not be visible yet."""


class Watchdog:
    """The watchdog of one engine. Call :meth:`look` several times a second while requests are live.

    Args:
        engine: started.
        info: its constants.
        hung_after_s: min time without a step after which it counts as stalled.
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
        """Whether the engine is stalled now. ``O(live requests)``.

        Args:
            state: the engine's state, if it has just been read.
        """
        now_s = self._clock()
        if now_s - self._looked_s > OWN_GAP_S:
            self._not_before_s = now_s
        self._looked_s = now_s
        before_s = float(self._summary["updated_s"])
        # If the state cannot be read, its writer is stalled in a write or gone: keep the last one.
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
                logger.warning("engine stalled: no step for %.1f s", now_s - since_s)
                self._still_since_s = since_s
        return self._still_since_s is not None

    def check(self) -> None:
        """Return unless the engine has been stalled for so long that it must be replaced.

        Raises:
            EngineDeadError: it has.
        """
        self.look()
        if self._still_since_s is None:
            return
        still_s = self._clock() - self._still_since_s
        if still_s > max(REPLACED_AFTER_S, REPLACED_AFTER_STEPS * self._longest_s):
            raise EngineDeadError(f"engine hung: no step for {still_s:.0f} s")

    def stop(self) -> None:
        """Stop the pending call, if there is one."""
        if self._pulse is not None:
            self._pulse.cancel()

    def _patience_s(self) -> float:
        """How long the engine may make no step before it counts as stalled."""
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
            self._moves("its loop runs")
        except Exception:
            logger.warning("the stalled engine did not answer", exc_info=True)
        finally:
            self._pulse = None

    def _moves(self, sign: str) -> None:
        logger.warning("engine recovered: %s", sign)
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
