"""Two API keys before one replica that cannot serve them both, with the whole controller."""

from __future__ import annotations

from collections import Counter
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import SecretStr

from sluice.controller import actor
from sluice.controller.actor import Controller, Quotas
from sluice.controller.config import ControllerConfig
from sluice.protocol.messages import MAX_USES, QuotaUse
from sluice.router.tenancy.auth import ApiKey, client_of
from sluice.router.tenancy.limits import ANYONE, Client, TenantLimits
from sluice.scheduling.request.job import MAX_NUMBER, RouteQuery, Tier
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import Clock, ObservedController, delta, free_row, hello, waiting_row


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


STEP_S = 0.01
PROMPT = 480
"""Its prefill takes 48 ms, and the replica ends one every 50 ms."""

PROMISED = frozenset({Tier.GUARANTEED})


class Run(NamedTuple):
    """What each client asked, was promised and was told that it has its share of."""

    asked: Counter[str]
    promised: Counter[str]
    over_share: Counter[str]
    why: set[str]


async def run(rates: dict[Client, int], seconds: float, apart: bool = True) -> Run:
    """Clients ask at random, so many times a second; ``apart``: they are told apart."""
    clock = Clock()
    controller = ObservedController(ControllerConfig(), clock)
    epoch = (await controller.hello(hello("a", now_s=clock.now_s))).epoch
    rng, found = np.random.default_rng(3), Run(Counter(), Counter(), Counter(), set())
    arriving: list[int] = []
    queue: list[tuple[int, int]] = []
    free, key, seq = list(range(64)), 0, 0
    for step in range(round(seconds / STEP_S)):
        clock.advance(STEP_S)
        for client, rate in rates.items():
            for _ in range(rng.poisson(rate * STEP_S)):
                key += 1
                query = RouteQuery(
                    key,
                    SLO(ttft_s=1.0),
                    PROMPT,
                    tiers=PROMISED,
                    output_tokens=1,
                    tenant=client.tenant if apart else 0,
                    weight=client.caps.weight,
                )
                (decision,) = (await controller.route([query])).decisions
                found.asked[client.name] += 1
                if decision.tier is Tier.GUARANTEED:
                    found.promised[client.name] += 1
                    arriving.append(key)
                elif decision.over_share:
                    found.over_share[client.name] += 1
                    found.why.add((await controller.decisions(1))[0]["why"])
        if step % 5:
            continue
        changed, finished = {}, ()
        if queue:
            ended, slot = queue.pop(0)
            changed[slot], finished = free_row(), (ended,)
            free.append(slot)
        for own in arriving:
            slot = free.pop(0)
            queue.append((own, slot))
            changed[slot] = waiting_row(own, PROMPT, clock.now_s)
        arriving.clear()
        seq += 1
        report = delta("a", epoch, seq, changed, now_s=clock.now_s, finished=finished)
        assert not (await controller.report(report)).resync
    return found


def client(name: str, weight: float = 1.0) -> Client:
    return client_of(
        ApiKey(key=SecretStr(f"secret-of-{name}"), name=name, limits=TenantLimits(weight=weight))
    )


async def test_who_asks_for_less_than_its_share_gets_it_and_nothing_is_lost_by_that() -> None:
    greedy, modest = client("greedy"), client("modest")
    fair = await run({greedy: 60, modest: 6}, 12.0)
    alone = await run({greedy: 60, modest: 6}, 12.0, apart=False)
    assert alone.promised["modest"] < 0.7 * alone.asked["modest"]
    # The first ones to be refused teach how much room must be left.
    assert fair.promised["modest"] >= 0.85 * fair.asked["modest"]
    assert fair.promised.total() >= 0.97 * alone.promised.total()
    assert set(fair.over_share) == {"greedy"} and not alone.over_share
    assert fair.why == {
        "Its client has used its share of guaranteed capacity, and others request theirs; "
        "its class does not allow best effort."
    }


async def test_two_greedy_keys_share_by_weight() -> None:
    found = await run({client("light"): 30, client("heavy", 3.0): 30}, 15.0)
    share = found.promised["heavy"] / found.promised.total()
    assert share == pytest.approx(0.75, abs=0.05)


def test_keys_are_tenants_by_their_names_and_everybody_without_keys_is_one() -> None:
    assert ANYONE.tenant == 0 == Client().tenant
    assert client("a").tenant != client("b").tenant
    assert 0 < client("a").tenant < 2**63
    assert client("a").tenant == client("a", 2.0).tenant
