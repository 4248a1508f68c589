"""Reports to the controller how calls proceed and end."""

from __future__ import annotations

from collections.abc import Callable

from sluice.controller.messages import LateNotice, RequestEnding
from sluice.router.dispatch.placement import DecisionService
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import Outcome
from sluice.router.request.call import Call
from sluice.router.request.prompt_size import outputs_of
from sluice.scheduling.request.objective import TokenClock


class Endings:
    """One per router process and model. Nothing here waits.

    Args:
        clock: monotonic seconds; the one of :attr:`~sluice.router.request.call.Call.received_s`.
    """

    def __init__(self, controller: DecisionService, clock: Callable[[], float]) -> None:
        self._controller = controller
        self._clock = clock

    def progressed(self, call: Call, seen: TokenClock) -> None:
        """Report the objectives that a guaranteed call misses while it still runs. ``seen``: the
        times of its tokens so far."""
        ttft_s, tpot_s, _ = seen.judged_s(self._clock())
        late = call.slo.late(ttft_s, tpot_s, seen.tokens)
        if late != (None, None):
            self._controller.late(LateNotice(call.request_id, *late))

    def ended(
        self,
        call: Call,
        seen: TokenClock,
        outcome: Outcome,
        reason: Reason | None,
        now_s: float,
        replica_id: str = "",
        kept: bool | None = None,
    ) -> None:
        """Report how a call ended.

        Args:
            seen: the times of its tokens.
            reason: of its error, if it failed.
            replica_id, kept: see :class:`RequestEnding`.
        """
        if not call.scheduled:
            return
        missed = seen.missed(now_s) if outcome is Outcome.OK else ()
        self._controller.ended(
            RequestEnding(
                call.request_id,
                outcome.value,
                missed,
                seen.tokens,
                seen.ttft_s,
                seen.tpot_s,
                seen.e2e_s(now_s),
                "" if reason is None else reason.value,
                call.slo.service_class,
                call.client.tenant,
                call.output_tokens // outputs_of(call.endpoint, call.body),
                replica_id,
                kept,
                seen.judged_s(now_s) if call.slo.stages else None,
            )
        )
