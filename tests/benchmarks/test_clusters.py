"""Cluster experiments: what they share, on cases small enough to check by hand."""

from __future__ import annotations

import pytest

from sluice.benchmarks.experiments.grid import Plan, Row
from sluice.benchmarks.experiments.loads import (
    GENERATED,
    Conditions,
    Span,
    Sweep,
    fitted,
    full_load_rate,
)
from sluice.benchmarks.experiments.routers import against_rivals
from sluice.benchmarks.experiments.systems import (
    DEFAULT,
    ROUTER,
    SETUPS,
    Contender,
    Layout,
    System,
    cluster_figures,
    colocated,
    disaggregated,
    make_router,
    run_cluster,
)
from sluice.scheduling.request.objective import SLO
from sluice.simulation.config import Slowdown
from sluice.simulation.workload import Arrival, Workload

SETUP = SETUPS["8b"]
AZURE = GENERATED["proserve azure"]


def outcome(router: str, value: float, load: float = 1.0, seed: int = 1) -> Row:
    return {"load": load, "router": router, "seed": seed, "attainment_mean": value, "tdg": value}


def spread(count: int, gap_s: float, slo: SLO) -> Workload:
    return Workload("spread", tuple(Arrival(gap_s * i, 100, 10, slo) for i in range(count)))


class TestLayouts:
    def test_load_one_is_what_all_replicas_serve_together(self) -> None:
        one, fast = full_load_rate(AZURE, SETUP), full_load_rate(AZURE, SETUPS["8b-fast"])
        assert fast > one
        assert Conditions(AZURE, SETUP, colocated(4)).full_rate == pytest.approx(4 * one)
        assert Conditions(AZURE, SETUP, disaggregated(4)).full_rate == pytest.approx(4 * one)
        mixed = colocated(4)._replace(nodes=(SETUPS["8b-fast"],))
        assert Conditions(AZURE, SETUP, mixed).full_rate == pytest.approx(3 * one + fast)

    @pytest.mark.parametrize(("size", "decoders"), [(2, 1), (4, 1), (8, 2), (32, 8)])
    def test_a_quarter_decodes(self, size: int, decoders: int) -> None:
        layout = disaggregated(size)
        assert layout.size == size
        assert layout.cluster.decoders == decoders

    def test_arrivals_last_as_long_on_clusters_of_every_size(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lasts = lambda kind, seed, case, rate, requests: {"seconds": requests / rate}  # noqa: E731
        monkeypatch.setattr("sluice.benchmarks.experiments.loads.measure", lasts)
        for layout in (colocated(2), colocated(8)):
            grid = Sweep(
                workloads={"azure": AZURE},
                loads=(0.5,),
                kinds=(System("pab"),),
                span=Span(10.0, 1, 1_000),
                layouts=(layout,),
            )
            (cell,) = grid.cells(Plan("normal", (1,)))
            assert cell.labels == {
                **{"workload": "azure", "setup": "8b", "load": 0.5},
                **{"layout": "co-located", "replicas": layout.size},
                **{"router": "pab", "policy": "deadline_triage"},
            }
            assert cell.measure(1)["seconds"] == pytest.approx(10.0, rel=0.05)


class TestRuns:
    @pytest.mark.parametrize("layout", [colocated(3), disaggregated(3)])
    def test_idle_replicas_attain_everything(self, layout: Layout) -> None:
        load = spread(12, 1.0, SLO(ttft_s=0.5, tpot_s=0.05))
        found = cluster_figures(
            run_cluster(load, System("least_tokens", DEFAULT), SETUP, layout, 1)
        )
        assert found["attainment_mean"] == found["tdg"] == found["tdg_first"] == 1.0
        assert found["refused"] == found["moved"] == 0

    def test_first_tokens_are_counted_alone(self) -> None:
        # The first token comes after a step of 17 ms, the last eight steps later.
        load = spread(5, 5.0, SLO(ttft_s=0.05, tpot_s=0.0001))
        found = cluster_figures(run_cluster(load, System("pab", DEFAULT), SETUP, colocated(1), 1))
        assert found["tdg_first"] == 1.0
        assert found["tdg"] < 1.0

    def test_the_nodes_are_the_first_replicas_and_incidents_happen(self) -> None:
        # Two replicas in turn: one token each, a step of 100 prompt tokens.
        load = spread(40, 0.5, SLO(ttft_s=1.0))
        turn = System("round_robin", DEFAULT)
        fast = colocated(2)._replace(nodes=(SETUPS["8b-fast"],))
        slow = colocated(2)._replace(incidents=(Slowdown(0.0, 1, 10.0),))

        def ttft_s(layout: Layout) -> list[float]:
            requests = run_cluster(load, turn, SETUP, layout, 1).result.requests
            return [requests.first_token_s(key) - 0.5 * key for key in (0, 1)]

        plain = ttft_s(colocated(2))
        assert ttft_s(fast)[0] < 0.7 * plain[0]
        assert ttft_s(fast)[1] == pytest.approx(plain[1], rel=0.2)
        assert ttft_s(slow)[1] > 5 * plain[1]
        assert ttft_s(slow)[0] == pytest.approx(plain[0], rel=0.2)

    def test_routers_that_draw_do_so_by_the_seed(self) -> None:
        assert make_router("power_of_two", 7).options.model_dump() == {"seed": 7}

    def test_what_nobody_can_promise_is_refused_where_that_is_said(self) -> None:
        # Ten prompts of 0.33 s each at once on one replica, each due after 0.9 s.
        load = Workload("burst", (Arrival(0.0, 4_000, 5, SLO(ttft_s=0.9, tpot_s=0.1)),) * 10)
        refusing = System("pab", DEFAULT, "moore_hodgson", "reject")
        found = cluster_figures(run_cluster(load, refusing, SETUP, colocated(1), 1))
        assert found["refused"] == 0.8
        assert found["attainment_mean"] == 0.2
        serving = System("pab", DEFAULT, "moore_hodgson")
        assert cluster_figures(run_cluster(load, serving, SETUP, colocated(1), 1))["refused"] == 0

    def test_static_budgets_are_profiled(self) -> None:
        def options(kind: Contender) -> object:
            behind = fitted(System("pab", kind), lambda: 77)
            assert isinstance(behind, System)
            return behind.local.options

        assert options(Contender("", "sarathi")) == {"token_budget": 77}
        assert options(Contender("", "sarathi", {"token_budget": 64})) == {"token_budget": 64}
        assert options(Contender("", "fcfs")) == {}


class TestComparisons:
    ROWS = (
        outcome(ROUTER, 0.9),
        outcome("round_robin", 0.5),
        outcome("least_tokens", 0.95),
        outcome(ROUTER, 0.8, 2.0),
        outcome("round_robin", 0.6, 2.0),
        outcome("least_tokens", 0.795, 2.0),
    )

    def test_the_default_is_held_against_each_router(self) -> None:
        lines = against_rivals(self.ROWS, ("load",)).rows
        assert lines[0][2] == "0.8500"
        by_router = {line[1]: line[2:] for line in lines[1 : len(lines) // 2]}
        assert by_router["round_robin"] == ("0.5500", "0.3000", "+20.00", "0 of 2")
        assert by_router["least_tokens"] == ("0.8725", "-0.0225", "-5.00", "1 of 2")
