"""A minimal engine in virtual time for worked examples: batches one after the other, each as long
as the latency model says. It preempts by recompute what a plan draws on, as the real one does."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy, PlannedTokens
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from tests.scheduling.views import ROOMY, prefill

MAX_STEPS = 20_000

OVERLOAD = [
    (prefill(f"s{n}", 40, SLO(ttft_s=0.5), arrival_s=0.03 * max(0, n - 50)), 1) for n in range(700)
]
"""20 s of prompts that are due soon, of which 40 ms of work come every 30 ms."""


@dataclass
class Run:
    """What happened: each batch with its start, and when every token of a request left."""

    batches: list[tuple[float, tuple[PlannedTokens, ...]]] = field(default_factory=list)
    tokens_s: dict[str, list[float]] = field(default_factory=dict)


def run(
    policy: BatchPolicy,
    requests: Sequence[tuple[RequestView, int]],
    latency: LatencyModel,
    budget: BatchBudget = ROOMY,
    start_s: float = 0.0,
    until: str = "",
) -> Run:
    """Serve ``requests``, each with the length of its output, from ``start_s`` until the last, or
    the one named ``until``, has ended. ``budget.kv_blocks`` are all blocks of the engine."""
    result = Run(tokens_s={view.request_id: [] for view, _ in requests})
    lengths = {view.request_id: length for view, length in requests}
    coming = deque(sorted((view for view, _ in requests), key=lambda view: view.arrival_s))
    live: list[RequestView] = []
    now_s = start_s
    while (coming or live) and not (until and len(result.tokens_s[until]) == lengths[until]):
        if not live:
            now_s = max(now_s, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now_s:
            live.append(coming.popleft())
        free = budget.kv_blocks - sum(view.kv_blocks for view in live)
        plan = policy.plan(QueueView(live), now_s, latency, budget._replace(kv_blocks=free))
        assert plan.entries, "an idle engine with work"
        assert len(result.batches) < MAX_STEPS, "it does not end"
        result.batches.append((now_s, plan.entries))
        now_s += plan.predicted_s
        live = [_after(view, plan, now_s) for view in _preempted(live, plan, free)]
        for view in live:
            if view.last_token_s == now_s:
                result.tokens_s[view.request_id].append(now_s)
        live = [view for view in live if view.emitted_tokens < lengths[view.request_id]]
    return result


def _preempted(live: list[RequestView], plan: BatchPlan, free: int) -> list[RequestView]:
    """The requests, of which those have lost their KV that the plan evicts or draws on."""
    left_out = [v for v in live if v.running and v.request_id not in plan.tokens_of]
    gone = set(plan.evicted_ids)
    needed = sum(_blocks(v.computed_tokens + plan.tokens_of.get(v.request_id, 0)) for v in live)
    missing = needed - sum(view.kv_blocks for view in live) - free
    missing -= sum(view.kv_blocks for view in left_out if view.request_id in gone)
    while missing > 0:
        victim = left_out.pop()
        if victim.request_id not in gone:
            gone.add(victim.request_id)
            missing -= victim.kv_blocks
    return [
        view._replace(
            computed_tokens=0,
            pending_tokens=view.computed_tokens + view.pending_tokens,
            kv_blocks=0,
            running=False,
        )
        if view.request_id in gone
        else view
        for view in live
    ]


def _blocks(tokens: int) -> int:
    return -(-tokens // 16)


def _after(view: RequestView, plan: BatchPlan, now_s: float) -> RequestView:
    """The request after a batch that ended at ``now_s``."""
    tokens = plan.tokens_of.get(view.request_id, 0)
    if not tokens:
        return view
    computed = view.computed_tokens + tokens
    view = view._replace(computed_tokens=computed, kv_blocks=_blocks(computed), running=True)
    if tokens < view.pending_tokens:
        return view._replace(pending_tokens=view.pending_tokens - tokens)
    return view._replace(
        pending_tokens=1,
        emitted_tokens=view.emitted_tokens + 1,
        first_token_s=now_s if view.first_token_s is None else view.first_token_s,
        last_token_s=now_s,
    )
