"""Replicas with roles: pairs over the wire, their reservations, what is told of them, and loads."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from sluice.controller.config import ControllerConfig
from sluice.protocol.messages import (
    MetricSample,
    MetricsPush,
    ReportReply,
    Routed,
    RouteReply,
    decode_answer,
    decode_query,
    encode,
)
from sluice.scheduling.request.job import RouteDecision, RouteQuery
from sluice.scheduling.request.objective import SLO, TPOTAnchor
from sluice.scheduling.request.stages import Stage
from sluice.scheduling.roles import Role
from tests.controller.fleet import (
    PROFILE,
    Clock,
    ObservedController,
    decode_row,
    delta,
    hello,
    newer_push,
    query,
    summary,
    waiting_row,
)


def make() -> tuple[ObservedController, Clock]:
    clock = Clock()
    return ObservedController(ControllerConfig(), clock), clock


def counted(source: str, stated: float, attained: float) -> MetricsPush:
    """What a router pushes of objectives."""
    labels = (("class", "standard"), ("priority", "2"))
    return newer_push(
        source,
        tuple(
            MetricSample(name, "counter", "words", f"{name}_total", labels, value)
            for name, value in (("sluice_slo_requests", stated), ("sluice_attained", attained))
        ),
    )


async def test_replicas_that_come_go_and_drain_are_counted_as_they_do() -> None:
    controller, clock = make()
    assert (await controller.load()).ready == 0
    epoch = (await controller.hello(hello("a"))).epoch
    await controller.hello(hello("b"))
    assert (await controller.load()).ready == 2
    await controller.report(delta("b", epoch, 1, draining=True))
    assert (await controller.load()).ready == 1
    await controller.goodbye("b")
    assert (await controller.load()).ready == 1
    await controller.hello(hello("c"))
    assert (await controller.load()).ready == 2
    clock.advance(100.0)
    assert (await controller.load()).ready == 0


async def test_demand_is_what_was_asked_for_and_what_decodes_take() -> None:
    controller, _ = make()
    await controller.hello(hello("a", [decode_row(key, 100) for key in range(4)]))
    await controller.route([query(key, 1_000) for key in range(10, 60)])
    load = await controller.load()
    work_s = PROFILE.model.work_s(1_000, 0)
    assert load.asked == 50
    assert abs(load.asked_s - 50 * work_s) < 1e-6
    assert 0 < load.unpromised < 50
    assert 0 < load.decode_share < 1
    assert load.head_room < 0.2
    assert load.ongoing == 54
    text = (await controller.render_metrics()).decode()
    assert 'sluice_asked_requests_total{role="mixed"} 50.0' in text
    assert f'sluice_unpromised_requests_total{{role="mixed"}} {load.unpromised}' in text


async def test_objectives_count_from_the_controllers_beginning() -> None:
    """A controller that was restarted hears of all that its routers had counted before: that is
    no loss of now."""
    controller, _ = make()
    await controller.push_metrics(counted("router-1", 1_000.0, 400.0))
    load = await controller.load()
    assert (load.judged, load.attained) == (0, 0)
    await controller.push_metrics(counted("router-1", 1_010.0, 409.0))
    await controller.push_metrics(counted("router-2", 5.0, 5.0))
    load = await controller.load()
    assert (load.judged, load.attained) == (10, 9)


async def controller_of(*roles: Any) -> tuple[ObservedController, int]:
    """A controller and its epoch; replicas go by their roles."""
    controller = ObservedController(ControllerConfig(), Clock())
    epoch = 0
    for role in roles:
        epoch = (await controller.hello(hello(role, role=role))).epoch
    return controller, epoch


def split(key: int, prompt_tokens: int = 100) -> RouteQuery:
    return query(key, prompt_tokens)._replace(prefill_key=key + 10_000)


async def placed(controller: ObservedController, asked: RouteQuery) -> RouteDecision:
    (decision,) = (await controller.route([asked])).decisions
    return decision


async def reserved(controller: ObservedController) -> dict[str, int]:
    replicas = (await controller.snapshot())["replicas"]
    return {entry["role"]: entry["reserved"] for entry in replicas}


async def test_each_side_of_a_pair_counts_until_its_own_replica_has_it() -> None:
    controller, epoch = await controller_of("prefill", "decode")
    made = await placed(controller, split(1))
    assert (made.prefill_id, made.replica_id, made.role) == ("prefill", "decode", "decode")
    assert made.predicted_ttft_s is not None
    assert made.predicted_ttft_s > made.kv_transfer_s > 0
    assert await reserved(controller) == {"prefill": 1, "decode": 1}
    await controller.report(delta("prefill", epoch, 1, {0: waiting_row(10_001, 100)}))
    assert await reserved(controller) == {"prefill": 0, "decode": 1}
    await controller.report(delta("prefill", epoch, 2, finished=(10_001,)))
    assert await reserved(controller) == {"prefill": 0, "decode": 1}
    await controller.report(delta("decode", epoch, 1, {0: decode_row(1, 100)}))
    assert await reserved(controller) == {"prefill": 0, "decode": 0}
    # A router that gives up ends both.
    await placed(controller, split(2))
    await controller.release([2, 10_002])
    assert await reserved(controller) == {"prefill": 0, "decode": 0}


async def test_a_drained_or_lost_replica_is_in_no_pair() -> None:
    controller, epoch = await controller_of("mixed", "prefill", "decode")
    await controller.report(delta("mixed", epoch, 1, {0: waiting_row(5, 9_000)}))
    assert (await placed(controller, split(1))).prefill_id == "prefill"
    await controller.drain("prefill", True)
    made = await placed(controller, split(2))
    assert (made.replica_id, made.role, made.prefill_id) == ("mixed", "mixed", None)
    await controller.drain("prefill", False)
    assert (await placed(controller, split(3))).prefill_id == "prefill"
    await controller.replica_gone(["decode"])
    assert (await placed(controller, split(4))).prefill_id is None
    assert (await reserved(controller))["decode"] == 0


async def test_the_log_tells_both_sides_and_why() -> None:
    controller, _ = await controller_of("prefill", "decode")
    await controller.hello(hello("full", role="decode")._replace(summary=summary(2)))
    await placed(controller, split(1))
    await placed(controller, query(2))
    whole, pair = json.loads(json.dumps(await controller.decisions(2), allow_nan=False))
    assert (pair["replica_id"], pair["prefill_id"], pair["role"]) == ("decode", "prefill", "decode")
    assert pair["kv_transfer_ms"] == pair["second"]["kv_transfer_ms"] > 0
    assert (pair["chosen"]["replica_id"], pair["chosen"]["prompt_only"]) == ("prefill", True)
    assert (pair["second"]["candidates"], pair["second"]["able"]) == (2, 1)
    assert pair["second"]["chosen"]["replica_id"] == "decode"
    (other,) = pair["second"]["others"]
    assert (other["replica_id"], other["can_promise"]) == ("full", False)
    assert "cannot meet" in other["why_not"]
    assert "one of 2 others decodes, of which 1 can meet" in pair["why"]
    assert (whole["prefill_id"], whole["kv_transfer_ms"], whole["second"]) == (None, None, None)
    assert whole["chosen"]["prompt_only"] is False


async def test_each_role_has_a_load_of_its_own() -> None:
    controller, _ = await controller_of("prefill", "decode")
    await placed(controller, split(1, 1_000))
    prefill, decode, both = [await controller.load(role) for role in ("prefill", "decode", None)]
    assert (prefill.ready, decode.ready, both.ready) == (1, 1, 2)
    assert prefill.asked == decode.asked == both.asked == 1
    assert prefill.asked_s == both.asked_s > decode.asked_s > 0
    text = (await controller.render_metrics()).decode()
    assert 'sluice_asked_requests_total{role="decode"} 1.0' in text
    assert 'sluice_replicas{role="prefill",state="fresh"} 1.0' in text
    assert 'sluice_head_room_ratio{role="mixed"}' not in text
    assert "sluice_split_decisions_total 1.0" in text
    with pytest.raises(ValueError, match="role must be any of mixed, prefill, decode, got 'both'"):
        await controller.load("both")  # type: ignore[arg-type]


async def test_learnt_transfers_are_in_the_next_promise() -> None:
    controller, epoch = await controller_of("prefill", "decode")
    before = (await placed(controller, split(1))).kv_transfer_s
    told = np_summary(transfers=100, transfer_seconds=20.0, transfer_tokens=10_000)
    await controller.report(delta("decode", epoch, 1)._replace(summary=told))
    assert (await placed(controller, split(2))).kv_transfer_s == pytest.approx(
        before + 0.19, abs=0.02
    )
    bad = np_summary(transfers=-1)
    with pytest.raises(ValueError, match="transfers must be finite and at least 0"):
        await controller.report(delta("decode", epoch, 2)._replace(summary=bad))


def np_summary(**fields: float) -> Any:
    """An engine's counters, with these."""
    record = summary()
    for name, value in fields.items():
        record[name] = value
    return record


def test_pairs_travel_over_the_connection() -> None:
    slo = SLO(tpot_s=0.1, tpot_anchor=TPOTAnchor.WINDOW)
    staged = SLO.of_stages((Stage(0.5, 0.1, tokens=20), Stage(0.2, None, 9.0, prompt_tokens=7)))
    for asked in (split(1), split(1)._replace(slo=slo), split(1)._replace(slo=staged)):
        assert decode_query(encode(asked)) == asked
    made = RouteDecision("d", "placed", None, 0.2, None, "decode", "p", 0.05)
    answer = Routed(1, RouteReply(2, (made,)))
    assert decode_answer(encode(answer)) == answer


class Elastic:
    """Replicas that follow the roles in the answers to their reports, all of them busy.

    A step has 4 ms beside its tokens, and each decode should get one in 6 ms: so prefills are
    cheaper apart.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.controller = ObservedController(ControllerConfig(), self.clock)
        self.roles: dict[str, Role] = dict.fromkeys("abcd", "mixed")
        self.epoch = self.seq = self.key = 0

    async def register(self) -> None:
        """Each says hello, with the role that it had last and a few decodes."""
        row = decode_row(0, 100)
        row["tpot_s"] = 0.006
        rows = [row] * 4
        self.seq = 0
        for name, role in self.roles.items():
            said = hello(name, rows, role=role, elastic=True, now_s=self.clock.now_s)
            await self._answer(name, await self.controller.hello(said))

    async def pass_s(self, seconds: float, prompts: int = 8) -> None:
        """Every half second each reports, and ``prompts`` come whose prefills take 0.1 s each.
        Their clients leave at once, so all that come can be guaranteed."""
        for _ in range(int(seconds / 0.5)):
            self.clock.advance(0.5)
            self.seq += 1
            for name in self.roles:
                report = delta(name, self.epoch, self.seq, now_s=self.clock.now_s)
                await self._answer(name, await self.controller.report(report))
            for _ in range(prompts):
                self.key += 1
                await placed(self.controller, query(self.key, 1_000))
                await self.controller.release([self.key])

    async def _answer(self, name: str, reply: ReportReply) -> None:
        assert reply.role is not None and not reply.resync
        self.epoch, self.roles[name] = reply.epoch, reply.role

    async def known(self) -> dict[str, tuple[str, int]]:
        """The role of each as the page shows it, and its live requests."""
        found = (await self.controller.snapshot())["replicas"]
        return {each["replica_id"]: (each["role"], each["running"]) for each in found}


async def test_roles_follow_the_load_and_requests_stay_where_they_are() -> None:
    fleet = Elastic()
    await fleet.register()
    assert set(fleet.roles.values()) == {"mixed"}
    await fleet.pass_s(90)
    counts = Counter(fleet.roles.values())
    assert counts.keys() == {"prefill", "decode"}
    assert await fleet.known() == {name: (role, 4) for name, role in fleet.roles.items()}
    pair = await placed(fleet.controller, split(10_000))
    assert pair.replica_id is not None and pair.prefill_id is not None
    assert (fleet.roles[pair.prefill_id], fleet.roles[pair.replica_id]) == ("prefill", "decode")
    text = (await fleet.controller.render_metrics()).decode()
    for role in ("prefill", "decode"):
        assert f'sluice_role_changes_total{{role="{role}"}} {counts[role]}.0' in text
        assert f'sluice_replicas{{role="{role}",state="fresh"}} {counts[role]}.0' in text


async def test_a_restarted_controller_takes_over_the_roles() -> None:
    fleet = Elastic()
    await fleet.register()
    await fleet.pass_s(90)
    roles = dict(fleet.roles)
    assert set(roles.values()) == {"prefill", "decode"}
    # A replica that has not heard of its role yet follows the controller's setting.
    late = next(iter(roles))
    reply = await fleet.controller.hello(hello(late, role="mixed", elastic=True))
    assert reply.role == roles[late]
    assert (await fleet.known())[late][0] == roles[late]
    restarted = Elastic()
    restarted.roles = roles
    await restarted.register()
    await restarted.pass_s(5)
    assert restarted.roles == roles


async def test_a_replica_of_a_pool_keeps_its_role() -> None:
    controller, epoch = await controller_of("prefill", "decode")
    assert (await controller.hello(hello("prefill", role="prefill"))).role is None
    assert (await controller.report(delta("decode", epoch, 1))).role is None
