"""vLLM's requests as a batch policy sees them."""

from __future__ import annotations

from math import nan
from typing import Any

from vllm.v1.request import Request, RequestStatus

from sluice.replica.scheduler.local_scheduler import LocalScheduler, TrackedRequest
from sluice.replica.transfer.incoming import IncomingKv
from sluice.replica.vllm.drafts import PlannedDrafts
from sluice.replica.vllm.prefix_lookup import PrefixHits
from sluice.scheduling.request.queue import RequestView

_COULD_RUN = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class RequestViews:
    """Makes the views of a scheduler's requests.

    Tokens of a waiting request that are in the prefix cache, or that come by KV transfer, count as
    computed. All blocks of a running request count as its own. Shared blocks become free only with
    their last user, so a plan that evicts them may make vLLM preempt more than was planned.

    Args:
        scheduler: vLLM's.
        local: the local scheduler's records of the requests.
        hits: hits in the prefix cache. incoming: KV from other engines.
        drafts: drafted tokens of decodes; ``None``: no speculation.
    """

    def __init__(
        self,
        scheduler: Any,
        local: LocalScheduler,
        hits: PrefixHits,
        incoming: IncomingKv,
        drafts: PlannedDrafts | None,
    ) -> None:
        self._scheduler = scheduler
        self._local = local
        self._hits = hits
        self._incoming = incoming
        self._drafts = drafts
        self._block = scheduler.block_size
        self._longest = scheduler.max_model_len - 1
        self._pipelined = scheduler.parallel_config.pipeline_parallel_size > 1

    def collect(self, busy_until_s: float) -> list[RequestView]:
        """Every request that could run now, in order of arrival at the engine.

        Args:
            busy_until_s: when the batches in flight end.
        """
        self._hits.begin_pass()
        if self._drafts is not None:
            self._drafts.begin_pass()
        views, followed = [], self._local.requests
        for request_id, request in self._scheduler.requests.items():
            running = request.status == RequestStatus.RUNNING
            promised = request.num_output_placeholders
            pending = request.num_tokens + promised
            if running:
                # Most requests, at every step: no calls that can be spared.
                computed = request.num_computed_tokens
                held = -(-computed // self._block)
                pending = min(pending, self._longest) - computed
                if pending <= 0 or (promised and _ends_in_flight(request, promised)):
                    continue
                if self._pipelined and self._paused(request):
                    continue
            elif self._could_run(request):
                computed, held = self._waiting(request)
                pending -= computed
            else:
                continue
            tracked = followed[request_id]
            drafted, acceptance = 0, nan
            if self._drafts is not None and running:
                held = self._drafts.held_blocks(request_id)
                if pending == 1:
                    drafted, acceptance = self._drafted(request, tracked)
            emitted = request.num_output_tokens + promised
            if emitted >= tracked.expected_tokens:
                self._local.prolong(tracked, emitted)
            first_s, last_s = tracked.first_token_s, tracked.last_token_s
            if promised:
                # The tokens in flight leave when their batches end.
                last_s = busy_until_s
                first_s = last_s if first_s is None else first_s
            views.append(
                RequestView(
                    request_id,
                    tracked.slo,
                    tracked.arrival_s,
                    request.num_prompt_tokens,
                    computed,
                    pending,
                    emitted,
                    first_s,
                    held,
                    running,
                    last_s,
                    tracked.expected_tokens,
                    tracked.best_effort,
                    drafted,
                    acceptance,
                    tracked.tenant,
                    tracked.weight,
                    tracked.promised,
                )
            )
            if tracked.begun:
                views[-1] = _of_stage(views[-1], tracked.begun)
        return views

    def _paused(self, request: Request) -> bool:
        """Whether vLLM leaves it out of the next step: with asynchronous scheduling a decode runs
        in every ``pipeline-parallel-size``-th step."""
        step: int = getattr(request, "next_decode_eligible_step", 0)
        return step > 0 and self._scheduler.current_step + 1 < step

    def _could_run(self, request: Request) -> bool:
        """Whether a request that is not running could run."""
        if request.status in _COULD_RUN:
            return not _has_stale_output(request)
        return self._incoming.arrived(request)

    def _waiting(self, request: Request) -> tuple[int, int]:
        """The tokens of a waiting request that need not be computed, and its blocks."""
        computed = request.num_computed_tokens
        if computed == 0:
            tokens, blocks = self._hits.of(request)
            if self._incoming.awaits(request, tokens):
                tokens = request.num_tokens - 1
            return tokens, blocks
        # Its KV came from another engine. The last token is always computed, for its logits.
        return min(computed, request.num_tokens - 1), -(-computed // self._block)

    def _drafted(self, request: Request, tracked: TrackedRequest) -> tuple[int, float]:
        """How many tokens were drafted for a decode, and how likely one is accepted."""
        assert self._drafts is not None
        drafted = self._drafts.offer(request)
        rate = self._local.drafts.rates.rate(tracked.slo.service_class) if drafted else nan
        return drafted, rate


def _of_stage(view: RequestView, begun: int) -> RequestView:
    """The same as the request of its current stage, whose prompt includes the ``begun`` tokens of
    output before it. Before the stage's first token there is no decode to check drafts."""
    emitted = view.emitted_tokens - begun
    return view._replace(
        prompt_tokens=view.prompt_tokens + begun,
        emitted_tokens=emitted,
        expected_tokens=view.expected_tokens - begun,
        drafted_tokens=view.drafted_tokens if emitted else 0,
    )


def _ends_in_flight(request: Request, promised: int) -> bool:
    """Whether the last of ``promised`` tokens in flight is its last one; vLLM skips such a request,
    too."""
    last = request.num_prompt_tokens + request.max_tokens
    ends: bool = request.num_computed_tokens + 2 - promised >= last
    return ends


def _has_stale_output(request: Request) -> bool:
    """Whether it was preempted with output in flight: vLLM (from 0.27.1) does not resume it before
    that output is delivered. In older versions this cannot occur: that output is there before the
    next batch but one."""
    stale: int = getattr(request, "num_stale_output_tokens", 0)
    return stale > 0 and not getattr(request, "drop_stale_output", False)
