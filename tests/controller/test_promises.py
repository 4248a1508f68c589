"""What the controller tells of promises: by whom they were kept, and when a first token comes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.controller.config import ControllerConfig
from sluice.controller.observability.readings import reliable
from sluice.controller.observability.snapshot import promise_summary
from sluice.controller.state.promises import RECENT, RECENT_S, PromiseLog
from sluice.protocol.messages import RequestEnding
from sluice.scheduling.placement.reliability import CHECKED, FEW, QUANTILES
from sluice.scheduling.request.job import RouteDecision, RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import Clock, hello
from tests.controller.observed import ObservedController
from tests.controller.pushes import newer_push

CHAT = SLO(1.0, service_class="chat")
OK = RequestEnding("", "ok", (), 9, 0.5, 0.05, 2.0)


def promise(log: PromiseLog, number: int, replica: str = "a", **more: Any) -> RouteDecision:
    query = RouteQuery(number, CHAT, 100, request_id=f"{number:032x}")
    decision = RouteDecision(replica, "placed", Tier.GUARANTEED, 0.2)
    return log.made(query._replace(**more), decision)


def end(log: PromiseLog, number: int, now_s: float = 0.0, **more: Any) -> None:
    log.ended(OK._replace(request_id=f"{number:032x}", **more), now_s)


def told(log: PromiseLog, *known: str, now_s: float = 0.0) -> dict[str, Any]:
    found = promise_summary(
        0.99,
        {"ttft": 0.041234, "tpot": 0.0, "e2e": 0.0},
        log.ended_lately(now_s),
        reliable(log.curve()),
        {name: reliable(log.curve(name)) for name in known},
        now_s,
    )
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


def test_promises_are_told_by_class_and_replica() -> None:
    log = PromiseLog()
    for number in range(40):
        replica = "a" if number % 4 else "b"
        slo = SLO(1.0, service_class="code") if number % 2 else CHAT
        promise(log, number, replica, slo=slo)
        end(log, number, kept=number > 0, replica_id=replica)
    found = told(log, "b", "a", "new")
    assert (found["level"], found["margins"]["ttft"]) == (0.99, 0.0412)
    assert (found["promised"], found["kept"]) == (40, 39)
    assert found["classes"] == [
        {"class": "chat", "promised": 20, "kept": 19},
        {"class": "code", "promised": 20, "kept": 20},
    ]
    rows = [(row["replica_id"], row["promised"], row["kept"]) for row in found["replicas"]]
    assert rows == [("a", 30, 30), ("b", 10, 9), ("new", 0, 0)]


def test_what_failed_before_an_answer_began_was_not_kept() -> None:
    log = PromiseLog()
    for number, outcome in enumerate(("failed", "cancelled", "refused", "ok")):
        promise(log, number)
        end(log, number, outcome=outcome, ttft_s=None)
    assert (told(log)["promised"], told(log)["kept"]) == (1, 0)
    end(log, 0, outcome="failed")
    end(log, 77, kept=True)
    assert told(log)["promised"] == 1, "told twice, or never promised by this controller"


def test_the_predicted_ttft_becomes_the_median_of_what_was_observed() -> None:
    log = PromiseLog()
    for number in range(FEW):
        made = promise(log, number, waited_s=0.1)
        assert (made.predicted_ttft_s, made.level) == (0.2, 0.99)
        # Half a second from the arrival, of which a tenth went by before the decision.
        end(log, number, replica_id="a", kept=True)
    assert promise(log, 99).predicted_ttft_s == pytest.approx(0.4)
    assert told(log, "a")["reliability"] == {"count": 0, "observed": []}
    end(log, 99, replica_id="a", kept=True, ttft_s=0.3)
    (row,) = told(log, "a")["replicas"]
    assert row["reliability"] == told(log)["reliability"]
    assert row["reliability"] == {"count": 1, "observed": [1.0] * len(QUANTILES)}


def test_no_request_is_predicted_beyond_its_promise_by_the_errors_of_others() -> None:
    log = PromiseLog()
    for number in range(2 * FEW):
        promise(log, number, slo=SLO(30.0))
        end(log, number, replica_id="a", kept=True, ttft_s=2.3)
    assert promise(log, 997, slo=SLO(30.0)).predicted_ttft_s == pytest.approx(2.3)
    assert promise(log, 998, slo=SLO(0.9)).predicted_ttft_s == 0.2
    # By what is left of it where the request has waited, and by its end where it states no more.
    late = SLO(30.0), SLO(e2e_s=30.0)
    left_s = [promise(log, 999, slo=slo, waited_s=29.0).predicted_ttft_s for slo in late]
    assert max(left_s) <= 1.0


def test_only_the_replica_that_answered_as_promised_teaches() -> None:
    log = PromiseLog()
    for number in range(4 * FEW):
        promise(log, number)
        end(log, number, replica_id=("b", "")[number % 2], ttft_s=9.0)
        promise(log, number)
        end(log, number, replica_id="a", ttft_s=None)
    assert promise(log, 999).predicted_ttft_s == 0.2


def test_a_later_promise_takes_the_place_of_the_first() -> None:
    log = PromiseLog()
    promise(log, 1, "a")
    promise(log, 1, "b")
    end(log, 1, replica_id="b", kept=True)
    assert [row["promised"] for row in told(log, "a", "b")["replicas"]] == [0, 1]


def test_what_is_not_promised_is_left_as_it_is() -> None:
    log = PromiseLog()
    for decision in (
        RouteDecision("a", "placed", Tier.BEST_EFFORT),
        RouteDecision("a", "placed"),
        RouteDecision(None, "unattainable", retry_after_s=1.0),
    ):
        assert log.made(RouteQuery(1, CHAT, 9, request_id=f"{1:032x}"), decision) is decision
    end(log, 1, kept=True)
    assert told(log)["promised"] == 0


def test_only_recent_promises_are_told_of() -> None:
    log = PromiseLog()
    for number in range(RECENT + 10):
        promise(log, number)
        end(log, number, now_s=float(number < 10), kept=True, replica_id="a")
    found = told(log, "a", now_s=60.0)
    assert (found["promised"], found["window_ms"]) == (RECENT, 60_000)
    assert found["reliability"]["count"] == CHECKED
    assert told(log, now_s=RECENT_S + 1.0)["promised"] == 0


async def test_the_snapshot_has_it_for_the_replicas_that_are_known() -> None:
    controller = ObservedController(ControllerConfig(promise_level=0.95), Clock())
    await controller.hello(hello("a"))
    name = f"{1:032x}"
    query = RouteQuery(1, CHAT, 100, request_id=name)
    (made,) = (await controller.route([query])).decisions
    assert made.tier is Tier.GUARANTEED
    ending = OK._replace(request_id=name, replica_id="a", kept=False)
    await controller.push_metrics(newer_push("router", ()), [ending])
    found = (await controller.snapshot())["calibration"]
    assert found["level"] == 0.95 and set(found["margins"]) == {"ttft", "tpot", "e2e"}
    assert found["classes"] == [{"class": "chat", "promised": 1, "kept": 0}]
    assert [row["replica_id"] for row in found["replicas"]] == ["a"]
