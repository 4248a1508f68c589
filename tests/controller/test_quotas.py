"""The buckets of the fleet."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from sluice.controller import actor
from sluice.controller.actor import Controller, Quotas
from sluice.controller.config import ControllerConfig
from sluice.protocol.messages import MAX_USES, QuotaUse
from sluice.scheduling.request.job import MAX_NUMBER


def use(account: str = "a", used: float = 1, level: float = 1, per_s: float = 1) -> QuotaUse:
    return QuotaUse(account, used, level, per_s)


def test_what_routers_use_adds_up_and_drains() -> None:
    fleet = Quotas()
    assert fleet.share([use(used=3, level=3)], 0) == [3]
    assert fleet.share([use(used=2, level=2)], 0) == [5]
    assert fleet.share([use(used=0, level=0)], 2) == [3]
    # What was set aside and not needed is given back; nothing is owed to anybody for it.
    assert fleet.share([use(used=-9, level=0), use("b", 1, 1)], 2) == [0, 1]
    assert fleet.share([use(used=1, level=1)], 2) == [1]


def test_after_a_restart_the_first_router_says_how_full_a_bucket_is() -> None:
    fleet = Quotas()
    assert fleet.share([use(used=1, level=40)], 0) == [40]
    assert fleet.share([use(used=1, level=40)], 0) == [41]


def test_a_changed_rate_counts_from_then_on() -> None:
    fleet = Quotas()
    fleet.share([use(used=10, level=10, per_s=1)], 0)
    assert fleet.share([use(used=0, level=0, per_s=5)], 2) == [8]
    assert fleet.share([use(used=0, level=0, per_s=5)], 3) == [3]


def test_empty_buckets_make_room_and_full_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "MAX_ACCOUNTS", 3)
    fleet = Quotas()
    fleet.share([use("long", level=100), use("b"), use("c")], 0)
    with pytest.raises(ValueError, match="more than 3 accounts"):
        fleet.share([use("d")], 0.5)
    assert fleet.share([use("d"), use("long", 0)], 2) == [1, 98]


@pytest.mark.parametrize(
    "uses",
    [
        [use()] * (MAX_USES + 1),
        [("a", 1, 1)],
        [use(account="")],
        [use(account="a" * 300)],
        [use(account=5)],  # type: ignore[arg-type]
        [use(used=nan)],
        [use(used=2 * MAX_NUMBER)],
        [use(level=-1)],
        [use(level=inf)],
        [use(per_s=0)],
        [use(per_s="1")],  # type: ignore[arg-type]
    ],
)
async def test_a_malformed_message_changes_nothing(uses: Any) -> None:
    controller = Controller(ControllerConfig())
    with pytest.raises(ValueError, match=r"uses.*: expected"):
        await controller.share_quotas(uses)
    assert await controller.share_quotas([use(used=1, level=1)]) == [pytest.approx(1)]
