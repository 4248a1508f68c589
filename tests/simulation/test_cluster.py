"""Clusters: nothing is lost whatever happens, and what is exact is exact."""

from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.benchmarks.experiments.kinds import Kind
from sluice.benchmarks.live.mix import Pattern
from sluice.controller.config import ControllerConfig
from sluice.replica.config import EngineConfig as ReplicaEngineConfig
from sluice.replica.config import ReplicaConfig
from sluice.router.config import RouterConfig
from sluice.router.dispatch.retries import RETRY_PAUSE_S as DISPATCHER_PAUSE_S
from sluice.router.ingress.middleware import REFUSALS_PER_S
from sluice.router.serve.request_router import NO_REPLICA_WAIT_S
from sluice.scheduling import routing
from sluice.scheduling.admission import POLICIES as ADMISSIONS
from sluice.scheduling.admission import make_policy as make_admission
from sluice.scheduling.batching import make_policy
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.placement.cells import cell_of
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.kernels import ARRIVAL
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from sluice.simulation.cluster import (
    NO_ATTEMPT_LEFT,
    NO_REPLICA,
    REFUSED,
    RETRY_PAUSE_S,
    Cluster,
    Node,
)
from sluice.simulation.config import (
    ClusterConfig,
    EngineConfig,
    Failure,
    Resize,
    Slowdown,
    WhenUnattainable,
)
from sluice.simulation.engine import Belief, Truth, VirtualEngine
from sluice.simulation.metrics import stages
from sluice.simulation.requests import Requests
from sluice.simulation.run import TOO_LONG, Result, simulate
from sluice.simulation.workload import Workload
from tests.examples import examples
from tests.light_engine import LIGHT_ENGINE
from tests.simulation.loads import (
    EXACT,
    MODEL,
    clustered,
    ended_well,
    families,
    met,
    pools,
    route,
    steady,
    workload,
    workloads,
)


def test_one_replica_next_door_is_the_bare_engine() -> None:
    load = workload(*((0.013 * i, 50 + 97 * (i % 11), 1 + i % 17) for i in range(150)))
    near = ClusterConfig(replicas=1, dispatch_s=0)
    config = EngineConfig(kv_blocks=200, max_sequences=12)
    one = clustered(load, near, policy="slidebatching", engine=config)
    alone = simulate(load, make_policy("slidebatching"), EXACT, config=config)
    assert np.array_equal(one.requests.emitted_s, alone.requests.emitted_s)
    assert one.steps == alone.steps


incidents = st.lists(
    st.one_of(
        st.builds(
            Failure,
            at_s=st.floats(0, 1.5),
            replica=st.integers(0, 5),
            down_s=st.one_of(st.none(), st.floats(0, 1)),
        ),
        st.builds(
            Slowdown,
            at_s=st.floats(0, 1.5),
            replica=st.integers(0, 5),
            factor=st.sampled_from([0.5, 5.0]),
        ),
        st.builds(
            Resize,
            at_s=st.floats(0, 1.5),
            change=st.integers(-2, 2),
            role=st.sampled_from(["mixed", "prefill", "decode"]),
        ),
    ),
    max_size=5,
)


@settings(max_examples=examples(120))
@given(
    load=st.one_of(workloads, families()),
    what_happens=incidents,
    router=st.sampled_from(sorted(routing.POLICIES)),
    sizes=st.sampled_from([(1, 0, 0), (3, 0, 0), (0, 1, 1), (0, 2, 2), (1, 1, 1), (2, 1, 2)]),
    loss=st.sampled_from([0.0, 0.5, 0.95]),
    delay_s=st.sampled_from([0.0, 0.3]),
    admission=st.sampled_from([None, *sorted(ADMISSIONS)]),
    when=st.sampled_from(get_args(WhenUnattainable)),
    cells=st.sampled_from([1, 3]),
    migrate=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_request_ends_exactly_once(
    load: Workload,
    what_happens: list[Failure | Resize | Slowdown],
    router: str,
    sizes: tuple[int, int, int],
    loss: float,
    delay_s: float,
    admission: str | None,
    when: WhenUnattainable,
    cells: int,
    migrate: bool,
    seed: int,
) -> None:
    replicas, prefillers, decoders = sizes
    decides_together = admission is not None and make_admission(admission).window_s > 0
    cluster = pools(
        prefillers,
        decoders,
        replicas,
        report_loss=loss,
        report_delay_s=delay_s,
        edge_wait_s=1.0,
        when_unattainable={"standard": when},
        cells=1 if prefillers or decides_together else cells,
        migrate=migrate,
        push_interval_s=0.1,
    )
    happening = [
        incident
        for incident in what_happens
        if not isinstance(incident, Resize) or cluster.counts[incident.role]
    ]
    engine = EngineConfig(kv_blocks=40, max_batch_tokens=200, max_sequences=6)
    result = clustered(
        *(load, cluster, *happening),
        policy="fairbatching",
        router=router,
        admission=admission,
        truth=MODEL,
        engine=engine,
        seed=seed,
    )
    requests = result.requests
    whole = ended_well(result)
    for key in range(len(load)):
        # A request has all its output, or an explicit failure, and never both.
        assert whole[key] != (key in requests.failures)
        first, last = requests.first_stage[key], requests.first_stage[key + 1]
        times = requests.emitted_s[requests.offsets[first] : requests.offsets[last]]
        left = times[~np.isnan(times)]
        assert (np.diff(left) > 0).all()
        assert len(left) == 0 or left[0] > load.arrivals[key].arrival_s
        # What left is the beginning of the output, also where replicas failed in between.
        assert not np.isnan(times[: len(left)]).any()
        if requests.whole_tokens(key) > engine.kv_tokens:
            assert key in requests.failures
    if not happening:
        refusing = admission is not None and when != "best_effort"
        assert set(requests.failures.values()) <= {TOO_LONG} | ({REFUSED} if refusing else set())
        assert result.moved == 0
    # What was promised is not best effort, but where a replica failed in between; and without
    # admission nothing is either.
    if not happening:
        assert not (requests.best_effort & ~np.isnan(requests.promised_s)).any()
    if admission is None:
        assert not requests.best_effort.any()
        assert np.isnan(requests.promised_s).all()


@pytest.mark.parametrize("cluster_config", [ClusterConfig(replicas=2), pools(2, 2)])
def test_engines_are_empty_when_all_has_ended(cluster_config: ClusterConfig) -> None:
    requests = Requests(steady(120))
    config = EngineConfig(kv_blocks=60)

    def make_engine(role: Role, number: int) -> VirtualEngine:
        rng = np.random.default_rng(3)
        policy, belief = make_policy("fcfs"), Belief(MODEL)
        return VirtualEngine(config, policy, belief, EXACT, requests, rng)

    cluster = Cluster(requests, make_engine, route(), cluster_config, np.random.default_rng(0))
    cluster.run()
    assert not requests.failures
    for replica in cluster.replicas.started:
        assert replica.engine.live == replica.engine.held_blocks == 0
        assert replica.engine.free_blocks == 60
        assert len(replica.given) > 0


def test_equal_seeds_give_equal_runs() -> None:
    cluster = ClusterConfig(replicas=3, report_loss=0.3)
    happening = [Failure(0.5, 1, down_s=0.3), Resize(1.0, 1)]
    runs = [
        clustered(steady(), cluster, *happening, router="pab", truth=MODEL, seed=seed)
        for seed in (1, 1, 2)
    ]
    times = [run.requests.emitted_s for run in runs]
    assert np.array_equal(times[0], times[1], equal_nan=True)
    assert not np.array_equal(times[0], times[2], equal_nan=True)
    assert runs[0].steps == runs[1].steps


def test_cells_exclude_roles_and_decisions_on_several_requests_together() -> None:
    with pytest.raises(ValueError, match="cells must be 1 with prefillers and decoders, got 2"):
        pools(1, 1, cells=2)
    with pytest.raises(ValueError, match="admission 'slos_serve' needs window_ms: 0"):
        clustered(steady(), ClusterConfig(replicas=4, cells=2), admission="slos_serve")


def test_cells_share_the_load_and_attain_about_as_much_as_one_controller() -> None:
    share = {}
    for cells in (1, 4):
        result = clustered(
            steady(600, gap_s=0.005),
            ClusterConfig(replicas=12, cells=cells),
            policy="deadline_triage",
            router="most_gain",
            admission="moore_hodgson",
            truth=MODEL,
        )
        busy = {cell_of(f"mixed-{n}", cells) for n, steps in enumerate(result.steps) if steps}
        assert len(busy) == cells
        share[cells] = met(result).mean()
    assert share[4] > share[1] - 0.02


def test_reservations_spread_a_burst_that_no_report_has_shown_yet() -> None:
    burst = workload(*((0.0, 500, 2) for _ in range(40)))
    blind = ClusterConfig(replicas=4, report_delay_s=30.0)
    # Ten prompts of 500 tokens are one batch of each engine, and then one decode step.
    assert clustered(burst, blind).steps == (2, 2, 2, 2)


def test_what_a_dead_replica_had_goes_on_elsewhere() -> None:
    # One long answer is under way on each replica when the first of them dies.
    load = workload((0.0, 100, 400), (0.0, 100, 400), (0.5, 30_000, 3), (0.5, 30_000, 3))
    cluster = ClusterConfig(replicas=2)
    engine = EngineConfig(max_batch_tokens=2_000)

    def run(*incidents: Failure) -> Result:
        return clustered(load, cluster, *incidents, router="round_robin", engine=engine)

    whole, result = run(), run(Failure(0.6, 0))
    assert not result.requests.failures
    assert ended_well(result).all()
    assert result.moved == 2
    before, after = whole.requests.emitted_s[:400], result.requests.emitted_s[:400]
    had = int((after < 0.6).sum())
    assert had > 50
    assert np.array_equal(before[:had], after[:had]), "what has left stays"
    # Its prompt and what it had emitted were computed again, which gave the next token.
    assert result.computed_tokens >= whole.computed_tokens + 100 + had - 1


def test_a_request_is_given_up_after_so_many_replicas() -> None:
    load = workload((0.0, 100, 400))
    failing = [Failure(0.3 * (1 + number), number, down_s=0.0) for number in range(3)]
    for attempts, failures in ((3, {0: NO_ATTEMPT_LEFT}), (4, {})):
        cluster = ClusterConfig(replicas=1, max_attempts=attempts)
        result = clustered(load, cluster, *failing)
        assert result.requests.failures == failures
        assert ended_well(result)[0] == (not failures)


def test_without_a_replica_requests_wait_at_the_router_for_a_bounded_time() -> None:
    load = workload((0.0, 100, 5), (1.0, 100, 5))
    cluster = ClusterConfig(replicas=1, edge_wait_s=2.0)
    result = clustered(load, cluster, Failure(0.5, 0))
    assert result.requests.failures == {1: NO_REPLICA}
    assert 3.0 <= result.end_s < 3.3
    assert not clustered(load, cluster, Failure(0.5, 0, down_s=1.0)).requests.failures


def test_the_wait_for_a_replica_counts_from_its_begin_and_not_from_the_arrival() -> None:
    # The only replica dies while it computes the prompt, 5 s after the arrival.
    load = workload((0.0, 10_000, 3))
    slow = LinearLatency(a=0.0, b=5e-4)
    cluster = ClusterConfig(replicas=1, edge_wait_s=2.0)
    engine = EngineConfig(max_batch_tokens=10_000)
    for back_s, expected in ((6.0, {}), (8.0, {0: NO_REPLICA})):
        dies = Failure(4.0, 0, down_s=back_s - 4.0)
        result = clustered(load, cluster, dies, truth=Truth(slow, 0), engine=engine)
        assert result.requests.failures == expected


def test_new_replicas_serve_and_leaving_ones_finish_what_they_have() -> None:
    grown = clustered(steady(), None, Resize(0.5, 2))
    assert len(grown.steps) == 4
    assert min(grown.steps) > 0
    late = ClusterConfig(report_delay_s=0.2)
    shrunk = clustered(steady(prompt=20, output=1), late, Resize(0.5, -1))
    assert not grown.requests.failures
    assert not shrunk.requests.failures
    assert shrunk.up_s < 2 * shrunk.end_s
    # It left before the router knew: what was sent to it was placed again.
    assert shrunk.moved > 0


def test_admission_by_budget_refuses_what_would_be_late_and_keeps_the_rest_in_time() -> None:
    # About twice what the engine can prefill.
    load = steady(count=300, gap_s=0.01, prompt=400, output=1)
    cluster = ClusterConfig(replicas=1, when_unattainable={"standard": "reject"})

    every, some = (clustered(load, cluster, admission=name, seed=1) for name in (None, "pab"))
    assert not every.requests.failures
    assert set(some.requests.failures.values()) == {REFUSED}
    assert met(some).sum() > 2 * met(every).sum()
    # The budget keeps no head-room: a first token leaves with the end of its batch.
    assert met(some).sum() >= 0.85 * (len(load) - len(some.requests.failures))
    assert np.nanmax(stages(some.requests).ttft_s) < 0.6, "of 0.5 s"


def overloaded(when: WhenUnattainable) -> Result:
    """About twice what the engine can prefill, with the default admission."""
    return clustered(
        steady(count=300, gap_s=0.01, prompt=400, output=5),
        ClusterConfig(replicas=1, when_unattainable={"standard": when}),
        policy="deadline_triage",
        admission="moore_hodgson",
    )


def test_promises_are_kept_and_the_others_are_served_on_what_is_left() -> None:
    result = overloaded("best_effort")
    requests = result.requests
    promised = ~np.isnan(requests.promised_s)
    assert not requests.failures
    assert 0.2 < promised.mean() < 0.8
    assert (promised != requests.best_effort).all()
    assert met(result)[promised].mean() >= 0.98
    # The best-effort ones end last.
    wait_s = stages(requests).ttft_s
    assert wait_s[requests.best_effort].mean() > 2 * wait_s[promised].mean()


def test_what_nobody_can_promise_waits_if_its_class_says_so() -> None:
    rejecting, queueing = overloaded("reject"), overloaded("queue")
    for result in (rejecting, queueing):
        requests = result.requests
        refused = np.zeros(len(requests), bool)
        refused[list(requests.failures)] = True
        assert set(requests.failures.values()) == {REFUSED}
        assert (refused == np.isnan(requests.promised_s)).all()
        assert not requests.best_effort.any()
    # Some of those that waited were promised later than at their arrival.
    assert len(queueing.requests.failures) <= len(rejecting.requests.failures)
    assert queueing.requests.failures.keys() != rejecting.requests.failures.keys()


def test_replicas_of_two_speeds_under_one_name_get_what_they_can_do_in_time() -> None:
    """A prompt takes 19 ms on the fast one and 114 ms on the slow one, and 33 arrive each second:
    with equal shares the slow one gets more than it can do."""
    slow = LinearLatency(a=6 * MODEL.a, b=6 * MODEL.b, c=6 * MODEL.c, d=6 * MODEL.d)
    nodes = [Node(Truth(each, 0), Belief(each), EngineConfig()) for each in (MODEL, slow)]

    def run(router: str, admission: str | None) -> float:
        own = {"policy": "deadline_triage", "router": router, "admission": admission}
        result = clustered(steady(600, 0.03), nodes=nodes, **own)
        assert ended_well(result).all()
        return float(met(result).mean())

    assert run("most_gain", "moore_hodgson") > 0.99
    assert run("round_robin", None) < 0.8


def test_a_slow_replica_takes_longer_until_it_recovers_and_its_planner_learns_it() -> None:
    model = LinearLatency(a=0.01, b=0.0)
    load = workload((0.0, 10, 300))
    one = ClusterConfig(replicas=1, dispatch_s=0)
    slow = [Slowdown(0.995, 0, 3.0), Slowdown(3.995, 0, 1.0), Slowdown(0.5, 7, 9.0)]

    def run(incidents: list[Slowdown]) -> Result:
        return clustered(load, one, *incidents, truth=Truth(model, 0), seed=1)

    # 100 steps of 10 ms in the first second, 100 of 30 ms until 4.0 s, and 100 of 10 ms.
    assert run(slow).end_s == pytest.approx(1.0 + 3.0 + 1.0)
    assert run(slow[:1]).correction == pytest.approx(3.0, rel=0.01)
    assert run([]).correction == pytest.approx(1.0)
    with pytest.raises(ValueError, match="factor must be positive, got 0"):
        run([Slowdown(0.0, 0, 0.0)])


def test_defaults_are_those_of_production() -> None:
    cluster, replica, controller = ClusterConfig(), ReplicaConfig(), ControllerConfig()
    assert cluster.report_interval_s == replica.report_interval_s
    assert cluster.heartbeat_s == replica.heartbeat_s
    assert cluster.stale_after_s == controller.stale_after_s
    assert cluster.reservation_ttl_s == controller.reservation_ttl_s
    assert cluster.promise_level == controller.promise_level
    assert cluster.max_attempts == RouterConfig().max_attempts
    assert DISPATCHER_PAUSE_S == RETRY_PAUSE_S
    assert cluster.edge_wait_s == NO_REPLICA_WAIT_S


def test_a_failure_of_a_replica_that_is_not_there_is_left_alone() -> None:
    result = clustered(steady(), None, *(Failure(0.5, number) for number in (-1, 2, 99)))
    assert not result.requests.failures
    assert result.moved == 0


def test_impossible_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match="no replica has the role 'decode'; there are: mixed"):
        clustered(steady(), None, Resize(1.0, 1, "decode"))
    with pytest.raises(ValueError, match="less than 1"):
        ClusterConfig(report_loss=1.0)
    with pytest.raises(ValueError, match="at least one replica of some role"):
        ClusterConfig(replicas=0)
    with pytest.raises(ValueError, match=r"prefillers \(2\) and decoders \(0\) need each other"):
        ClusterConfig(prefillers=2)


REPLICAS = 2
RATE = 3.6  # about what one engine can guarantee, requests a second
SECONDS = 35.0
WARM_UP_S = 5.0
PATIENCE_S = 5.0
STRICT = SLO(ttft_s=1.5, tpot_s=0.15, priority=2, service_class="strict")
PATTERN = Pattern("overload", kinds={"strict": Kind(1.0, (150, 450), (20, 60))})
SEEDS = (1, 2)
LIGHT = LinearLatency(
    LIGHT_ENGINE["step_s"], LIGHT_ENGINE["token_s"], LIGHT_ENGINE["context_token_s"]
)
LIMITS = ("kv_blocks", "block_tokens", "max_batch_tokens", "max_sequences")


class Impatient(Cluster):
    """Clients send a refused request again when the refusal has left, at the router's pace, for
    ``patience_s``. Each attempt is a new request to the router: its time counts anew.

    Decisions know the most tokens that a request may have, as at a real router.
    """

    patience_s = 0.0
    refusals = 0
    _turn_s = -1.0

    def _query(self, key: int) -> RouteQuery:
        if not self._requests.begun(key):
            now_s, arrivals = self.events.now_s, self._requests.arrivals
            self._requests.rows[key, ARRIVAL] = now_s
            arrivals[key] = arrivals[key]._replace(arrival_s=now_s)
        most = self._requests.arrivals[key].output_tokens
        return super()._query(key)._replace(output_tokens=most)

    def _wait(self, key: int, limit_s: float, failure: str) -> None:
        self.refusals += 1
        now_s = self.events.now_s
        self._turn_s = max(self._turn_s, now_s - 1.0) + 1 / REFUSALS_PER_S
        back_s = max(self._turn_s, now_s) + 0.005
        if back_s - self._waiting_since.setdefault(key, now_s) < self.patience_s:
            self.events.at(back_s, partial(self._place, key))
        else:
            self._end(key, failure)


def served(load: float, seed: int, patience_s: float) -> tuple[int, int, int]:
    """Requests and tokens that were served in time after the warm-up, and how often one was
    refused."""
    workload = PATTERN.workload(load * RATE * REPLICAS, SECONDS, seed, {"strict": STRICT})
    requests = Requests(workload)
    limits: dict[str, Any] = {name: LIGHT_ENGINE[name] for name in LIMITS}

    def make_engine(role: Role, number: int) -> VirtualEngine:
        policy = make_policy(ReplicaEngineConfig().policy)
        belief = Belief(LIGHT.with_headroom(1.05))
        rng = np.random.default_rng(number)
        return VirtualEngine(
            EngineConfig(**limits), policy, belief, Truth(LIGHT, 0.0), requests, rng
        )

    control = ControllerConfig()
    config = ClusterConfig(replicas=REPLICAS, when_unattainable={"strict": "reject"})
    run = Impatient(
        requests,
        make_engine,
        control.make_routing(),
        config,
        np.random.default_rng(0),
        control.make_admission(),
    )
    run.patience_s = patience_s
    run.run()
    count = tokens = 0
    for key in range(len(requests)):
        times = requests.emitted_s[requests.offsets[key] : requests.offsets[key + 1]]
        if key in requests.failures or not WARM_UP_S <= times[-1] < SECONDS:
            continue
        ttft_s = times[0] - requests.rows[key, ARRIVAL]
        pace_s = (times[-1] - times[0]) / max(1, len(times) - 1)
        if ttft_s <= (STRICT.ttft_s or 0.0) and pace_s <= (STRICT.tpot_s or 0.0):
            count += 1
            tokens += len(times)
    return count, tokens, run.refusals


@pytest.mark.parametrize("load", [pytest.param(3.0, marks=pytest.mark.release), 10.0])
def test_who_comes_again_at_once_takes_the_place_of_others_and_as_much_is_served(
    load: float,
) -> None:
    once = np.sum([served(load, seed, 0.0) for seed in SEEDS], axis=0)
    again = np.sum([served(load, seed, PATIENCE_S) for seed in SEEDS], axis=0)
    # The storm was one: as many refusals as the pace lets leave.
    assert again[2] > 0.9 * REFUSALS_PER_S * SECONDS * len(SEEDS)
    assert again[:2] == pytest.approx(once[:2], rel=0.08)
    per_s = once[0] / len(SEEDS) / (SECONDS - WARM_UP_S)
    assert per_s == pytest.approx(REPLICAS * RATE, rel=0.1)
