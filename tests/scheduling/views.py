"""Short ways to write a request, and hypothesis strategies for queues and budgets."""

from math import nan
from typing import Any

from hypothesis import strategies as st

from sluice.scheduling.batching import BatchBudget, BatchPlan, BatchPolicy, make_policy
from sluice.scheduling.latency.model import LatencyModel, LinearLatency, RooflineLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView

ROOMY = BatchBudget(tokens=100_000, sequences=1_000, kv_blocks=100_000, block_tokens=16)
MODEL = LinearLatency(a=0.010, b=0.001)
"""10 ms a step and 1 ms a token: worked examples can be added up by hand."""

NOW_S = 10.0


def prefill(
    request_id: str,
    prompt: int,
    slo: SLO | None = None,
    *,
    arrival_s: float = 0.0,
    computed: int = 0,
) -> RequestView:
    """A request without output; it runs if something is computed."""
    return RequestView(
        request_id=request_id,
        slo=slo or SLO(),
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        computed_tokens=computed,
        pending_tokens=prompt - computed,
        kv_blocks=-(-computed // 16),
        running=computed > 0,
    )


def decode(
    request_id: str,
    slo: SLO | None = None,
    *,
    emitted: int = 1,
    context: int = 16,
    arrival_s: float = 0.0,
    first_token_s: float = 0.0,
) -> RequestView:
    """A running request that has ``context`` computed tokens and ``emitted`` output ones."""
    return RequestView(
        request_id=request_id,
        slo=slo or SLO(),
        arrival_s=arrival_s,
        prompt_tokens=max(1, context - emitted + 1),
        computed_tokens=context,
        pending_tokens=1,
        emitted_tokens=emitted,
        first_token_s=first_token_s,
        kv_blocks=-(-context // 16),
        running=True,
    )


def prefill_due_in(request_id: str, slack_ms: float, tokens: int, priority: int = 1) -> RequestView:
    """A waiting prompt whose first token is due in ``slack_ms`` at :data:`NOW_S`, without TPOT."""
    arrival_s = NOW_S + slack_ms / 1000 - 5.0
    return prefill(request_id, tokens, SLO(ttft_s=5.0, priority=priority), arrival_s=arrival_s)


def decode_due_in(request_id: str, slack_ms: float, tpot_ms: float) -> RequestView:
    """A decode whose second token is due in ``slack_ms`` at :data:`NOW_S`."""
    slo = SLO(ttft_s=1.0, tpot_s=tpot_ms / 1000)
    arrival_s = NOW_S + (slack_ms - tpot_ms) / 1000 - 1.0
    return decode(request_id, slo, arrival_s=arrival_s, first_token_s=arrival_s + 1.0)


def planned(
    policy: str | BatchPolicy,
    *requests: RequestView,
    latency: LatencyModel = MODEL,
    budget: BatchBudget = ROOMY,
    now_s: float = NOW_S,
    **options: Any,
) -> BatchPlan:
    """The next plan of a policy, or the first one of that name with ``options``."""
    chosen = make_policy(policy, options) if isinstance(policy, str) else policy
    return chosen.plan(queue_of(*requests), now_s, latency, budget)


def order(plan: BatchPlan) -> list[str]:
    """The planned requests by id."""
    return list(plan.tokens_of)


def queue_of(*requests: RequestView) -> QueueView:
    """The queue of ``requests`` in the given order."""
    return QueueView(requests)


def maybe(values: st.SearchStrategy[float]) -> st.SearchStrategy[float | None]:
    """``values`` or none."""
    return st.one_of(st.none(), values)


slos = st.builds(
    SLO,
    ttft_s=maybe(st.floats(0.001, 10)),
    tpot_s=maybe(st.floats(0.001, 1)),
    e2e_s=maybe(st.floats(0.01, 60)),
    priority=st.integers(1, 10),
)

latencies = st.builds(
    LinearLatency,
    a=st.floats(1e-4, 0.05),
    # Besides 0, no cost so small that it vanishes in a sum with others.
    b=st.just(0.0) | st.floats(1e-9, 1e-3),
    c=st.just(0.0) | st.floats(1e-12, 1e-6),
    d=st.sampled_from([0.0, 1e-9, 1e-7]),
)

rooflines = st.builds(
    RooflineLatency,
    k1=st.floats(0, 1e-3),
    k2=st.just(0.0),
    b=st.floats(0, 0.01),
    k1_other=st.floats(0, 1e-4),
    k2_other=st.just(0.0),
    b_other=st.floats(1e-4, 0.05),
)


@st.composite
def requests(draw: st.DrawFn, index: int) -> RequestView:
    """A request in any state in which an engine can show it: waiting, prefilling, decoding, or
    preempted with output already sent."""
    block = 16
    prompt = draw(st.integers(1, 600))
    emitted = draw(st.sampled_from([0, 0, 1, 2, 50]))
    arrival_s = draw(st.floats(90, 100))
    running = draw(st.booleans())
    total = prompt + emitted
    if emitted and running and draw(st.booleans()):
        computed = total - 1
    elif running:
        computed = draw(st.integers(0, total - 1))
    else:
        computed = 0
    # A scheduler may hold a block more than the computed tokens fill.
    blocks = -(-computed // block) + (draw(st.integers(0, 1)) if running else 0)
    drafts = emitted > 0 and running and computed == total - 1
    tier = draw(st.sampled_from(["promised", "none", "best effort"]))
    return RequestView(
        request_id=f"r{index}",
        slo=draw(slos),
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        computed_tokens=computed,
        pending_tokens=total - computed,
        emitted_tokens=emitted,
        first_token_s=arrival_s + draw(st.floats(0, 5)) if emitted else None,
        kv_blocks=blocks,
        running=running,
        last_token_s=draw(st.sampled_from([None, 99.0, 100.0])) if emitted else None,
        expected_tokens=draw(st.sampled_from([nan, 1.0, 40.0, 100_000.0])),
        best_effort=tier == "best effort",
        drafted_tokens=draw(st.sampled_from([0, 1, 4, 12])) if drafts else 0,
        acceptance=draw(st.sampled_from([nan, 0.0, 0.4, 0.9, 1.0])) if drafts else nan,
        tenant=draw(st.sampled_from([0, 0, 1, 2**62])),
        weight=draw(st.sampled_from([1.0, 3.0])),
        promised=tier == "promised",
        program=draw(st.sampled_from([0, 0, 7, 2**61])),
    )


@st.composite
def queues(draw: st.DrawFn, max_size: int = 12) -> QueueView:
    """A queue in order of arrival."""
    size = draw(st.integers(0, max_size))
    items = [draw(requests(index)) for index in range(size)]
    return QueueView(tuple(sorted(items, key=lambda request: request.arrival_s)))


@st.composite
def budgets(draw: st.DrawFn, queue: QueueView) -> BatchBudget:
    """A budget under which the running requests of ``queue`` can exist."""
    running = sum(request.running for request in queue.requests)
    return BatchBudget(
        tokens=draw(st.integers(1, 1_024)),
        sequences=running + draw(st.integers(0, 6)),
        kv_blocks=draw(st.one_of(st.integers(0, 6), st.integers(0, 500))),
        block_tokens=16,
        reserve_prompt=draw(st.booleans()),
        lookahead_tokens=draw(st.sampled_from([0, 0, 0, 5])),
        draft_s=draw(st.sampled_from([0.0, 0.0, 0.002])),
    )
