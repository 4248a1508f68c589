"""The metrics of a replica, as a scraper reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sluice.replica.config import SimulatedEngineConfig
from sluice.replica.metrics import ReplicaCollector
from sluice.replica.preemption.messages import Timing
from sluice.replica.preemption.stats import Stats
from sluice.replica.scheduler.local_scheduler import LocalScheduler
from sluice.replica.scheduler.speculation import DraftCounts
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.replica.simulated.core import SimulatedCore
from sluice.scheduling.batching import make_policy
from sluice.scheduling.fleet.state import PLAN_BUCKETS_S, STEP_RATIO_BUCKETS, EngineState
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role

ABC = (("replica", "abc"),)
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(role: Role = "mixed", size: float = 1.0, **states: Callable[[], EngineState]) -> Samples:
    """The samples of ranks by name, each with 7 live requests; 3 replicas are configured."""
    registry = CollectorRegistry(auto_describe=False)
    ranks: Any = [
        SimpleNamespace(replica_id=name, engine=SimpleNamespace(state=state), live_requests=7)
        for name, state in states.items()
    ]
    registry.register(ReplicaCollector(ranks, lambda: 3, role, size=size))
    samples: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sample.labels.items())] = sample.value
    return samples


def run_some_steps(table: StateTable, *clients: str) -> int:
    """Run a real scheduler that believes steps to be half as long as they are."""
    config = SimulatedEngineConfig(step_s=0.02, token_s=0, context_token_s=0, kv_blocks=8)
    scheduler = LocalScheduler(make_policy("fcfs"), table, LinearLatency(0.01, 0.0))
    core = SimulatedCore(config, scheduler, table)
    for index in range(3):
        args = RequestArgs(str(index), 0.0, SLO(), client=dict(enumerate(clients)).get(index, ""))
        core.submit(args, index, 60, 20)
    now_s = 0.0
    steps = 0
    while step := core.begin(now_s):
        now_s += step.seconds
        core.complete(step, now_s, lambda _: None)
        steps += 1
    return steps


def test_what_suspensions_cost_is_there() -> None:
    table = StateTable.create(8)
    stats = Stats(rounds=9, suspended=1, resumes=2, discards=1, decide_s=0.5)
    timing = Timing(0.0, 9.0, 3.0, (1.002, 2.3))
    stats.ended([1.0, 2.0, 4.0], timing)
    table.write(**asdict(stats))
    samples = scrape(abc=table.read)
    assert samples["sluice_suspended_prefills"] == {ABC: 1}
    for name, value in {
        "rounds": 9,
        "suspensions": 2,
        "late_stops": 1,
        "resumes": 2,
        "discards": 1,
        "suspended_seconds": 3.0,
        "decide_seconds": 0.5,
    }.items():
        assert samples[f"sluice_prefill_{name}_total"] == {(): value}, name
    assert samples["sluice_prefill_stop_seconds_count"] == {(): 2}
    assert samples["sluice_prefill_stop_seconds_sum"][()] == pytest.approx(0.302)
    within = samples["sluice_prefill_stop_seconds_bucket"]
    assert [within[("le", bound),] for bound in ("0.001", "0.005", "0.2", "0.5")] == [0, 1, 1, 2]


def test_every_metric_is_there_and_adds_up() -> None:
    table = StateTable.create(8)
    steps = run_some_steps(table)
    samples = scrape("decode", abc=table.read)
    assert samples["sluice_replica_live_requests"] == {ABC: 7}
    assert samples["sluice_configured_replicas"] == {(*ABC, ("role", "decode")): 3}
    assert samples["sluice_engine_steps_total"] == {(): steps}
    assert samples["sluice_preemptions_total"][()] > 0
    assert samples["sluice_plan_mismatches_total"] == {(): 0}
    assert samples["sluice_last_step_seconds"][ABC] == pytest.approx(0.02)
    assert 1.0 < samples["sluice_latency_correction"][ABC] <= 2.0
    assert 1.0 < samples["sluice_latency_fixed_correction"][ABC] <= 2.0
    assert 0.0 < samples["sluice_latency_spread_ratio"][ABC] <= 1.0
    assert samples["sluice_predicted_step_seconds"][ABC] > 0.01
    for name, bounds in (
        ("sluice_plan_seconds", PLAN_BUCKETS_S),
        ("sluice_step_time_ratio", STEP_RATIO_BUCKETS),
    ):
        assert samples[f"{name}_count"] == {(): steps}
        assert samples[f"{name}_sum"][()] > 0
        buckets = list(samples[f"{name}_bucket"].values())
        assert len(buckets) == len(bounds) + 1
        assert buckets == sorted(buckets)
        assert buckets[-1] == steps
    # The first steps took twice as long as predicted, and the correction learnt it.
    ratio = samples["sluice_step_time_ratio_sum"][()] / steps
    assert 1.0 < ratio <= 2.0


def test_counters_are_summed_over_ranks_and_gauges_are_of_each() -> None:
    tables = [StateTable.create(8) for _ in range(2)]
    steps = [run_some_steps(table) for table in tables]
    tables[1].write(last_step_s=0.5)
    samples = scrape(one=tables[0].read, two=tables[1].read)
    names = [(("replica", name),) for name in ("one", "two")]
    assert samples["sluice_replica_live_requests"] == dict.fromkeys(names, 7)
    assert samples["sluice_engine_steps_total"] == {(): sum(steps)}
    assert samples["sluice_plan_seconds_count"] == {(): sum(steps)}
    assert samples["sluice_last_step_seconds"] == {names[0]: pytest.approx(0.02), names[1]: 0.5}


def test_who_used_the_engines_is_summed_over_ranks() -> None:
    tables = [StateTable.create(8) for _ in range(2)]
    steps = run_some_steps(tables[0], "a", "b") + run_some_steps(tables[1], "a", "a", "a")
    samples = scrape(size=4.0, one=tables[0].read, two=tables[1].read)
    seconds = samples["sluice_engine_seconds_total"]
    names = {dict(labels)["client"]: value for labels, value in seconds.items()}
    assert names.keys() == {"a", "b", "unattributed"}
    assert sum(names.values()) == pytest.approx(0.02 * steps)
    assert samples["sluice_engine_busy_seconds_total"][()] == pytest.approx(0.02 * steps)
    assert names["a"] > names["b"] > 0
    gpu_seconds = samples["sluice_engine_gpu_seconds_total"]
    assert gpu_seconds == {labels: pytest.approx(4 * each) for labels, each in seconds.items()}
    assert samples["sluice_engine_kv_block_seconds_total"].keys() == seconds.keys()


def test_what_became_of_drafts_is_there() -> None:
    table = StateTable.create(8)
    counts = DraftCounts()
    for checked, accepted in ((0, 0), (2, 1), (5, 5), (12, 0)):
        counts.observe("chat", checked, accepted)
    assert counts.rates.rate("chat") > counts.rates.rate("unheard of") > 0
    table.write(draft_s=0.003, **counts.summary())
    samples = scrape(abc=table.read)
    assert samples["sluice_drafts_accepted_total"] == {(): 6}
    assert samples["sluice_draft_length_sum"] == {(): 19}
    assert samples["sluice_draft_length_count"] == {(): 4}
    within = samples["sluice_draft_length_bucket"]
    assert [within[("le", bound),] for bound in ("0", "2", "4", "5", "10", "+Inf")] == (
        [1, 2, 2, 3, 3, 4]
    )
    assert samples["sluice_draft_seconds"] == {ABC: 0.003}


def test_a_dead_engine_leaves_what_the_replica_knows_itself() -> None:
    def gone() -> EngineState:
        raise RuntimeError("the engine is gone")

    assert set(scrape(abc=gone)) == {"sluice_replica_live_requests", "sluice_configured_replicas"}
