"""What the simulated router sees is what the controller would see."""

import numpy as np

from controller.candidates import Candidates
from controller.ledger import Ledger
from controller.mirror import Mirror as RealMirror
from scheduling.batching import make_policy
from scheduling.kernels import Floats
from scheduling.latency import LinearLatency
from scheduling.latency_profile import LatencyProfile
from scheduling.objective import SLO
from simulation.config import ClusterConfig, EngineConfig
from simulation.engine import Engine
from simulation.mirror import Mirror, Report, state_rows
from simulation.requests import Requests
from simulation.truth import Belief, Truth
from tests.controller.fleet import hello, summary
from tests.simulation.loads import MODEL, workload

CONFIG = ClusterConfig(reference_ttft_s=1.0, reference_tpot_s=0.1, reservation_ttl_s=5.0)


def loaded_engine() -> tuple[Engine, float]:
    """An engine with requests in every state, and the time."""
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    load = workload(*((0.0, 100 + 150 * i, 20) for i in range(8)), slo=slo)
    config = EngineConfig(max_batch_tokens=256, max_sequences=5)
    rng = np.random.default_rng(1)
    belief, truth = Belief(MODEL, online=False), Truth(MODEL)
    engine = Engine(config, make_policy("sarathi"), belief, truth, Requests(load), rng)
    for key in range(8):
        engine.submit(key)
    now_s = 0.0
    for _ in range(9):
        now_s += engine.begin(now_s)
        engine.complete(now_s)
    return engine, now_s


def report(engine: Engine, made_s: float, received: int = 8, draining: bool = False) -> Report:
    table: Floats = engine.queue.table.copy()
    latency = engine.planner.latency
    return Report(made_s, table, engine.free_blocks, latency, received, draining)


def test_the_views_are_those_of_the_controller() -> None:
    engine, now_s = loaded_engine()
    sent = report(engine, now_s)
    assert 0 < engine.running < engine.live
    simulated = Mirror(CONFIG)
    simulated.register("one", list(range(8)), sent, now_s)
    simulated.reserve(90, "one", 700, now_s)

    profile = LatencyProfile.of("test", MODEL)
    message = hello("one", list(state_rows(sent.table)), now_s=now_s)
    message = message._replace(
        profile=profile, summary=summary(free_kv_blocks=engine.free_blocks, total_kv_blocks=20_000)
    )
    mirror = RealMirror(1, 2.0, 30.0, CONFIG.reference_ttft_s, CONFIG.reference_tpot_s)
    mirror.hello(message, now_s)
    ledger = Ledger(5.0)
    ledger.reserve(90, "one", 700, now_s)
    assert simulated.views(now_s) == Candidates(mirror, ledger).at(now_s)


def test_a_reservation_counts_until_its_replica_reports_the_request_or_it_expires() -> None:
    engine, now_s = loaded_engine()
    mirror, given = Mirror(CONFIG), list(range(8))
    mirror.register("one", given, report(engine, now_s), now_s)
    bare = mirror.views(now_s)[0]
    for key, tokens in ((8, 100), (9, 1_000)):
        mirror.reserve(key, "one", tokens, now_s)
    given += [8, 9]
    both = mirror.views(now_s)[0]
    assert (both.reserved, both.prefill_tokens) == (2, bare.prefill_tokens + 1_100)
    assert both.pab_tokens == bare.pab_tokens - 1_100
    mirror.hear("one", report(engine, now_s, received=9), now_s + 0.1)
    assert mirror.views(now_s + 0.1)[0].reserved == 1
    assert mirror.views(now_s + 4.9)[0].reserved == 1
    assert mirror.views(now_s + 5.0)[0].reserved == 0


def test_a_second_decision_for_a_request_ends_the_first() -> None:
    engine, now_s = loaded_engine()
    mirror = Mirror(CONFIG)
    for name in ("one", "two"):
        mirror.register(name, [], report(engine, now_s, received=0), now_s)
    mirror.reserve(50, "one", 300, now_s)
    mirror.reserve(50, "two", 300, now_s)
    assert [view.reserved for view in mirror.views(now_s)] == [0, 1]
    mirror.forget("two")
    assert [view.reserved for view in mirror.views(now_s)] == [0]


def test_silent_and_draining_replicas_get_nothing_while_others_are_there() -> None:
    engine, now_s = loaded_engine()
    mirror = Mirror(CONFIG)
    for name in ("one", "two"):
        mirror.register(name, [], report(engine, now_s), now_s)
    later_s = now_s + CONFIG.stale_after_s
    mirror.hear("two", report(engine, later_s), later_s)
    assert [view.replica_id for view in mirror.views(later_s)] == ["two"]
    mirror.hear("two", report(engine, later_s, draining=True), later_s)
    # Nobody else is fresh: the silent one may be there still.
    assert [view.replica_id for view in mirror.views(later_s)] == ["one"]
    mirror.forget("one")
    assert mirror.views(later_s) == []
    mirror.hear("one", report(engine, later_s), later_s)
    assert mirror.views(later_s) == [], "a forgotten replica does not come back by a late report"


def test_the_budget_is_that_of_the_corrected_model() -> None:
    engine, now_s = loaded_engine()
    mirror = Mirror(CONFIG)
    slow = report(engine, now_s)._replace(latency=MODEL.corrected(2.0))
    mirror.register("fast", [], report(engine, now_s), now_s)
    mirror.register("slow", [], slow, now_s)
    fast_view, slow_view = mirror.views(now_s)
    assert slow_view.pab_tokens < fast_view.pab_tokens
    assert isinstance(slow.latency, LinearLatency)
