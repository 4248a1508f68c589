"""A minimal engine in virtual time for worked examples: batches one after the other, each as long
as the latency model says."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.scheduling.batching import BatchBudget, BatchPolicy, PlannedTokens
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.queue import QueueView, RequestView
from tests.scheduling.views import ROOMY

MOST_STEPS = 10_000


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
) -> Run:
    """Serve ``requests``, each with the length of its output, from ``start_s`` until the last has
    ended. One enters the queue at its arrival. Blocks are not modelled: ``budget`` is the same at
    every step."""
    result = Run(tokens_s={view.request_id: [] for view, _ in requests})
    lengths = {view.request_id: length for view, length in requests}
    coming = sorted((view for view, _ in requests), key=lambda view: view.arrival_s)
    live: list[RequestView] = []
    now_s = start_s
    while coming or live:
        if not live:
            now_s = max(now_s, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now_s:
            live.append(coming.pop(0))
        plan = policy.plan(QueueView(tuple(live)), now_s, latency, budget)
        assert plan.entries, "an idle engine with work"
        assert len(result.batches) < MOST_STEPS, "it does not end"
        result.batches.append((now_s, plan.entries))
        now_s += plan.predicted_s
        granted = dict(plan.entries)
        for view in live:
            if granted.get(view.request_id) == view.pending_tokens:
                result.tokens_s[view.request_id].append(now_s)
        live = [_after(view, granted.get(view.request_id, 0), now_s) for view in live]
        live = [view for view in live if view.emitted_tokens < lengths[view.request_id]]
    return result


def _after(view: RequestView, tokens: int, now_s: float) -> RequestView:
    """The request after a batch that gave it ``tokens`` and ended at ``now_s``."""
    if not tokens:
        return view
    view = view._replace(computed_tokens=view.computed_tokens + tokens, running=True)
    if tokens < view.pending_tokens:
        return view._replace(pending_tokens=view.pending_tokens - tokens)
    first_s = now_s if view.first_token_s is None else view.first_token_s
    return view._replace(
        pending_tokens=1,
        emitted_tokens=view.emitted_tokens + 1,
        first_token_s=first_s,
        last_token_s=now_s,
    )
