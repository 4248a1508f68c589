"""What the simulated router knows and decides is what the controller would."""

import numpy as np
import pytest

from sluice.controller.state.mirror import Mirror
from sluice.scheduling.batching import make_policy
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet, FleetSettings
from sluice.scheduling.fleet.local_orders import ARRIVAL
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.state import ROW, rows_of
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.routing import RouteQuery
from sluice.scheduling.routing import make_policy as make_routing
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.engine import Belief, Truth, VirtualEngine
from sluice.simulation.mirror import Sent, VirtualMirror
from sluice.simulation.requests import Requests
from tests.controller.fleet import hello, summary
from tests.simulation.loads import MODEL, workload

CONFIG = ClusterConfig(reservation_ttl_s=5.0)


def make_mirror() -> VirtualMirror:
    return VirtualMirror(CONFIG, make_routing("least_tokens"))


def query(key: int, tokens: int = 100) -> RouteQuery:
    return RouteQuery(key, SLO(ttft_s=1.0, tpot_s=0.05), tokens)


def loaded_engine() -> tuple[VirtualEngine, float]:
    """An engine with requests in every state, and the time."""
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    load = workload(*((0.0, 100 + 150 * i, 20) for i in range(8)), slo=slo)
    config = EngineConfig(max_batch_tokens=256, max_sequences=5)
    rng = np.random.default_rng(1)
    belief, truth = Belief(MODEL, online=False), Truth(MODEL)
    engine = VirtualEngine(config, make_policy("sarathi"), belief, truth, Requests(load), rng)
    for key in range(8):
        engine.submit(key)
    now_s = 0.0
    for _ in range(9):
        now_s += engine.begin(now_s)
        engine.complete(now_s)
    return engine, now_s


def sent(
    engine: VirtualEngine,
    made_s: float,
    received: int = 8,
    draining: bool = False,
    latency: LinearLatency | None = None,
) -> Sent:
    config = engine.config
    report = Report(
        np.zeros(0, ROW),
        made_s,
        0.0,
        made_s,
        latency or engine.planner.latency,
        engine.free_blocks,
        config.kv_blocks,
        config.block_tokens,
        config.max_sequences,
        draining,
        local_order=ARRIVAL,
    )
    return Sent(engine.queue.table.copy(), report, received)


def test_the_figures_are_those_of_the_controller() -> None:
    engine, now_s = loaded_engine()
    made = sent(engine, now_s)
    assert 0 < engine.running < engine.live
    simulated = make_mirror()
    simulated.register("one", list(range(8)), made, now_s)
    assert simulated.place(query(90, 700), now_s).replica_id == "one"

    fleet = Fleet(FleetSettings(reference_ttft_s=1.0))
    real = Mirror(1, fleet, 30.0)
    state = summary(free_kv_blocks=engine.free_blocks, total_kv_blocks=engine.config.kv_blocks)
    state["updated_s"] = now_s
    message = hello("one", list(rows_of(made.table)), now_s=now_s)._replace(
        profile=LatencyProfile.of("test", MODEL),
        summary=state,
        max_sequences=engine.config.max_sequences,
        block_tokens=engine.config.block_tokens,
    )
    real.hello(message, now_s)
    before = fleet.figures[0].copy()
    assert fleet.figures[0, figure.TOKENS] > 0
    assert fleet.figures[0, figure.DECODES] > 0
    simulated.fleet.release([90])
    assert simulated.fleet.figures[0] == pytest.approx(before)


def test_a_reservation_counts_until_its_replica_reports_the_request_or_it_expires() -> None:
    engine, now_s = loaded_engine()
    mirror, given = make_mirror(), list(range(8))
    mirror.register("one", given, sent(engine, now_s), now_s)
    for key, tokens in ((8, 100), (9, 1_000)):
        mirror.place(query(key, tokens), now_s)
    given += [8, 9]
    assert (8 in mirror.fleet.ledger, 9 in mirror.fleet.ledger) == (True, True)
    mirror.receive("one", sent(engine, now_s, received=9), now_s + 0.1)
    mirror.place(query(70), now_s + 0.1)
    assert (8 in mirror.fleet.ledger, 9 in mirror.fleet.ledger) == (False, True)
    assert mirror.fleet.figures[0, figure.RESERVED] == 2
    mirror.receive("one", sent(engine, now_s + 4.9, received=9), now_s + 4.9)
    mirror.place(query(71), now_s + 5.0)
    assert 9 not in mirror.fleet.ledger


def test_silent_and_draining_replicas_get_nothing_while_others_are_there() -> None:
    engine, now_s = loaded_engine()
    mirror = make_mirror()
    for name in ("one", "two"):
        mirror.register(name, [], sent(engine, now_s), now_s)
    later_s = now_s + CONFIG.stale_after_s

    def chosen() -> set[str | None]:
        return {mirror.place(query(key), later_s).replica_id for key in range(20, 30)}

    mirror.receive("two", sent(engine, later_s), later_s)
    assert chosen() == {"two"}
    mirror.receive("two", sent(engine, later_s, draining=True), later_s)
    # Nobody else is fresh: the silent one may be there still.
    assert chosen() == {"one"}
    mirror.forget("one")
    assert chosen() == {None}
    mirror.receive("one", sent(engine, later_s), later_s)
    assert chosen() == {None}, "a forgotten replica does not come back by a late report"


def test_what_replicas_hold_of_a_prompt_follows_their_reports() -> None:
    engine, now_s = loaded_engine()
    depths = {7: 64, 8: 128, 9: 192}
    mirror = VirtualMirror(CONFIG, make_routing("least_tokens"), depths=depths)
    made = sent(engine, now_s)
    mirror.register("one", list(range(8)), made._replace(held=frozenset({7, 8})), now_s)
    mirror.register("two", list(range(8)), made, now_s)

    def cached(now_s: float) -> dict[str, float]:
        mirror.place(query(90), now_s)
        rows = mirror.fleet.candidates(now_s)
        tokens = mirror.fleet.prefixes.cached_tokens((7, 8, 9), rows)
        return {mirror.fleet.ids[row]: float(held) for row, held in zip(rows, tokens, strict=True)}

    assert cached(now_s) == {"one": 128.0, "two": 0.0}
    mirror.receive("one", made._replace(held=frozenset({7})), now_s)
    mirror.receive("two", made._replace(held=frozenset({7, 8, 9})), now_s)
    assert cached(now_s) == {"one": 64.0, "two": 192.0}
    mirror.forget("two")
    assert cached(now_s) == {"one": 64.0}
    # With less to compute there, the prompt goes where its beginning is.
    mirror.register("two", list(range(8)), made._replace(held=frozenset(depths)), now_s)
    known = RouteQuery(91, SLO(ttft_s=1.0), 1_000, prefix=(7, 8, 9))
    assert mirror.place(known, now_s).replica_id == "two"
