"""The controller learns how long outputs are, and promises end-to-end times by it."""

from __future__ import annotations

import pytest

from sluice.controller.config import ControllerConfig
from sluice.protocol.messages import RequestEnding
from sluice.scheduling.placement.calibration import PRIOR
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import Clock, hello, query
from tests.controller.observed import ObservedController
from tests.controller.pushes import newer_push


class Site:
    """A controller of one idle replica whose steps take 4 ms, and its router."""

    def __init__(self, config: ControllerConfig | None = None) -> None:
        config = config or ControllerConfig(stale_after_s=60)
        self.controller = ObservedController(config, Clock())
        self.keys = 0

    async def ask(
        self, e2e_s: float, name: str = "chat", tenant: int = 0, most: int = 0
    ) -> RouteDecision:
        self.keys += 1
        slo = SLO(e2e_s=e2e_s, service_class=name)
        asked = query(self.keys)._replace(slo=slo, tenant=tenant, output_tokens=most)
        (made,) = (await self.controller.route([asked])).decisions
        await self.controller.release([asked.key])
        return made

    async def end(
        self, *tokens: int, name: str = "chat", outcome: str = "ok", tenant: int = 0, most: int = 0
    ) -> None:
        endings = [
            RequestEnding(f"{self.keys}-{n}", outcome, (), each, 0.1, 0.01, 1.0, "", name, tenant,
                          most)
            for n, each in enumerate(tokens)
        ]  # fmt: skip
        await self.controller.push_metrics(newer_push("router-1", ()), endings)


async def site_of(config: ControllerConfig | None = None) -> Site:
    site = Site(config)
    await site.controller.hello(hello("a"))
    return site


async def test_an_end_to_end_time_without_max_tokens_is_promised_on_an_idle_replica() -> None:
    site = await site_of()
    made = await site.ask(5.0)
    assert made.tier is Tier.GUARANTEED
    assert made.planned is not None
    ttft_s, tpot_s, e2e_s = made.planned
    assert ttft_s is not None and tpot_s is not None and e2e_s is None
    # 512 tokens of some 4 ms.
    assert ttft_s + 511 * tpot_s == pytest.approx((1.0 - PRIOR) * 5.0)
    assert (await site.ask(0.002)).tier is Tier.BEST_EFFORT


async def test_lengths_of_outputs_that_ended_move_the_decision() -> None:
    site = await site_of()
    assert (await site.ask(1.0)).tier is Tier.BEST_EFFORT
    await site.end(*[50] * 100)
    assert (await site.ask(1.0)).tier is Tier.GUARANTEED
    assert (await site.ask(1.0, name="code")).tier is Tier.BEST_EFFORT
    # One tenant's outputs are longer.
    await site.end(*[600] * 30, tenant=7)
    assert (await site.ask(1.0, tenant=7)).tier is Tier.BEST_EFFORT
    await site.end(*[50] * 250)
    await site.end(*[50] * 50)
    assert (await site.ask(1.0, tenant=8)).tier is Tier.GUARANTEED
    assert (await site.ask(1.0, tenant=7)).tier is Tier.BEST_EFFORT
    assert (await site.ask(1.0, tenant=7, most=60)).tier is Tier.GUARANTEED


@pytest.mark.parametrize(
    ("outcome", "most"), [("ok", 16), ("cancelled", 0), ("failed", 0), ("client_error", 0)]
)
async def test_what_was_cut_off_does_not_teach_that_outputs_are_short(
    outcome: str, most: int
) -> None:
    site = await site_of()
    await site.end(*[16] * 200, outcome=outcome, most=most)
    assert (await site.ask(1.0)).tier is Tier.BEST_EFFORT
    await site.end(*[15] * 200, most=most)
    assert (await site.ask(1.0)).tier is Tier.GUARANTEED


async def test_what_a_router_leaves_out_teaches_nothing() -> None:
    site = await site_of()
    await site.end(*[16] * 200, name="")
    assert (await site.ask(1.0, name="")).tier is None  # no query: a class has a name


async def test_a_stated_range_is_what_counts() -> None:
    stated = ControllerConfig(output_tokens={"chat": (10, 60)}, stale_after_s=60)
    site = await site_of(stated)
    assert (await site.ask(1.0)).tier is Tier.GUARANTEED
    await site.end(*[600] * 200)
    assert (await site.ask(1.0)).tier is Tier.GUARANTEED


@pytest.mark.parametrize("wrong", [(0, 5), (6, 5), (5,), (1, 2, 3), ("a", 2)])
def test_a_range_that_is_none_is_refused(wrong: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"output_tokens\.chat"):
        ControllerConfig.model_validate({"output_tokens": {"chat": wrong}})
