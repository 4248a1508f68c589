"""The controller as a plain object: decisions, reports and the operator's view."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sluice.controller.actor import SETTLING_S
from sluice.controller.config import ControllerConfig, fingerprint_of
from sluice.controller.observability.metrics import MAX_PUSH_SAMPLES
from sluice.controller.state.mirror import MAX_REPLICAS
from sluice.protocol.messages import MAX_QUERIES, LateNotice, MetricSample, RequestEnding
from sluice.scheduling.placement.calibration import PRIOR
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from sluice.scheduling.routing import POLICIES
from tests.controller.fleet import (
    Clock,
    ObservedController,
    decode_row,
    delta,
    hello,
    newer_push,
    query,
    waiting_row,
)


def make(policy: str = "pab", **options: Any) -> tuple[ObservedController, Clock]:
    """A controller that promises nothing, unless ``admission`` says otherwise."""
    clock = Clock()
    options.setdefault("admission", "none")
    return ObservedController(ControllerConfig(policy=policy, **options), clock), clock


async def epoch_of(controller: ObservedController) -> int:
    return (await controller.route([])).epoch


async def replica_of(controller: ObservedController, replica_id: str) -> dict[str, Any]:
    replicas = (await controller.snapshot())["replicas"]
    (found,) = [entry for entry in replicas if entry["replica_id"] == replica_id]
    return dict(found)


async def samples(
    controller: ObservedController,
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = (await controller.render_metrics()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("policy", POLICIES)
async def test_without_a_replica_nothing_is_placed(policy: str) -> None:
    controller, _ = make(policy)
    assert (await controller.route([query(1)])).decisions == (RouteDecision(None, "no_replica"),)


@pytest.mark.parametrize("policy", ["pab", "least_tokens", "power_of_two", "round_robin"])
async def test_two_requests_in_a_row_go_to_two_equal_replicas(policy: str) -> None:
    controller, _ = make(policy)
    await controller.hello(hello("a"))
    await controller.hello(hello("b"))
    # In one call or in two: no report came between them.
    (first,) = (await controller.route([query(1)])).decisions
    second, third, fourth = (await controller.route([query(2), query(3), query(4)])).decisions
    assert {first.replica_id, second.replica_id} == {"a", "b"}
    assert {third.replica_id, fourth.replica_id} == {"a", "b"}


async def test_a_burst_spreads_by_tokens_not_by_requests() -> None:
    controller, _ = make("least_tokens")
    await controller.hello(hello("a"))
    await controller.hello(hello("b"))
    queries = [query(0, 1_000), *(query(key, 100) for key in range(1, 11))]
    reply = await controller.route(queries)
    assert [decision.replica_id for decision in reply.decisions] == ["a"] + ["b"] * 10


async def test_a_reservation_ends_when_the_replica_reports_the_request() -> None:
    controller, _ = make()
    await controller.hello(hello("a"))
    epoch = await epoch_of(controller)
    await controller.route([query(1, 100), query(2, 50)])
    before = await replica_of(controller, "a")
    assert (before["reserved"], before["prefill_tokens"]) == (2, 150)
    # One has arrived and waits there; the other has come and gone between two reports.
    await controller.report(delta("a", epoch, 1, {0: waiting_row(1, 120)}, finished=(2,)))
    after = await replica_of(controller, "a")
    assert (after["reserved"], after["waiting"]) == (0, 1)
    assert after["prefill_tokens"] == 120


async def test_a_request_that_went_elsewhere_ends_its_reservation_too() -> None:
    controller, _ = make()
    await controller.hello(hello("a"))
    await controller.route([query(1)])
    await controller.hello(hello("b", [waiting_row(1, 100)]))
    assert (await replica_of(controller, "a"))["reserved"] == 0


async def test_a_reservation_ends_by_release_and_by_age() -> None:
    controller, clock = make(reservation_ttl_s=5, stale_after_s=60)
    await controller.hello(hello("a"))
    await controller.route([query(1), query(2)])
    await controller.release([1, 77])
    assert (await controller.snapshot())["reservations"] == 1
    clock.advance(5)
    assert (await controller.snapshot())["reservations"] == 0
    assert (await replica_of(controller, "a"))["prefill_tokens"] == 0


async def test_while_it_stands_still_reservations_do_not_age() -> None:
    """What would confirm them waits in its sockets."""
    controller, clock = make(reservation_ttl_s=5)
    await controller.hello(hello("a"))
    epoch = (await controller.route([query(1), query(2)])).epoch
    clock.advance(20)
    assert (await controller.snapshot())["reservations"] == 2
    await controller.report(delta("a", epoch, 1, {0: waiting_row(1, 100)}))
    for seq in range(2, 7):
        assert (await controller.snapshot())["reservations_expired"] == 0
        clock.advance(1)
        await controller.report(delta("a", epoch, seq))
    assert (await controller.snapshot())["reservations_expired"] == 1


async def test_a_restarted_controller_asks_for_a_hello() -> None:
    controller, _ = make()
    old_epoch = await epoch_of(controller)
    restarted, _ = make()
    reply = await restarted.report(delta("a", old_epoch, 8, {0: waiting_row(1, 10)}))
    assert reply.resync
    assert reply.epoch != old_epoch
    assert not (await restarted.hello(hello("a", seq=8))).resync
    assert not (await restarted.report(delta("a", reply.epoch, 9))).resync


async def test_replicas_that_leave_are_not_chosen_and_lose_their_reservations() -> None:
    controller, clock = make()
    for name in "abcd":
        await controller.hello(hello(name))
    epoch = await epoch_of(controller)
    await controller.route([query(key) for key in range(8)])
    await controller.replica_gone(["a", "never seen"])
    await controller.goodbye("b")
    await controller.report(delta("c", epoch, 1, draining=True))
    reply = await controller.route([query(key) for key in range(10, 20)])
    assert {decision.replica_id for decision in reply.decisions} == {"d"}
    assert (await controller.snapshot())["reservations"] == 2 + 2 + 10  # c's, d's, the new ones
    clock.advance(2)
    assert (await controller.route([query(30)])).decisions[0] == RouteDecision(None, "no_replica")
    clock.advance(28)
    assert (await controller.snapshot())["replicas"] == []
    assert (await controller.snapshot())["reservations"] == 0


@pytest.mark.parametrize(
    "bad",
    [
        None,
        query(-1),
        query(1 << 63),
        query(1, -1),
        query(1)._replace(prompt_tokens=1.5),  # type: ignore[arg-type]
        query(1)._replace(waited_s=float("nan")),
        query(1)._replace(waited_s=-1.0),
        query(1)._replace(slo=None),  # type: ignore[arg-type]
    ],
)
async def test_one_bad_query_does_not_spoil_the_batch(bad: Any) -> None:
    controller, _ = make()
    await controller.hello(hello("a"))
    reply = await controller.route([query(1), bad, query(2)])
    assert [decision.replica_id for decision in reply.decisions] == ["a", None, "a"]
    assert reply.decisions[1].reason == "invalid_query"


async def test_calls_are_bounded_and_checked() -> None:
    controller, _ = make()
    with pytest.raises(ValueError, match=f"at most {MAX_QUERIES}"):
        await controller.route([query(1)] * (MAX_QUERIES + 1))
    with pytest.raises(ValueError, match=r"keys\[0\]: expected `int`, got 'x'"):
        await controller.release(["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="replica_ids: expected `array`, got 'abc'"):
        await controller.replica_gone("abc")
    with pytest.raises(ValueError, match="replica_id: expected `str` of length >= 1, got ''"):
        await controller.goodbye("")


async def test_the_page_shows_decisions_replicas_and_refusals() -> None:
    controller, clock = make(policy="least_tokens")
    await controller.route([query(0)])
    await controller.hello(hello("a", [waiting_row(1, 300), decode_row(2, 80)]))
    await controller.hello(hello("b", draining=True))
    await controller.route([query(3, 7), query(4, 7)])
    with pytest.raises(ValueError, match="capacity"):
        await controller.hello(hello("c", capacity=0))
    clock.advance(0.5)
    page = await samples(controller)
    placed = (("outcome", "placed"), ("policy", "least_tokens"))
    unplaced = (("outcome", "no_replica"), ("policy", "least_tokens"))
    assert page["sluice_decisions_total", placed] == 2
    assert page["sluice_decisions_total", unplaced] == 1
    assert page["sluice_decision_seconds_count", ()] == 3
    assert page["sluice_reports_total", (("outcome", "refused"),)] == 1
    assert page["sluice_replicas", (("role", "mixed"), ("state", "fresh"))] == 1
    assert page["sluice_replicas", (("role", "mixed"), ("state", "draining"))] == 1
    assert page["sluice_replicas", (("role", "decode"), ("state", "fresh"))] == 0
    assert page["sluice_reservations", ()] == 2
    replica = (("replica", "a"), ("role", "mixed"))
    assert page["sluice_replica_waiting_requests", replica] == 1
    assert page["sluice_replica_running_requests", replica] == 1
    assert page["sluice_replica_pending_prefill_tokens", replica] == 314
    assert page["sluice_replica_kv_usage_ratio", replica] == pytest.approx(0.1)
    assert page["sluice_replica_report_age_seconds", replica[:1]] == pytest.approx(0.5)
    clock.advance(40)
    assert ("sluice_replica_waiting_requests", replica) not in await samples(controller)


async def test_pushed_metrics_appear_beside_the_controllers_own() -> None:
    controller, clock = make()
    sample = MetricSample("sluice_x", "counter", "X.", "sluice_x_total", (), 3.0)
    gauge = MetricSample("sluice_y", "gauge", "Y.", "sluice_y", (), 3.0)
    await controller.push_metrics(newer_push("router-1", (sample, gauge)))
    # After a restart not all have pushed yet: a scraper must not see a part of the sum.
    early = await samples(controller)
    assert early["sluice_y", ()] == 3 and ("sluice_x_total", ()) not in early
    await controller.push_metrics(newer_push("router-2", (sample,)))
    clock.advance(SETTLING_S)
    assert (await samples(controller))["sluice_x_total", ()] == 6
    own = MetricSample("sluice_reports", "counter", "X.", "sluice_reports_total", (), 3.0)
    await controller.push_metrics(newer_push("router-3", (sample, own)))
    page = await samples(controller)
    assert page["sluice_x_total", ()] == 9
    assert page["sluice_metrics_refused_total", (("part", "sample"),)] == 1


async def test_the_page_of_the_largest_fleet_is_whole() -> None:
    controller, _ = make()
    for index in range(MAX_REPLICAS):
        await controller.hello(hello(f"replica-{index}", capacity=1))
    page = await samples(controller)
    assert page["sluice_replicas", (("role", "mixed"), ("state", "fresh"))] == MAX_REPLICAS
    ages = [name for name, _ in page if name == "sluice_replica_report_age_seconds"]
    assert len(ages) == MAX_REPLICAS
    assert len(page) > MAX_PUSH_SAMPLES


async def test_the_operators_view_is_json() -> None:
    controller, _ = make()
    await controller.hello(hello("a", [waiting_row(1, 300)]))
    view = json.loads(json.dumps(await controller.snapshot(), allow_nan=False))
    assert view["fingerprint"] == await controller.fingerprint()
    assert view["replicas"][0]["condition"] == "fresh"
    assert view["replicas"][0]["kv_blocks_free"] == 900


async def test_silence_is_the_time_since_anybody_spoke() -> None:
    controller, clock = make()
    epoch = await epoch_of(controller)
    for speak in (
        lambda: controller.hello(hello("a")),
        lambda: controller.report(delta("a", epoch, 1)),
        lambda: controller.route([query(1)]),
        lambda: controller.release([1]),
        lambda: controller.replica_gone(["a"]),
        lambda: controller.goodbye("a"),
        controller.sync,
        controller.figures,
        controller.detail,
        controller.fingerprint,
    ):
        clock.advance(100)
        assert controller.silent_s == 100
        await speak()
        assert controller.silent_s == 0


def test_the_fingerprint_names_the_configuration() -> None:
    assert fingerprint_of(ControllerConfig()) == fingerprint_of(ControllerConfig())
    assert fingerprint_of(ControllerConfig()) != fingerprint_of(
        ControllerConfig(policy="pab", stale_after_s=3)
    )


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5_000)), max_size=40),
    st.sampled_from(sorted(POLICIES)),
)
async def test_decisions_follow_from_the_mirror_alone(
    requests: list[tuple[int, int]], policy: str
) -> None:
    """The same messages give the same decisions, and no reservation is counted twice."""
    outcomes = []
    for _ in range(2):
        seeded = {"policy_options": {"seed": 5}} if policy == "power_of_two" else {}
        controller, _ = make(policy, **seeded)
        for name in "abc":
            await controller.hello(hello(name, [waiting_row(1_000, 50)]))
        queries = [query(key, tokens) for key, tokens in requests]
        outcomes.append([await controller.route([one]) for one in queries])
        view = await controller.snapshot()
        assert view["reservations"] == len({key for key, _ in requests})
        last = dict(requests)
        assert sum(entry["reserved"] for entry in view["replicas"]) == len(last)
        promised = sum(entry["prefill_tokens"] for entry in view["replicas"])
        assert promised == 150 + sum(max(1, tokens) for tokens in last.values())
    first, second = ([reply.decisions for reply in replies] for replies in outcomes)
    assert first == second


async def test_a_request_without_objectives_is_placed() -> None:
    for admission, tier in (("none", None), ("moore_hodgson", Tier.BEST_EFFORT)):
        controller, _ = make(admission=admission)
        await controller.hello(hello("a"))
        reply = await controller.route([query(1)._replace(slo=SLO())])
        assert reply.decisions[0] == RouteDecision("a", "placed", tier)


FIRST = (1.0 - PRIOR, 0.1 * (1.0 - PRIOR), None)
"""What a promise of a second and a pace of 0.1 s is planned for before anything is known."""


async def test_how_promises_end_moves_the_margin_with_which_the_next_are_planned() -> None:
    controller, _ = make(admission="moore_hodgson", stale_after_s=60)
    await controller.hello(hello("a"))

    async def promise(name: str) -> RouteDecision:
        asked = query(len(name), 100)._replace(request_id=name)
        (made,) = (await controller.route([asked])).decisions
        await controller.release([asked.key])
        assert made.tier is Tier.GUARANTEED
        return made

    def ending(name: str, outcome: str, ttft_s: float) -> RequestEnding:
        return RequestEnding(name, outcome, (), 9, ttft_s, 0.05, 2.0)

    names = ["x" * (number + 1) for number in range(12)]
    assert {(await promise(name)).planned for name in names} == {FIRST}
    push = newer_push("router-1", ())
    # What failed tells nothing; of one whose client left, its first token does.
    endings = [ending(name, "failed", 9.0) for name in names[:4]]
    endings += [ending("unknown" * number, "ok", 9.0) for number in range(1, 20)]
    await controller.push_metrics(push, endings)
    assert (await promise("y")).planned == FIRST
    endings = [ending(name, outcome, 1.04) for name in names[4:] for outcome in ("cancelled", "ok")]
    await controller.push_metrics(newer_push("router-1", ()), endings)
    assert (await promise("z")).planned == (pytest.approx(FIRST[0] / 1.04), FIRST[1], None)


async def test_a_later_stage_that_is_late_teaches_though_the_first_token_was_early() -> None:
    controller, _ = make(admission="moore_hodgson", stale_after_s=60)
    await controller.hello(hello("a"))
    slo = SLO.of_stages((Stage(1.0, 0.2, tokens=20), Stage(0.5, 0.1)))
    names = ["x" * (number + 1) for number in range(12)]
    for name in names:
        asked = query(len(name), 100)._replace(request_id=name, slo=slo)
        (made,) = (await controller.route([asked])).decisions
        assert made.planned == FIRST, "the first TTFT and the tightest pace"
        await controller.release([asked.key])
    endings = [
        RequestEnding(name, "ok", ("ttft",), 40, 0.2, 0.05, 2.0, judged_s=(1.04, 0.05, None))
        for name in names
    ]
    await controller.push_metrics(newer_push("router-1", ()), endings)
    (made,) = (await controller.route([query(99, 100)._replace(slo=slo)])).decisions
    assert made.planned == (pytest.approx(FIRST[0] / 1.04), FIRST[1], None)


async def test_a_promise_that_is_missed_teaches_while_it_goes_on() -> None:
    controller, _ = make(admission="moore_hodgson", stale_after_s=60)
    await controller.hello(hello("a"))
    names = ["x" * (number + 1) for number in range(12)]
    for name in names:
        await controller.route([query(len(name), 1)._replace(request_id=name)])
        await controller.release([len(name)])
    late = [LateNotice(name, None, 0.104) for name in names]
    await controller.push_metrics(newer_push("router-1", ()), [], late)
    (made,) = (await controller.route([query(99, 1)])).decisions
    assert made.planned == (FIRST[0], pytest.approx(0.1 * FIRST[1] / 0.104), None)
