"""How requests ended, beside why they went where they went."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.controller.config import ControllerConfig
from sluice.controller.observability import recent_decisions
from sluice.controller.observability.recent_decisions import (
    UNKNOWN_CLASS,
    RecentDecisions,
    RequestClasses,
)
from sluice.protocol.messages import (
    MAX_ENDINGS,
    MAX_WAITS,
    FirstTokenWait,
    LateNotice,
    RequestEnding,
)
from sluice.scheduling.request.lateness import Cause
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import Clock, ObservedController, hello, newer_push, query
from tests.controller.test_decision_log import told


def test_classes_are_remembered_until_the_end() -> None:
    classes = RequestClasses()
    classes.note(1, "chat")
    classes.note(2, "batch")
    assert classes.of([2, 1, 3]) == ["batch", "chat", UNKNOWN_CLASS]
    classes.ended([1, 77])
    assert classes.of([1, 2]) == [UNKNOWN_CLASS, "batch"]


def test_requests_that_never_end_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_decisions, "MAX_CLASSIFIED", 20)
    classes = RequestClasses()
    for key in range(1_000):
        classes.note(key, "chat")
        assert len(classes) <= 20
        assert classes.of([key]) == ["chat"]
    assert classes.of([900]) == [UNKNOWN_CLASS]


BY_CAUSE = ((Cause.ENGINE_STALL, 0.2), (Cause.DECODES, 0.05))
ENDING = RequestEnding("a" * 32, "ok", ("tpot",), 12, 0.3, 0.04, 1.5, late=BY_CAUSE)
LATE = LateNotice("a" * 32, 0.3, None)


async def controller_of() -> ObservedController:
    controller = ObservedController(ControllerConfig(), Clock())
    await controller.hello(hello("r"))
    return controller


async def test_a_decision_is_told_with_what_the_router_saw_of_it() -> None:
    controller = await controller_of()
    asked = query(7)._replace(request_id=ENDING.request_id)
    await controller.route([asked])
    (entry,) = await told(controller)
    assert (entry["ended"], entry["tried_again"]) == (None, False)
    await controller.push_metrics(newer_push("router", ()), [ENDING])
    (entry,) = await told(controller)
    assert entry["ended"] == {
        "outcome": "ok",
        "error": None,
        "attained": False,
        "missed": ["tpot"],
        "tokens": 12,
        "ttft_ms": 300,
        "tpot_ms": 40,
        "e2e_ms": 1_500,
        "cause": "engine_stall",
        "late_ms": {"engine_stall": 200, "decodes": 50},
    }
    for ending, attained in (
        (ENDING._replace(missed=()), True),
        (ENDING._replace(outcome="cancelled", missed=()), None),
    ):
        await controller.push_metrics(newer_push("router", ()), [ending])
        (entry,) = await told(controller)
        assert entry["ended"]["attained"] is attained


async def test_without_an_objective_nothing_is_judged() -> None:
    controller = await controller_of()
    await controller.route([query(7)._replace(request_id=ENDING.request_id, slo=SLO())])
    await controller.push_metrics(newer_push("router", ()), [ENDING._replace(missed=())])
    (entry,) = await told(controller)
    assert entry["ended"]["attained"] is None


async def test_of_several_attempts_the_last_one_has_the_ending() -> None:
    controller = await controller_of()
    for key in (1, 2):
        await controller.route([query(key)._replace(request_id=ENDING.request_id)])
    await controller.route([query(3), query(4)])  # which have no id, and are not the same request
    await controller.push_metrics(newer_push("router", ()), [ENDING])
    unnamed, other, last, first = await told(controller)
    assert first["tried_again"] and first["ended"] is None
    assert last["ended"]["tokens"] == 12 and not last["tried_again"]
    for entry in (unnamed, other):
        assert (entry["ended"], entry["tried_again"]) == (None, False)


@pytest.mark.parametrize(
    "message",
    [
        ([ENDING] * (MAX_ENDINGS + 1),),
        ((), [LATE] * (MAX_ENDINGS + 1)),
        ((), (), [FirstTokenWait(1, "a", 1.0, 0.5)] * (MAX_WAITS + 1)),
        ([ENDING], [LATE._replace(ttft_s=inf)]),
    ],
)
async def test_a_sync_is_bounded_and_refused_whole(message: Any) -> None:
    controller = await controller_of()
    await controller.route([query(7)._replace(request_id=ENDING.request_id)])
    with pytest.raises(ValueError):
        await controller.sync(*message)
    (entry,) = await told(controller)
    assert entry["ended"] is None
    assert (await controller.figures()).counts.reports["refused"] == 1


@given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=20))
def test_the_latest_endings_are_kept_each_once(pushes: list[list[int]]) -> None:
    recent, latest = RecentDecisions(), list[str]()
    for push in pushes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recent_decisions, "MAX_ENDED", 10)
            recent.ended([ENDING._replace(request_id=str(name)) for name in push])
        for name in map(str, push):
            latest = [each for each in latest if each != name] + [name]
    assert [*recent._endings] == latest[-10:]
