"""SLOs-Serve's batches and promises: worked examples, and whole runs in virtual time."""

import numpy as np
import pytest

from sluice.scheduling.batching import BatchBudget, BatchPlan
from sluice.scheduling.batching.slos_serve import MAX_DECIDED, SLOsServe, SLOsServeOptions
from sluice.scheduling.batching.token_budget import Sarathi, SarathiOptions
from sluice.scheduling.latency.model import LatencyModel, LinearLatency, RooflineLatency
from sluice.scheduling.request.kernels import TTFT
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView
from sluice.simulation import metrics
from sluice.simulation.config import EngineConfig
from sluice.simulation.engine import Truth
from sluice.simulation.metrics import TPOTMetric
from sluice.simulation.run import simulate
from sluice.simulation.workload import Arrival, Stage, Workload
from tests.scheduling.steps import run
from tests.scheduling.views import ROOMY, decode, planned, prefill, queue_of

# 5 ms a step and 1 ms a token.
MODEL = LinearLatency(a=0.005, b=0.001)
FAST, SLOW = SLO(ttft_s=1.0, tpot_s=0.05), SLO(ttft_s=1.0, tpot_s=0.1)
NONE = SLO()


def policy(**options: object) -> SLOsServe:
    return SLOsServe(SLOsServeOptions.model_validate({"margin": 0.0, **options}))


def plan_of(chosen: SLOsServe, *requests: RequestView, now_s: float = 0.0) -> dict[str, int]:
    return planned(chosen, *requests, now_s=now_s, latency=MODEL).tokens_of


def promised(chosen: SLOsServe, *requests: RequestView, budget: BatchBudget = ROOMY) -> set[str]:
    """Those that a plan at 0 s gives a promise, seen by what precedes everything else: with one
    token per batch, the plan is one of them as long as there is one."""
    chosen.plan(queue_of(*requests), 0.0, MODEL, budget)
    keys = {hash(request.request_id): request.request_id for request in requests}
    return {keys[key] for key in chosen.promised_keys.tolist()}


def token_at(request: RequestView, last_s: float) -> RequestView:
    return request._replace(last_token_s=last_s)


def test_a_batch_takes_the_tightest_tpot_and_what_decodes_leave_of_it_is_prefill() -> None:
    fast, slow = decode("fast", FAST), decode("slow", SLO(ttft_s=1.0, tpot_s=0.08))
    # 50 ms less 5 for the step and 1 for each decode.
    assert plan_of(policy(), fast, slow, prefill("p", 500, SLOW)) == {"fast": 1, "slow": 1, "p": 43}
    # Without the tight one, t0 is 100 ms.
    assert plan_of(policy(), slow, prefill("p", 500, SLOW)) == {"slow": 1, "p": 74}
    assert plan_of(policy(margin=0.1), slow, prefill("p", 500, SLOW)) == {"slow": 1, "p": 66}


def test_a_decode_is_left_out_until_the_next_batch_would_be_too_late() -> None:
    def at(now_s: float) -> dict[str, int]:
        fast = token_at(decode("fast", FAST), now_s)
        slow = token_at(decode("slow", SLOW), 0.0)
        return plan_of(policy(), fast, slow, prefill("p", 500, SLOW), now_s=now_s)

    # Left out now it runs in the batch that ends 100 ms from now.
    assert at(0.0) == {"fast": 1, "p": 44}
    assert at(0.001) == {"fast": 1, "slow": 1, "p": 43}


def test_promised_prefills_share_the_budget_by_deadline() -> None:
    first, second = prefill("first", 30, SLO(ttft_s=0.5)), prefill("second", 30, SLO(ttft_s=0.2))
    plan = plan_of(policy(), first, second, decode("d", FAST))
    assert plan == {"d": 1, "second": 30, "first": 14}


def test_a_batch_that_ends_a_prefill_is_not_padded_past_its_deadline() -> None:
    urgent, long = prefill("urgent", 30, SLO(ttft_s=0.1)), prefill("long", 500, SLO(ttft_s=10.0))
    # 100 ms, of which 5 are fixed and 30 its own: 65 tokens may go with it.
    assert plan_of(policy(), long, urgent) == {"urgent": 30, "long": 65}


def test_a_request_that_cannot_be_held_gets_what_is_left_and_costs_nobody_a_promise() -> None:
    # 300 tokens by 0.2 s cannot be: they take 305 ms. It came first and is the first to be due.
    hopeless = prefill("hopeless", 300, SLO(ttft_s=0.2))
    chat = prefill("chat", 60, SLO(ttft_s=1.0))
    pace = decode("pace", FAST)
    assert plan_of(policy(), hopeless, chat, pace) == {"pace": 1, "chat": 44}
    chat = chat._replace(prompt_tokens=20, pending_tokens=20)
    assert plan_of(policy(), hopeless, chat, pace) == {"pace": 1, "chat": 20, "hopeless": 24}


def test_requests_without_objective_are_best_effort_and_decode_before_they_prefill() -> None:
    waiting, begun = prefill("waiting", 100, NONE), prefill("begun", 100, NONE, computed=50)
    answering, chat = decode("answering", NONE), prefill("chat", 30, FAST)
    chosen = policy()
    assert promised(chosen, waiting, begun, answering, chat) == {"chat"}
    plan = plan_of(chosen, waiting, begun, answering, chat)
    assert list(plan) == ["chat", "answering", "begun", "waiting"]


def test_an_end_to_end_objective_is_paced_over_the_expected_output() -> None:
    whole = SLO(e2e_s=2.0)
    request = prefill("r", 100, whole)._replace(expected_tokens=10.0)
    assert promised(policy(), request) == {"r"}
    # Half of it for the first token, and 10 ms for each of 100 others: less than a step's share.
    assert promised(policy(), request._replace(expected_tokens=200.0)) == set()
    # 1 s for the first token is too short for 1,100 tokens.
    assert promised(policy(), prefill("r", 1_100, whole)) == set()


def test_a_tpot_that_no_useful_batch_could_hold_is_not_promised() -> None:
    assert promised(policy(), prefill("r", 10, SLO(ttft_s=1.0, tpot_s=0.007))) == set()
    assert promised(policy(), prefill("r", 10, SLO(ttft_s=1.0, tpot_s=0.009))) == {"r"}


def test_priorities_decide_who_is_promised() -> None:
    # By 1 s there is time for one of 600 tokens.
    low, high = prefill("low", 600, SLO(ttft_s=1.0)), prefill("high", 600, SLO(1.0, priority=2))
    assert promised(policy(), low, high) == {"high"}
    assert promised(policy(), high, low) == {"high"}


def test_a_roofline_model_admits_what_both_of_its_lines_allow() -> None:
    # Reading the weights takes 40 ms whatever the batch; computing takes 1 ms a token.
    roofline = RooflineLatency(0.001, 0.0, 0.0, 0.0, 0.0, 0.04)
    request = prefill("r", 100, SLO(ttft_s=0.16, tpot_s=0.1))
    chosen = policy()
    plan = planned(chosen, request, now_s=0.0, latency=roofline)
    assert len(chosen.promised_keys) == 1
    assert plan.tokens_of == {"r": 100}
    late = request._replace(slo=SLO(ttft_s=0.09, tpot_s=0.1))
    refused = policy()
    planned(refused, late, now_s=0.0, latency=roofline)
    assert len(refused.promised_keys) == 0


def test_memory_is_promised_by_the_expected_length() -> None:
    # 100 tokens and 300 expected ones are 25 blocks.
    first = prefill("first", 100, FAST)._replace(expected_tokens=300.0)
    second = first._replace(request_id="second")
    fits, short = ROOMY._replace(kv_blocks=50), ROOMY._replace(kv_blocks=49)
    assert promised(policy(), first, second, budget=fits) == {"first", "second"}
    assert len(promised(policy(), first, second, budget=short)) == 1
    # Without a prediction the option's length counts.
    unknown = [prefill("first", 100, FAST), prefill("second", 100, FAST)]
    assert len(promised(policy(expected_tokens=300), *unknown, budget=short)) == 1
    assert len(promised(policy(expected_tokens=200), *unknown, budget=short)) == 2
    # One that has outgrown it counts as twice as long: 50 and 400 tokens, where it holds 16 blocks.
    grown = decode("grown", FAST, emitted=200, context=249)._replace(expected_tokens=100.0)
    assert promised(policy(), grown, first, budget=ROOMY._replace(kv_blocks=38)) == {
        "grown",
        "first",
    }
    assert promised(policy(), grown, first, budget=ROOMY._replace(kv_blocks=37)) == {"grown"}


def test_memory_that_an_output_frees_when_it_ends_is_promised_to_others() -> None:
    # Of 101 blocks each, the old one lacks 10 and the young one 99. In 160 tokens the old one ends,
    # and until then both need 10, and one more where a block begins: 22, and 25 for the first.
    old = decode("old", FAST, emitted=1_440, context=1_455)._replace(expected_tokens=1_600.0)
    young = decode("young", FAST, emitted=16, context=31)._replace(expected_tokens=1_600.0)
    first = prefill("first", 100, FAST)._replace(expected_tokens=300.0)
    everyone = {"old", "young", "first"}
    fits, short = ROOMY._replace(kv_blocks=47), ROOMY._replace(kv_blocks=46)
    assert promised(policy(), old, young, first, budget=fits) == everyone
    assert promised(policy(), old, young, first, budget=short) == everyone - {"first"}
    # At half the pace the young one may run as often, or end so late: it counts with all of it.
    slow = young._replace(slo=SLOW)
    fits, short = ROOMY._replace(kv_blocks=134), ROOMY._replace(kv_blocks=133)
    assert promised(policy(), old, slow, first, budget=fits) == everyone
    assert promised(policy(), old, slow, first, budget=short) == everyone - {"first"}


def test_places_are_promised_too() -> None:
    waiting = [prefill(f"w{index}", 10, FAST) for index in range(4)]
    budget = ROOMY._replace(sequences=3)
    assert len(promised(policy(), decode("d", FAST), *waiting, budget=budget)) == 3


def test_a_declined_request_is_asked_again_when_another_has_left() -> None:
    chosen = policy()
    first, second = prefill("first", 500, SLO(ttft_s=0.9)), prefill("second", 600, SLO(ttft_s=0.9))
    assert promised(chosen, first, second) == {"first"}
    assert promised(chosen, first, second) == {"first"}
    assert promised(chosen, second) == {"second"}


def test_of_a_burst_the_earliest_are_decided_on_first_and_the_others_lose_nothing() -> None:
    # One token each: a batch of all takes 55 ms, and all of them can be promised.
    chosen = policy()
    waiting = [prefill(f"r{n}", 1, SLO(ttft_s=5.0, tpot_s=0.1)) for n in range(2 * MAX_DECIDED + 9)]
    first = {view.request_id for view in waiting[:MAX_DECIDED]}
    assert promised(chosen, *waiting) == first
    # Those that were served meanwhile without a promise are asked like the others.
    begun = [decode(view.request_id, view.slo, context=1) for view in waiting]
    assert len(promised(chosen, *begun)) == 2 * MAX_DECIDED
    assert promised(chosen, *begun) == {view.request_id for view in waiting}


def test_an_arrival_does_not_take_a_promise_back_and_what_has_left_is_forgotten() -> None:
    chosen = policy()
    held = prefill("held", 600, SLO(ttft_s=0.9))
    assert promised(chosen, held) == {"held"}
    better = prefill("better", 600, SLO(ttft_s=0.9, priority=10))
    assert promised(chosen, held, better) == {"held"}
    for index in range(100):
        promised(chosen, prefill(f"r{index}", 10, FAST))
    assert len(chosen.promised_keys) == 1
    # It is new again.
    assert promised(chosen, better, held) == {"better"}


def test_a_decode_whose_prefill_ran_elsewhere_is_promised_by_its_pace_alone() -> None:
    # Its next token is late already, as its KV had to travel.
    arrived = decode("arrived", FAST, context=40)._replace(running=False, first_token_s=-1.0)
    assert promised(policy(), arrived) == {"arrived"}
    # 45 of 50 ms are taken by 45 others: it is declined, and asked again when one has left.
    others = [decode(f"d{index}", FAST, context=40) for index in range(45)]
    chosen = policy()
    assert "arrived" not in promised(chosen, *others, arrived)
    assert "arrived" in promised(chosen, *others[1:], arrived)


def test_a_promise_survives_the_loss_of_the_kv() -> None:
    chosen = policy()
    running = decode("r", FAST, emitted=20, context=50)
    assert promised(chosen, running, prefill("other", 10, FAST)) == {"r", "other"}
    lost = running._replace(running=False, kv_blocks=0, computed_tokens=0, pending_tokens=51)
    assert promised(chosen, lost, prefill("other", 10, FAST)) == {"r", "other"}


def test_a_new_stage_is_planned_by_its_own_objective_and_decides_anew() -> None:
    # It thinks at 10 ms a token, and nothing fits beside that; then it answers at 200 ms.
    chosen = policy()
    thinking = decode("thinker", SLO(ttft_s=1.0, tpot_s=0.01))
    chat = prefill("chat", 600, SLO(ttft_s=1.0, tpot_s=0.2))
    assert promised(chosen, thinking, chat) == {"thinker"}
    answering = thinking._replace(slo=SLO(ttft_s=1.0, tpot_s=0.2))
    assert promised(chosen, answering, chat) == {"thinker", "chat"}
    assert plan_of(chosen, answering, chat) == {"thinker": 1, "chat": 194}


def preempting(
    chosen: SLOsServe, *requests: RequestView, kv_blocks: int
) -> tuple[set[str], set[str]]:
    """What a plan runs, and the running requests that it leaves out, which can lose their KV."""
    budget = BatchBudget(4_096, 64, kv_blocks, 16)
    plan = chosen.plan(queue_of(*requests), 0.0, MODEL, budget)
    ran = {entry.request_id for entry in plan.entries}
    return ran, {r.request_id for r in requests if r.running} - ran


def test_best_effort_loses_its_kv_before_any_promised_request_does() -> None:
    # Both decodes are at the end of a block. One is not due, and the prefill fills the batch.
    due = token_at(decode("due", FAST, context=32), -0.04)
    early = token_at(decode("early", SLO(ttft_s=1.0, tpot_s=10.0), context=32), 0.0)
    filling = prefill("filling", 200, FAST, computed=16)._replace(kv_blocks=20)
    others = [decode(f"o{index}", NONE, context=40) for index in range(3)]
    ran, left_out = preempting(policy(), due, *others, early, filling, kv_blocks=0)
    assert ran == {"due", "early", "filling"}
    assert left_out == {"o0", "o1", "o2"}
    # With blocks enough the early one waits.
    ran, left_out = preempting(policy(), due, *others, early, filling, kv_blocks=500)
    assert ran == {"due", "filling"}


def test_best_effort_does_not_take_the_blocks_of_others() -> None:
    growing, other = decode("growing", NONE, context=32), decode("other", NONE, context=40)
    pace = decode("pace", FAST, context=40)
    ran, left_out = preempting(policy(), growing, other, pace, kv_blocks=0)
    assert (ran, left_out) == ({"other", "pace"}, {"growing"})
    # Where nothing else can run, it must.
    ran, left_out = preempting(policy(), growing, decode("too", NONE, context=48), kv_blocks=0)
    assert len(ran) == len(left_out) == 1


def test_best_effort_is_let_in_only_if_its_whole_length_fits() -> None:
    waiting = prefill("waiting", 100, NONE)._replace(expected_tokens=60.0)
    # The promised request holds 3 blocks and will need 7 more; the other needs 10.
    pace = decode("pace", FAST, emitted=1, context=40)._replace(expected_tokens=120.0)
    assert preempting(policy(), pace, waiting, kv_blocks=17)[0] == {"pace", "waiting"}
    assert preempting(policy(), pace, waiting, kv_blocks=16)[0] == {"pace"}
    # What runs without a promise counts as well, here with 5 blocks more than it has.
    begun = decode("begun", NONE, emitted=1, context=40)._replace(expected_tokens=80.0)
    both = {"begun", "waiting"}
    assert preempting(policy(), begun, waiting, kv_blocks=15)[0] == both
    assert preempting(policy(), begun, waiting, kv_blocks=14)[0] == {"begun"}
    assert preempting(policy(), waiting, kv_blocks=7)[0] == {"waiting"}, "alone it may try"


# Whole runs.

TRUTH = LinearLatency(a=0.008, b=0.000_06, c=0.000_000_1, d=2e-9)


class Recording(SLOsServe):
    """Remembers whom it promised in the first stage; a later one has no TTFT but its pace."""

    def __init__(self, options: SLOsServeOptions | None = None) -> None:
        super().__init__(options)
        self.ever: set[int] = set()

    def plan(
        self, queue: QueueView, now_s: float, latency: LatencyModel, budget: BatchBudget
    ) -> BatchPlan:
        plan = super().plan(queue, now_s, latency, budget)
        first = queue.keys[queue.table[:, TTFT] >= 0.5]
        self.ever.update(np.intersect1d(first, self.promised_keys).tolist())
        return plan


def bursts(seed: int, stages: bool = False) -> Workload:
    """400 requests at three paces, in bursts beyond what the engine can hold."""
    random = np.random.default_rng(seed)
    arrivals: list[Arrival] = []
    time_s = 0.0
    while len(arrivals) < 400:
        time_s += random.exponential(1.5)
        for _ in range(int(random.integers(1, 30))):
            prompt, output = (int(1 + random.lognormal(mean, 0.8)) for mean in (6.5, 4.0))
            slo = SLO(
                float(random.choice([0.5, 1.0, 2.0])), float(random.choice([0.05, 0.08, 0.1]))
            )
            if stages:
                parts = [Stage(output, slo), Stage(1 + output // 2, SLO(tpot_s=0.1))]
                arrivals.append(Arrival.of_stages(time_s, prompt, parts))
            else:
                arrivals.append(Arrival(time_s, prompt, output, slo))
    return Workload("bursts", tuple(arrivals))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("anchor", "metric"),
    [("last_token", TPOTMetric.WINDOW), ("first_token", TPOTMetric.RUNNING_MAX)],
)
def test_what_is_promised_is_held_through_bursts(
    seed: int, anchor: str, metric: TPOTMetric
) -> None:
    chosen = Recording(SLOsServeOptions.model_validate({"anchor": anchor}))
    config = EngineConfig(kv_blocks=3_000, max_sequences=64)
    result = simulate(bursts(seed), chosen, Truth(TRUTH, noise=0.0), TRUTH, config)
    held = metrics.attained(result.requests, metrics.stages(result.requests), metric)
    ever = np.array(sorted(chosen.ever))
    assert 40 < len(ever) < 390, "the load must force a choice"
    assert held[ever].all()
    assert not result.requests.failures
    assert not np.isnan(result.requests.emitted_s).any(), "the declined ones are served as well"
    assert result.recomputed_tokens <= 0.02 * result.computed_tokens


def test_requests_of_several_stages_are_held_in_each() -> None:
    chosen = Recording()
    result = simulate(bursts(4, stages=True), chosen, Truth(TRUTH, noise=0.0), TRUTH)
    measured = metrics.stages(result.requests)
    held = metrics.attained(result.requests, measured, TPOTMetric.WINDOW)
    ever = np.array(sorted(chosen.ever))
    assert 40 < len(ever) < 390
    assert held[ever].mean() >= 0.99


def test_figure_3_as_a_run() -> None:
    """§2.3: six tokens per time unit, three ongoing decodes and a burst of four requests of six
    prefill tokens; TTFT is six units and TPOT one. SLOs-Serve attains all decodes and three of the
    four; decode first (Sarathi) ends the third prefill with unit 11."""
    slo, arrived_s = SLO(ttft_s=6.0, tpot_s=1.0), {"d": -6.0, "r": 0.0}
    ongoing = [decode(f"d{n}", slo, context=1, arrival_s=-6.0) for n in range(3)]
    burst = [prefill(f"r{n}", 6, slo) for n in range(1, 5)]
    jobs = [*((view, 29) for view in ongoing), *((view, 20) for view in burst)]

    sarathi = run(Sarathi(SarathiOptions(token_budget=6)), jobs, LinearLatency(a=1.0, b=0.0))
    first_s = [sarathi.tokens_s[f"r{n}"][0] for n in range(1, 5)]
    assert first_s[:3] == [2, 5, 11]
    assert first_s[3] > 11

    slos_serve = run(policy(anchor="envelope"), jobs, LinearLatency(a=0.0, b=1 / 6))
    late = {
        name
        for name, tokens_s in slos_serve.tokens_s.items()
        for index, time_s in enumerate(tokens_s, name[0] == "d")
        if time_s > arrived_s[name[0]] + 6 + index + 1e-9
    }
    assert late <= {"r4"}
    assert slos_serve.tokens_s["r3"][0] == pytest.approx(6)
