"""SlideBatching by hand: 10 ms a step, 1 ms a token, all at t = 10 s (ProServe Algorithm 1)."""

from functools import partial

import pytest

from sluice.scheduling.batching import make_policy
from sluice.scheduling.batching.slidebatching import SlideBatchingOptions
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from tests.scheduling.steps import run
from tests.scheduling.views import (
    NOW_S,
    decode,
    decode_due_in,
    order,
    planned,
    prefill,
    prefill_due_in,
)

plan = partial(planned, "slidebatching")

# Budget 200 ms, phi_a = 200/190 * 300 ms = 316 ms: the first two are urgent, by density.
SLIDING = (
    prefill_due_in("first", 200, 100),
    prefill_due_in("second", 300, 100, priority=2),
    prefill_due_in("third", 400, 100, priority=9),
)


def test_at_low_load_all_are_normal_and_run_by_deadline() -> None:
    # The queue needs 40/30 * 60 = 80 ms, and the first is due in 400.
    result = plan(
        prefill_due_in("c", 900, 10, priority=10),
        prefill_due_in("a", 400, 20),
        prefill_due_in("b", 500, 30),
    )
    assert result.entries == (("a", 20), ("b", 30), ("c", 10))


def test_at_high_load_all_are_urgent_and_run_by_density() -> None:
    # Budget 200 ms; the queue needs 200/190 * 600 = 632 ms, more than any has.
    # Densities per token: 1/100, 1/400, 4/100. Fill: 10 + 100 + 90.
    result = plan(
        prefill_due_in("plain", 200, 100),
        prefill_due_in("long", 300, 400),
        prefill_due_in("weighty", 400, 100, priority=4),
    )
    assert result.entries == (("weighty", 100), ("plain", 90))


def test_the_boundary_slides_between_urgent_and_normal() -> None:
    assert plan(*SLIDING).entries == (("second", 100), ("first", 90))
    assert order(plan(*SLIDING, gamma=0.0)) == ["first", "second"], "deadline first"
    assert order(plan(*SLIDING, gamma=10.0)) == ["third", "second"], "density first"


def test_phi_c_counts_only_the_work_due_no_later() -> None:
    # phi_c is 105, 211 and 316 ms for the three: none is due sooner than that, so none is urgent.
    assert plan(*SLIDING, boundary="phi_c").entries == (("first", 100), ("second", 90))
    # With twice the pessimism, 211, 421 and 632: all are.
    assert order(plan(*SLIDING, boundary="phi_c", gamma=2.0)) == ["third", "second"]


def test_a_request_that_is_late_anyway_pins_the_budget_only_if_asked_to() -> None:
    # `late` needs 10 + 100 ms and has 50. Live: 300 ms. eta: 50 ms.
    queue = (prefill_due_in("late", 50, 100), prefill_due_in("live", 300, 250, priority=10))
    # By density: 10/250 against 1/100 a token.
    assert plan(*queue).entries == (("live", 250), ("late", 40))
    assert plan(*queue, late="include").entries == (("live", 40),)


def test_the_budget_is_never_below_eta_and_eta_never_above_the_least_tpot() -> None:
    late = prefill_due_in("late", -100, 100)
    assert plan(late, eta_s=0.05).entries == (("late", 40),)
    assert plan(late, decode_due_in("d", -5, 30), eta_s=0.05).entries == (("d", 1), ("late", 19))
    # A TPOT that no useful batch can hold is no bound, and an eta below a step's fixed time is
    # doubled.
    assert plan(late, decode_due_in("d", -5, 14), eta_s=0.05).entries == (("d", 1), ("late", 39))
    assert plan(late, eta_s=0.005).entries == (("late", 10),)


def test_first_tokens_weigh_more_by_the_option() -> None:
    # Both urgent. Per ms: the decode 1, the prompt of 10 tokens w / 10.
    queue = (decode_due_in("d", 12, 30), prefill_due_in("p", 12, 10))
    assert order(plan(*queue, first_weight=9.0)) == ["d", "p"]
    assert order(plan(*queue, first_weight=11.0))[0] == "p"


def test_requests_without_a_deadline_come_last_and_delay_nobody() -> None:
    free = prefill("free", 10_000, SLO(priority=10), arrival_s=NOW_S - 60)
    free_decode = decode("free-decode", SLO(priority=10))
    # Were the 10 s of `free` counted, both would be urgent, and `second` first by density.
    queue = (
        free,
        free_decode,
        prefill_due_in("first", 400, 100),
        prefill_due_in("second", 500, 100, priority=9),
    )
    assert plan(*queue).entries == (
        ("first", 100),
        ("second", 100),
        ("free-decode", 1),
        ("free", 189),
    )


def test_a_prompt_too_deep_in_context_for_the_decodes_slack_moves_all_the_same() -> None:
    deep = LinearLatency(a=0.010, b=0.001, c=0.000_01)
    begun = prefill("begun", 5_000, SLO(ttft_s=5.0), computed=4_000, arrival_s=5.0)
    # Not one token of `begun` fits the 30 ms: its context alone takes 40. The decode and the first
    # token are three quarters of a batch of (10 + 1.17 + 41.01) / 0.75 = 69.6 ms.
    result = plan(begun, decode_due_in("d", 30, 50), latency=deep)
    assert result.entries == (("d", 1), ("begun", 18))


def test_decodes_that_run_ahead_of_their_pace_do_not_stretch_a_tight_ones_batch() -> None:
    # The ten take 10 ms, but none is due soon: the budget is the 20 ms of `tight`.
    ahead = [decode_due_in(f"d{index}", 200, 100) for index in range(10)]
    result = plan(decode_due_in("tight", 20, 20), *ahead, prefill_due_in("p", 500, 400))
    assert result.predicted_s <= 0.0200001


def test_a_step_longer_than_every_budget_still_moves() -> None:
    slow = LinearLatency(a=0.010, b=1.0)
    result = plan(prefill_due_in("p", 100, 500), latency=slow)
    assert result.entries == (("p", 16),), "one block at a time"


def test_phi_p_counts_a_batch_per_request() -> None:
    # Budget 340 ms. phi_a is 340/330 * 305 = 314 ms, so all are normal. phi_p is 305 + 4 * 10 =
    # 345 ms, so all but the last are urgent and `heavy` is the densest of them.
    queue = (
        prefill_due_in("p0", 340, 100),
        prefill_due_in("p1", 341, 100),
        prefill_due_in("heavy", 344, 5, priority=10),
        prefill_due_in("p2", 346, 100),
    )
    assert order(plan(*queue, boundary="phi_a")) == ["p0", "p1", "heavy", "p2"]
    assert order(plan(*queue, boundary="phi_p")) == ["heavy", "p0", "p1", "p2"]
    # A replica that only prefills counts so by itself, unless the option says otherwise.
    for role, boundary, expected in (
        ("prefill", None, "phi_p"),
        ("prefill", "phi_c", "phi_c"),
        ("mixed", None, "phi_a"),
        ("decode", None, "phi_a"),
        ("decode", "phi_p", "phi_p"),
    ):
        policy = make_policy("slidebatching", {"boundary": boundary}, role=role)
        assert policy.options == SlideBatchingOptions(boundary=expected)


def test_without_the_partition_all_run_by_deadline_or_all_by_density() -> None:
    assert plan(*SLIDING, order="deadline").entries == (("first", 100), ("second", 90))
    assert plan(*SLIDING, order="density").entries == (("third", 100), ("second", 90))
    # A gamma of 0 is not the same: late requests are still urgent there.
    late = prefill_due_in("late", -10, 10)
    later = prefill_due_in("later", -20, 100)
    assert order(plan(later, late, order="deadline"))[0] == "later"
    assert order(plan(later, late, gamma=0.0))[0] == "late"


def test_without_the_estimator_only_the_token_limit_bounds_a_batch_and_lateness_is_urgency() -> (
    None
):
    late = prefill_due_in("late", -10, 50)
    result = plan(*SLIDING, late, latency_aware=False)
    assert result.entries == (("late", 50), ("first", 100), ("second", 100), ("third", 100))
    both = (prefill_due_in("long-late", -90, 90, priority=1), late)
    assert order(plan(*SLIDING, *both, latency_aware=False))[:2] == ["late", "long-late"]


def test_a_prefill_share_of_zero_leaves_the_budget_to_the_decodes() -> None:
    # Budget 20 ms; ten urgent decodes fill it. A share of a quarter stretches it for `p`.
    decodes = [decode_due_in(f"d{index}", 20, 20) for index in range(10)]
    queue = (*decodes, prefill_due_in("p", 25, 400))
    assert plan(*queue).entries[-1] == ("p", 8)
    literal = plan(*queue, prefill_share=0.0)
    assert literal.predicted_s <= 0.0200001
    assert "p" not in order(literal)


def test_the_slack_that_a_router_keeps_free_is_what_a_longer_request_needs() -> None:
    """ProServe Fig. 8. The drawing is lost but for its numbers: R1 takes 200 ms, R2 400 ms, the
    objective is 700 ms, and one instance has 400 ms of work, the other 200. R1 comes before R2, at
    once here. The placements are the figure's; what they lead to is what the instances plan."""
    model = LinearLatency(a=0.0, b=0.001)
    slo = SLO(ttft_s=0.7)
    work = {"A": 400, "B": 200, "R1": 200, "R2": 400}

    def missed(*names: str) -> set[str]:
        views = [prefill(name, work[name], slo) for name in names]
        policy = make_policy("slidebatching", {"order": "deadline"})
        result = run(policy, [(view, 1) for view in views], model)
        return {name for name in names if result.tokens_s[name][0] > 0.7 + 1e-9}

    # Min-Load sends R1 to the instance with less work; then R2 is late wherever it goes.
    assert missed("B", "R1", "R2") == {"R2"}
    assert missed("A", "R2") == {"R2"}
    # R1 to the instance that can just take it: both are met.
    assert missed("A", "R1") == set()
    assert missed("B", "R2") == set()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_tpot_of_just_an_empty_step_sets_no_budget() -> None:
    # By a model of fixed time alone a decode adds nothing, and phi would divide by nothing.
    free = LinearLatency(a=0.010, b=0.0)
    late = decode_due_in("late", -100, 10)
    assert plan(late, latency=free, prefill_share=0.0).entries == (("late", 1),)
