"""Why each request went where it went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.controller.config import ControllerConfig
from sluice.controller.observability.decision_log import OTHERS
from sluice.controller.observability.recent_decisions import DECISIONS
from sluice.protocol.messages import RequestEnding
from sluice.scheduling.placement.calibration import PRIOR
from sluice.scheduling.request.job import RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import POLICIES
from sluice.scheduling.routing.slos_serve import SLOsServeRoutingOptions
from tests.controller.fleet import Clock, ObservedController, hello, newer_push, query, waiting_row

PROMISED, BEST_EFFORT = frozenset({Tier.GUARANTEED}), frozenset({Tier.BEST_EFFORT})


async def fleet_of(
    *loads: int, policy: str = "most_gain", admission: str = "moore_hodgson"
) -> tuple[ObservedController, Clock]:
    """Replicas a, b, ... with so many prompt tokens waiting."""
    clock = Clock()
    controller = ObservedController(ControllerConfig(policy=policy, admission=admission), clock)
    for index, tokens in enumerate(loads):
        rows = [waiting_row(1_000 + index, tokens)] if tokens else []
        await controller.hello(hello(chr(ord("a") + index), rows))
    return controller, clock


async def told(controller: ObservedController, limit: int = DECISIONS) -> list[dict[str, Any]]:
    """The log, as it goes over the wire."""
    found: list[dict[str, Any]] = json.loads(
        json.dumps(await controller.decisions(limit), allow_nan=False)
    )
    return found


async def test_a_promised_request_is_explained_with_the_others() -> None:
    controller, clock = await fleet_of(0, 2_000, 100_000)
    await controller.route([query(7, 100)._replace(request_id="f" * 32, waited_s=0.25)])
    clock.advance(2)
    (entry,) = await told(controller)
    assert (entry["request_id"], entry["key"]) == ("f" * 32, f"{7:016x}")
    assert (entry["age_ms"], entry["waited_ms"]) == (2_000, 250)
    assert (entry["outcome"], entry["tier"]) == ("placed", "guaranteed")
    assert (entry["replica_id"], entry["class"], entry["prompt_tokens"]) == ("a", "standard", 100)
    assert entry["objective"] == {"ttft_ms": 1000, "tpot_ms": 100, "e2e_ms": None, "priority": 1}
    assert (entry["known"], entry["candidates"], entry["able"]) == (3, 3, 2)
    assert "2 of 3" in entry["why"] and "most_gain" in entry["why"]
    assert entry["chosen"]["can_promise"] and entry["chosen"]["prefill_ms"] == pytest.approx(10.1)
    assert entry["chosen"]["predicted_ttft_ms"] == entry["predicted_ttft_ms"] > 0
    near, far = entry["others"]
    assert (near["replica_id"], far["replica_id"]) == ("b", "c")
    assert near["can_promise"] and near["why_not"] == POLICIES["most_gain"].passed_over
    assert near["predicted_ttft_ms"] > entry["predicted_ttft_ms"]
    assert not far["can_promise"] and "cannot meet" in far["why_not"]
    assert far["could_promise_in_ms"] > 0 and entry["others_left_out"] == 0


async def test_best_effort_says_why_nothing_was_promised() -> None:
    controller, clock = await fleet_of(50_000, 0)
    hopeless = RouteQuery(1, SLO(ttft_s=1e-6), 100)
    await controller.route(
        [
            hopeless,
            RouteQuery(2, SLO(), 100),
            query(3)._replace(tiers=BEST_EFFORT),
            hopeless._replace(key=4, tiers=PROMISED),
        ]
    )
    refused, wanted, nothing, late = await told(controller)
    for entry in (wanted, nothing, late):
        assert (entry["tier"], entry["replica_id"]) == ("best-effort", "b")
        (other,) = entry["others"]
        assert other["ahead_ms"] > entry["chosen"]["ahead_ms"] and "backlog" in other["why_not"]
    assert late["why"].startswith("No replica can meet the SLO (TTFT)")
    assert (late["able"], late["not_guaranteed"], late["constraints"]) == (0, "ttft", {"ttft": 2})
    assert late["chosen"]["can_promise"] is False
    assert late["others"][0]["could_promise_in_ms"] is None
    assert nothing["why"].startswith("It states no SLO") and nothing["able"] is None
    assert wanted["why"].startswith("It asks for best effort")
    assert (wanted["not_guaranteed"], wanted["constraints"]) == ("best_effort_asked", {})
    assert nothing["not_guaranteed"] == "no_objective"
    assert (refused["not_guaranteed"], refused["constraints"]) == ("ttft", {"ttft": 2})
    assert (refused["outcome"], refused["replica_id"], refused["chosen"]) == (
        "unattainable",
        None,
        None,
    )
    clock.advance(1.5)
    await controller.route([query(5)])
    (aged, *_) = await told(controller)
    assert "has reported lately" in aged["why"] and aged["able"] == 1
    assert aged["not_guaranteed"] == "silent"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    (log,) = folder.iterdir()
    return list(map(json.loads, log.read_text().splitlines()))


async def test_the_log_on_disk_names_the_terms_that_alone_refused_a_request(tmp_path: Path) -> None:
    controller = ObservedController(ControllerConfig(decision_log=tmp_path), Clock())
    await controller.hello(hello("a"))
    # The prompt takes 0.81 s there; 0.1 is head-room, and the margin that of no experience.
    for key, ttft_s in enumerate((0.78, 0.84, 0.88, 0.92, 0.94), 1):
        await controller.route([RouteQuery(key, SLO(ttft_s=ttft_s), 8_000, tiers=PROMISED)])
    await controller.sync(
        [RequestEnding("r", "ok", tokens=3, ttft_s=0.5, tpot_s=0.1, e2e_s=0.7, missed=("ttft",))]
    )
    *shown, ended = lines_of(tmp_path)
    alone = [
        each["waits_ms"] and {name for name, wait_ms in each["waits_ms"].items() if wait_ms == 0}
        for each in shown
    ]
    assert alone == [set(), {"all"}, {"headroom", "all"}, {"headroom", "margin", "all"}, None]
    assert [each["tier"] for each in shown] == [None] * 4 + ["guaranteed"]
    assert shown[0]["waits_ms"]["as_is"] is None  # never
    assert (await told(controller))[1]["waits_ms"] == shown[-2]["waits_ms"]
    assert (ended["request_id"], ended["ended"]["missed"]) == ("r", ["ttft"])
    assert ended["ended"]["attained"] is False


async def test_without_a_log_no_terms_are_looked_for() -> None:
    controller, _ = await fleet_of(0)
    await controller.route([RouteQuery(1, SLO(ttft_s=0.01), 8_000, tiers=PROMISED)])
    (entry,) = await told(controller)
    assert (entry["not_guaranteed"], entry["waits_ms"]) == ("ttft", None)


async def test_what_is_planned_otherwise_than_stated_is_told_like_the_rest() -> None:
    controller, _ = await fleet_of(8_000, 0)
    for e2e_s, able in ((60.0, 2), (1e-6, 0)):
        await controller.route([RouteQuery(1, SLO(e2e_s=e2e_s), 100)])
        (entry,) = await told(controller)
        assert (entry["able"], entry["candidates"]) == (able, 2)
        assert entry["objective"]["e2e_ms"] == pytest.approx(e2e_s * 1_000)


async def test_each_constraint_is_told_with_the_replicas_at_which_it_binds() -> None:
    controller, _ = await fleet_of(8_000, 9_000)
    report = hello("full", [waiting_row(1_050, 10)])
    report.summary["free_kv_blocks"] = 0
    await controller.hello(report)
    await controller.route([RouteQuery(1, SLO(ttft_s=1.0 / (1.0 - PRIOR), tpot_s=0.1), 4_000)])
    (entry,) = await told(controller)
    assert entry["constraints"] == {"ttft": 2, "kv_memory": 1}
    assert "(TTFT at 2, KV memory at 1)" in entry["why"]
    assert entry["not_guaranteed"] in entry["constraints"]


async def test_without_a_replica_or_without_admission() -> None:
    controller, _ = await fleet_of()
    await controller.route([query(1)])
    (nowhere,) = await told(controller)
    assert (nowhere["outcome"], nowhere["candidates"], nowhere["others"]) == ("no_replica", 0, [])
    controller, _ = await fleet_of(0, 0, policy="round_robin", admission="none")
    await controller.route([query(1)])
    (placed,) = await told(controller)
    assert "admission is off" in placed["why"] and placed["chosen"]["predicted_ttft_ms"] is None
    assert placed["others"][0]["why_not"] == POLICIES["round_robin"].passed_over


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_is_told_in_words_of_its_own(policy: str) -> None:
    controller, _ = await fleet_of(*[0] * 6, policy=policy)
    tested = SLOsServeRoutingOptions().hops if policy == "slos_serve" else 6
    await controller.route([query(key) for key in range(1, 9)])
    entries = await told(controller)
    assert len(entries) == 8
    for entry in entries:
        names = [entry["chosen"]["replica_id"], *(each["replica_id"] for each in entry["others"])]
        assert len(set(names)) == 1 + OTHERS and entry["others_left_out"] == tested - 1 - OTHERS
        assert entry["others"][0]["why_not"] == POLICIES[policy].passed_over
    assert len({each.passed_over for each in POLICIES.values()}) > len(POLICIES) / 2


async def test_a_request_that_asks_again_is_one_entry() -> None:
    controller, _ = await fleet_of(0)
    await controller.route([query(1), query(2), query(1)])
    assert [(each["key"][-1], each["asked"]) for each in await told(controller)] == [
        ("1", 2),
        ("2", 1),
    ]


async def test_the_log_is_bounded_and_leaves_out_what_is_malformed() -> None:
    controller, _ = await fleet_of(0)
    await controller.route([query(key) for key in range(DECISIONS + 10)])
    await controller.route([query(-1)])
    entries = await told(controller)
    assert len(entries) == DECISIONS
    assert entries[0]["key"] == f"{DECISIONS + 9:016x}"
    assert [each["key"] for each in await told(controller, 2)] == [
        each["key"] for each in entries[:2]
    ]
    for wrong in (0, DECISIONS + 1, "3", None):
        with pytest.raises(ValueError, match="limit"):
            await controller.decisions(wrong)  # type: ignore[arg-type]


async def test_what_replicas_were_called_then_is_told_after_they_left() -> None:
    controller, _ = await fleet_of(0, 0)
    await controller.route([query(1)])
    before = await told(controller)
    for name in ("a", "b"):
        await controller.goodbye(name)
    await controller.hello(hello("new"))
    after = await told(controller)
    assert [each | {"age_ms": 0} for each in after] == [each | {"age_ms": 0} for each in before]


async def test_a_promise_that_is_planned_earlier_is_explained_like_any_other() -> None:
    controller, _ = await fleet_of(0, 2_000)
    late = [f"{number:032x}" for number in range(1, 9)]
    for number, name in enumerate(late, 1):
        await controller.route([query(number, 100)._replace(request_id=name)])
        await controller.release([number])
    endings = [RequestEnding(name, "ok", ("ttft",), 9, 1.25, 0.05, 2.0) for name in late]
    await controller.push_metrics(newer_push("router", ()), endings)
    (made,) = (await controller.route([query(99, 100)])).decisions
    assert made.planned is not None and made.planned[0] is not None and made.planned[0] < 1.0
    entry = (await told(controller))[0]
    assert "2 of 2 replicas can meet" in entry["why"] and entry["chosen"] is not None
