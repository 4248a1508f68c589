"""Experiments: their machinery, and what they make of their rows, by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from math import nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.benchmarks.experiments import EXPERIMENTS, autoscaling, consent, disaggregation, quotes
from sluice.benchmarks.experiments.autoscaling import (
    OURS,
    Scaling,
    changing,
    peak_load,
    surges,
)
from sluice.benchmarks.experiments.default_policy import AGAINST, EXPERIMENT
from sluice.benchmarks.experiments.disaggregation import (
    RATIO,
    demand_of,
    of_scenario,
    split_in,
)
from sluice.benchmarks.experiments.fairbatching import peaks
from sluice.benchmarks.experiments.flowprefill import bounded, mix, setup_of, tightest
from sluice.benchmarks.experiments.grid import (
    Cell,
    Pivot,
    Plan,
    Product,
    Row,
    Scaled,
    difference,
    grouped,
    having,
    measured,
)
from sluice.benchmarks.experiments.loads import (
    GENERATED,
    Conditions,
    Search,
    Span,
    Sweep,
    at_load,
    fitted,
    full_load_rate,
    measure,
    profiled_budget,
    recorded,
)
from sluice.benchmarks.experiments.promises import (
    AGAIN,
    GONE,
    MARGINS,
    NONE,
    NOT_RESERVED,
    ORACLE,
    WRONG,
    Wrong,
    costs,
    counts,
    moments,
    retry_counts,
    sums_of,
    targets,
)
from sluice.benchmarks.experiments.proserve import time_line
from sluice.benchmarks.experiments.routers import against_rivals
from sluice.benchmarks.experiments.slos_serve import over_one
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
    figures,
    local_policy,
    make_router,
    run,
    run_cluster,
)
from sluice.benchmarks.report import Estimate, Report, Table
from sluice.scheduling.batching.slidebatching import SlideBatchingOptions
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.objective import SLO
from sluice.simulation.engine import Truth
from sluice.simulation.requests import Requests, Retry
from sluice.simulation.run import simulate
from sluice.simulation.traces import TraceError
from sluice.simulation.workload import Arrival, Workload
from tests.simulation.loads import MODEL, batch, workload

QUICK = Plan("quick", (7,))


def product(factor: float, seed: int) -> Mapping[str, float]:
    """A figure that can be checked: in a module, so that it reaches other processes."""
    if factor < 0:
        raise ValueError("factor must be positive")
    return {"product": factor * seed}


def sized(seed: int, factor: float, more: float, scale: float) -> Mapping[str, float]:
    """A figure of two axes and a fixed argument."""
    return {"product": factor * scale * seed + more}


def grid(*factors: float) -> list[Cell]:
    return [Cell({"factor": factor}, partial(product, factor)) for factor in factors]


class TestEstimate:
    def test_is_a_t_interval(self) -> None:
        # Mean 3, standard deviation sqrt(2.5), t of 4 degrees of freedom 2.776.
        found = Estimate.of([1.0, 2.0, 3.0, 4.0, 5.0])
        assert found.mean == 3.0
        assert found.half_width == pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5))
        assert found.shown(2) == "3.00 ± 1.96"

    def test_covers_the_true_mean_as_often_as_it_says(self) -> None:
        rng = np.random.default_rng(1)
        samples = rng.normal(5.0, 2.0, (2_000, 4))
        found = [Estimate.of(list(sample)) for sample in samples]
        covered = np.mean([abs(one.mean - 5.0) <= one.half_width for one in found])
        assert 0.935 < covered < 0.965

    def test_one_seed_has_no_range_and_none_has_nothing(self) -> None:
        assert Estimate.of([0.5]).shown() == "0.500"
        assert Estimate.of([]).shown() == "-"
        assert Estimate.of([math.nan, 2.0]).seeds == 1


class TestRows:
    def test_come_in_order_with_labels_and_seed(self) -> None:
        rows = list(measured(grid(2.0, 3.0), (1, 2), jobs=1))
        assert [row["product"] for row in rows] == [2.0, 4.0, 3.0, 6.0]
        assert rows[0] == {"factor": 2.0, "seed": 1, "product": 2.0}

    def test_are_the_same_from_several_processes(self) -> None:
        cells = grid(*map(float, range(9)))
        assert list(measured(cells, (1, 2), jobs=2)) == list(measured(cells, (1, 2), jobs=1))

    def test_a_failing_cell_is_named(self) -> None:
        with pytest.raises(ValueError, match="positive") as caught:
            list(measured(grid(-1.0), (5,), jobs=1))
        assert any("factor -1.0, seed 5" in note for note in caught.value.__notes__)

    def test_a_difference_is_paired_by_seed(self) -> None:
        rows = list(measured(grid(2.0, 3.0), (1, 2, 3), jobs=1))
        parts = grouped(rows, "factor")
        found = difference(parts[(3.0,)], parts[(2.0,)], "product")
        # 3 s - 2 s over the seeds s: 1, 2, 3.
        assert found == Estimate.of([1.0, 2.0, 3.0])

    def test_a_pivot_has_a_line_and_a_column_per_label(self) -> None:
        rows = [
            {"policy": policy, "load": load, "seed": 1, "x": load * 2}
            for policy in ("a", "b")
            for load in (0.5, 1.0)
        ]
        table = Pivot("title", "x", ("policy",), digits=1)(rows)
        assert table.columns == ("policy", "0.5", "1")
        assert table.rows == [("a", "1.0", "2.0"), ("b", "1.0", "2.0")]


class TestGrids:
    def test_a_product_has_every_combination_with_its_labels(self) -> None:
        axes = {"factor": {"two": 2.0, "three": 3.0}, "more": Scaled((0,), (0, 1))}
        product_of = Product(sized, axes, {"scale": Scaled(1.0, 10.0)}, {"part": "x"})
        (first, *_) = product_of.cells(QUICK)
        assert first.labels == {"factor": "two", "more": 0, "part": "x"}
        assert first.measure(7) == {"product": 14.0}
        normal = product_of.cells(Plan("normal", (7,)))
        assert [cell.labels["more"] for cell in normal] == [0, 1, 0, 1]
        assert normal[-1].measure(7) == {"product": 211.0}

    def test_full_is_as_normal_where_nothing_else_is_said(self) -> None:
        full = Plan("full", (1,))
        assert (full.of(Scaled(1, 2)), full.of(Scaled(1, 2, 3)), full.of(4)) == (2, 3, 4)

    def test_alternatives_of_a_label_are_in_a_tuple(self) -> None:
        rows: list[Row] = [{"load": load} for load in (1.0, 2.0, 3.0)]
        assert having(rows, {"load": (1.0, 3.0)}) == [rows[0], rows[2]]


GREATEST = Search("")
MIN_LOAD, MAX_LOAD = GREATEST.least, GREATEST.most


class TestCapacity:
    @given(knee=st.floats(MIN_LOAD * 1.001, MAX_LOAD * 0.999))
    def test_is_found_within_its_resolution(self, knee: float) -> None:
        found = GREATEST.loads(lambda load: 1.0 if load <= knee else 0.0)[0.9]
        step = (MAX_LOAD / MIN_LOAD) ** (2**-7) * 1.000001
        assert knee / step < found < knee * step

    def test_has_its_ends(self) -> None:
        assert GREATEST.loads(lambda load: 1.0)[0.9] == MAX_LOAD
        assert GREATEST.loads(lambda load: 0.0)[0.9] == 0.0

    def test_a_stricter_share_has_no_more_of_it(self) -> None:
        found = Search("", (0.9, 0.98)).loads(lambda load: max(0.0, 1 - load / 10))
        assert found[0.98] == pytest.approx(0.2, rel=0.005)
        assert found[0.9] == pytest.approx(1.0, rel=0.005)

    def test_the_ends_run_only_if_they_are_needed(self) -> None:
        ran: list[float] = []

        def attainment(load: float) -> float:
            ran.append(load)
            return float(load <= 1)

        Search("", (0.9, 0.98), steps=3).loads(attainment)
        assert len(ran) == len(set(ran)) == 3


class TestLoads:
    def test_full_load_is_where_paced_steps_are_full(self) -> None:
        setup = SETUPS["8b"]
        slo = SLO(ttft_s=1.0, tpot_s=0.1)

        def make(setup: object, rate: float, requests: int, seed: int) -> Workload:
            arrivals = tuple(Arrival(at / rate, 1_000, 101, slo) for at in range(requests))
            return Workload("alike", arrivals)

        model = setup.truth
        work_s = model.work_s(1_000, 0) + 101 * model.work_s(1, 1_050)
        expected = (1 - model.fixed_s / 0.1) / work_s
        assert full_load_rate(make, setup) == pytest.approx(expected)

    def test_little_kv_lowers_it(self) -> None:
        make = GENERATED["proserve sharegpt"]
        assert full_load_rate(make, SETUPS["8b-short"]) < full_load_rate(make, SETUPS["8b"])

    def test_a_span_is_bounded(self) -> None:
        span = Span(10.0, 5, 100)
        assert [span.requests(rate) for rate in (0.1, 2.0, 50.0)] == [5, 20, 100]

    @pytest.mark.parametrize("name", SETUPS)
    def test_a_profiled_budget_fits_the_objective(self, name: str) -> None:
        setup = SETUPS[name]
        budget = profiled_budget(setup, 0.08)
        step_s = setup.truth.fixed_s + setup.truth.work_s(budget, 0)
        assert step_s <= 0.08
        assert budget == 2_048 or step_s + 2 * setup.truth.work_s(1, budget) > 0.08

    @pytest.mark.parametrize("scaling", ["stretched", "thinned"])
    def test_a_trace_runs_at_the_wanted_rate(self, tmp_path: Path, scaling: str) -> None:
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        lines += [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0,{100 + i % 7},20" for i in range(900)]
        (tmp_path / "azure.csv").write_text("\n".join(lines))
        make = recorded(tmp_path)[f"azure ({scaling})"]
        workload = make(SETUPS["8b"], 0.5, 200, 3)
        assert workload.rate == pytest.approx(0.5)
        assert len(workload) == pytest.approx(200, abs=40)
        assert "stretched" in workload.scaling
        assert ("thinned" in workload.scaling) == (scaling == "thinned")
        assert {arrival.slo.priority for arrival in workload.arrivals} == {1, 2}

    def test_a_folder_without_traces_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"no \.csv or \.jsonl"):
            recorded(tmp_path)


class TestEngineRuns:
    def test_an_idle_engine_attains_everything(self) -> None:
        slo = SLO(ttft_s=1.0, tpot_s=0.1)
        arrivals = tuple(Arrival(10.0 * i, 100, 10, slo) for i in range(5))
        for policy in ("fcfs", "deadline_triage"):
            served = run(Workload("idle", arrivals), Contender("", policy), SETUPS["8b"], 1)
            found = figures(served)
            assert found["attainment_mean"] == found["attainment_window"] == found["tdg"] == 1.0
            # One step of 100 prompt tokens: 9 ms + 100 * 80 us, with 3 % noise.
            assert found["ttft_p50_s"] == pytest.approx(0.017, rel=0.1)

    def test_a_time_line_counts_who_waits_and_what_is_gained(self) -> None:
        idle = time_line(1, DEFAULT, 0.2, Span(5.0, 10, 10))
        assert {name.split()[1] for name in idle} == {str(part) for part in range(10)}
        assert all(idle[f"late {part}"] == 0 for part in range(10))
        busy = time_line(1, Contender("edf", "edf"), 3.0, Span(5.0, 100, 100))
        sums = [
            sum(found[f"{figure} {part}"] for part in range(10))
            for figure in ("urgent", "late")
            for found in (idle, busy)
        ]
        assert sums[0] < sums[1]
        assert sums[2] < sums[3]
        assert 0 < sum(busy[f"gain {part}"] for part in range(10)) / 10 < 1

    def test_first_tokens_weigh_what_they_do_in_the_tdg_of_the_data_set(self) -> None:
        slo = SLO(ttft_s=1.0, tpot_s=0.1)
        workload = Workload("two", (Arrival(0.0, 100, 10, slo), Arrival(1.0, 500, 30, slo)))
        for options, weight in (({}, 300 / 20), ({"first_weight": 2.0}, 2.0)):
            policy = local_policy(Contender("", "slidebatching", options), workload, "prefill")
            assert policy.options == SlideBatchingOptions(boundary="phi_p", first_weight=weight)
        assert local_policy(DEFAULT, workload).name == "deadline_triage"

    def test_a_budget_refuses_what_it_cannot_hold_and_counts_it_as_missed(self) -> None:
        slo = SLO(ttft_s=0.5, tpot_s=0.1)
        # Two prompts of 0.32 s each at once: only the first can be in time.
        arrivals = (Arrival(0.0, 4_000, 5, slo), Arrival(0.0, 4_000, 5, slo))
        contender = Contender("", "fairbatching", rejecting=True)
        served = run(Workload("two", arrivals), contender, SETUPS["8b"], 1)
        assert served.refused == {1}
        found = figures(served)
        assert found["attainment_mean"] == 0.5
        assert found["refused"] == 0.5
        assert found["ttft_p99_s"] < 0.5
        assert not served.result.requests.failures


def outcome(policy: str, seed: int, value: float, load: float = 1.0) -> Row:
    names = ("attainment_mean", "attainment_running_max", "tdg")
    labels: Row = {"workload": "w", "setup": "s", "load": load, "policy": policy, "seed": seed}
    return {**labels, **dict.fromkeys(names, value), "longest_wait_s": 1.0}


class TestDefaultPolicy:
    def test_the_headline_counts_misses_and_cells(self) -> None:
        rows = [
            *(outcome(DEFAULT.policy, seed, 0.9) for seed in (1, 2)),
            *(outcome("edf", seed, 0.8) for seed in (1, 2)),
            *(outcome("fcfs", seed, 0.6) for seed in (1, 2)),
            *(outcome(DEFAULT.policy, seed, 0.7, 2.0) for seed in (1, 2)),
            *(outcome("edf", seed, 0.4, 2.0) for seed in (1, 2)),
            *(outcome("fcfs", seed, 0.75, 2.0) for seed in (1, 2)),
            *(outcome(DEFAULT.policy, seed, met, 3.0) for seed, met in ((1, 0.7), (2, 0.8))),
            *(outcome("edf", seed, 0.4, 3.0) for seed in (1, 2)),
            *(outcome("fcfs", seed, met, 3.0) for seed, met in ((1, 0.9), (2, 0.7))),
        ]
        assert AGAINST.best(rows, "tdg") == "fcfs"
        headline = EXPERIMENT.findings(rows)[1].rows[0]
        assert headline[1:] == (
            "fcfs",
            "21.67 %",
            "28.33 %",
            "-24 %",
            "-5.00",
            "-5.00",
            "2 of 3",
            "1",
        )

    def test_the_best_of_a_cell_is_chosen_on_other_seeds(self) -> None:
        shares = {DEFAULT.policy: (0.8, 0.8), "edf": (0.9, 0.5), "fcfs": (0.4, 0.7)}
        rows = [
            outcome(policy, seed, met)
            for policy, both in shares.items()
            for seed, met in enumerate(both)
        ]
        lead = AGAINST.lead_over_best(rows, "tdg")
        assert lead.mean == pytest.approx(((0.8 - 0.4) + (0.8 - 0.5)) / 2)
        alone = [row for row in rows if row["seed"] == 0]
        assert AGAINST.lead_over_best(alone, "tdg").mean == pytest.approx(0.8 - 0.9)


def test_a_peak_is_that_of_the_best_tuned_variant() -> None:
    rows: list[Row] = [
        {"policy": policy, "seed": 1, "rate": rate, "attainment_running_max": met}
        for policy, rate, met in (
            ("a", 1.0, 1.0),
            ("a", 4.0, 0.5),
            ("b", 1.0, 1.0),
            ("b", 3.0, 0.9),
        )
    ]
    assert peaks(rows, ("a",)) == {1: 2.0}
    assert peaks(rows, ("a", "b")) == {1: pytest.approx(2.7)}


REPORT = Report(
    "some",
    "a paper",
    "Does it work?",
    "TPOT: mean.",
    "a method",
    "sluice bench some",
    [Table("A table", ("policy", "share"), [("edf", "0.5")], "A note.")],
    [{"policy": "edf", "seed": 1, "share": 0.5, "unknown": math.nan}],
)


class TestReport:
    def test_json_has_every_row_and_no_number_that_json_lacks(self) -> None:
        written = json.loads(REPORT.as_json())
        assert written["rows"] == [{"policy": "edf", "seed": 1, "share": 0.5, "unknown": None}]
        assert written["command"] == "sluice bench some"
        assert written["setting"] == "TPOT: mean."


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_cells_of_every_experiment_are_named_apart(name: str) -> None:
    cells = EXPERIMENTS[name].cells(QUICK)
    assert len({tuple(cell.labels.items()) for cell in cells}) == len(cells) > 1


LONG = {
    *("admission", "autoscaling", "controller_cells", "default_policy", "disaggregation"),
    *("disaggregation_ratio", "elastic_roles", "fairbatching_breakdown"),
    *("flowprefill_settings", "flowprefill_systems", "migration", "promises"),
    *("proserve_policies", "retry_after", "routers", "routers_disaggregated"),
    *("simulator_speed", "slos_serve_capacity", "slos_serve_reasoning", "slos_serve_scaling"),
    *("speculation_lengths", "stale_mirror"),
}
"""They take about a second or more each, and are run before a release."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.release if n in LONG else ()) for n in EXPERIMENTS]
)
def test_every_experiment_runs_and_repeats_itself(name: str) -> None:
    experiment = EXPERIMENTS[name]
    cells = experiment.cells(QUICK)
    rows = list(measured(cells, QUICK.seeds, jobs=1))
    tables = experiment.findings(rows)
    assert tables
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
    (again,) = measured(cells[-1:], QUICK.seeds, jobs=1)
    # How long a decision or a run took is read from the clock.
    for row in (again, rows[-1]):
        row.pop("decide_ms", None)
        row.pop("batches_per_minute", None)
        row.pop("hours_per_day", None)
    assert again == rows[-1]


@pytest.mark.parametrize(("one", "times"), [(2.0, 6.0), (0.0, math.nan)])
def test_capacity_over_that_of_one_replica_is_unknown_where_one_has_none(
    one: float, times: float
) -> None:
    labels = {"scenario": "coder", "policy": "fcfs", "router": "round_robin", "seed": 1}
    rows: list[Row] = [
        {**labels, "replicas": 1, "rate_0.9": one},
        {**labels, "replicas": 4, "rate_0.9": 3.0},
    ]
    found = [float(row["times"]) for row in over_one(rows)]
    assert found == pytest.approx([times / times, times], nan_ok=True)


SETUP = SETUPS["8b"]
AZURE = GENERATED["proserve azure"]


def routed(router: str, value: float, load: float = 1.0, seed: int = 1) -> Row:
    return {"load": load, "router": router, "seed": seed, "attainment_mean": value, "tdg": value}


def spread(count: int, gap_s: float, slo: SLO) -> Workload:
    return Workload("spread", tuple(Arrival(gap_s * i, 100, 10, slo) for i in range(count)))


class TestLayouts:
    def test_load_one_is_what_all_replicas_serve_together(self) -> None:
        one = full_load_rate(AZURE, SETUP)
        assert Conditions(AZURE, SETUP, colocated(4)).full_rate == pytest.approx(4 * one)
        assert Conditions(AZURE, SETUP, disaggregated(4)).full_rate == pytest.approx(4 * one)

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
        assert found["attainment_mean"] == found["tdg"] == 1.0
        assert found["refused"] == 0

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
        routed(ROUTER, 0.9),
        routed("round_robin", 0.5),
        routed("least_tokens", 0.95),
        routed(ROUTER, 0.8, 2.0),
        routed("round_robin", 0.6, 2.0),
        routed("least_tokens", 0.795, 2.0),
    )

    def test_the_default_is_held_against_each_router(self) -> None:
        lines = against_rivals(self.ROWS, ("load",)).rows
        assert lines[0][2] == "0.8500"
        by_router = {line[1]: line[2:] for line in lines[1 : len(lines) // 2]}
        assert by_router["round_robin"] == ("0.5500", "0.3000", "+20.00", "0 of 2")
        assert by_router["least_tokens"] == ("0.8725", "-0.0225", "-5.00", "1 of 2")


CHAT_RATE = full_load_rate(GENERATED["proserve sharegpt"], autoscaling.SETUP)


def at(*times_s: float) -> Workload:
    return Workload("times", tuple(Arrival(time_s, 10, 2, SLO(ttft_s=1.0)) for time_s in times_s))


def test_the_peak_is_the_largest_rate_over_a_while() -> None:
    workload = at(0.0, 10.0, 10.5, 11.0, 11.9, 40.0)
    assert peak_load(workload, full_rate=1.0, over_s=2.0) == 4 / 2.0
    assert peak_load(workload, full_rate=2.0, over_s=100.0) == pytest.approx(6 / 100 / 2)


def test_the_changing_mix_has_its_load_and_two_kinds_of_objectives() -> None:
    workload = changing(600.0, autoscaling.SETUP, 2.0 * CHAT_RATE, round(2.0 * CHAT_RATE * 600), 1)
    assert workload.duration_s == pytest.approx(600.0, rel=0.1)
    assert {arrival.slo.ttft_s for arrival in workload.arrivals} == {0.8, 4.0}
    documents = [a.arrival_s for a in workload.arrivals if a.slo.ttft_s == 4.0]
    chats = [a.arrival_s for a in workload.arrivals if a.slo.ttft_s == 0.8]
    night = sum(time_s < 150 for time_s in documents) / len(documents)
    day = sum(time_s < 150 for time_s in chats) / len(chats)
    assert night > 0.3 > 0.15 > day


def test_a_fixed_pool_and_one_that_scales_serve_the_same_requests() -> None:
    fixed = autoscaling.measure(1, (surges, CHAT_RATE), Scaling(peak=True), 1.0, 30.0)
    scaled = autoscaling.measure(1, (surges, CHAT_RATE), OURS, 1.0, 30.0)
    assert fixed["changes"] == 0
    assert fixed["rate"] == scaled["rate"]
    assert fixed["replica_hours"] >= fixed["most_replicas"] * 25 / 3600
    assert 0 < scaled["attainment_mean"] <= 1


def row(workload: str, layout: str, rate: float) -> Row:
    return {"workload": workload, "policy": "p", "layout": layout, "seed": 1, "rate_0.9": rate}


def test_layouts_are_named_by_their_roles() -> None:
    assert split_in(2, 1).name == "2P 1D"
    mixed = split_in(2, 1, mixed=3)
    assert (mixed.name, mixed.size) == ("3 both + 2P 1D", 6)
    assert mixed.cluster.counts == {"mixed": 3, "prefill": 2, "decode": 1}


def test_capacity_is_over_that_of_an_even_split_with_the_formula_beside_it() -> None:
    layouts = {"1P 1D": 4.0, "2P 1D": 5.0, "1P 2D": 3.0, "co-located": 8.0}
    rows = [row("coder", layout, rate) for layout, rate in layouts.items()]
    relative, rates, formula = RATIO.findings(rows)
    assert relative.rows == [("coder", "p", "1.00", "1.25", "0.75", "2.00")]
    assert rates.rows == [("coder", "p", "4.00", "5.00", "3.00", "8.00")]
    # Prefill decides: of 3 devices two serve twice, or one as much, as one of 2 does.
    (line,) = formula.rows
    assert line[2:] == ("1.00", "1.33", "0.67", "2P 1D")


def test_the_formula_puts_the_papers_workloads_far_apart() -> None:
    chat, coder, reasoning = map(demand_of, ("chatbot", "coder", "reasoning"))
    assert coder.ratio > 5 * chat.ratio > 50 * reasoning.ratio
    assert chat.split(8) == (4, 4)
    assert coder.split(8) == (7, 1)
    assert reasoning.split(8) == (1, 7)
    # Its ideal replicas waste the fixed part of steps on neither side, as those of load 1.
    assert chat.best_goodput == pytest.approx(
        full_load_rate(of_scenario("chatbot"), disaggregation.SETUP), rel=0.1
    )


LASTING = Span(40.0, 40, 120)
PREFILLER = setup_of("8b")


def test_the_goodput_and_the_tightest_objectives_are_at_90_percent() -> None:
    ours = bounded("ours")
    case = Conditions(mix(1.0), PREFILLER)
    search = Search("attainment_mean")
    rate = at_load(ours, 1, case, case.full_rate, search, LASTING)["rate_0.9"]
    assert measure(ours, 1, case, rate, LASTING.requests(rate))["attainment_mean"] >= 0.9
    scale = tightest(1, ours, PREFILLER, 0.5, LASTING)["tightest"]
    assert 0.25 <= scale < 1.0


def rows_of(load: float, **kept: tuple[int, int]) -> list[Row]:
    """Rows of one cell: promised and kept of 1,000 requests, by system."""
    model = {ORACLE: "-"}
    return [
        {
            "workload": "chat",
            "setup": "8b",
            "load": load,
            "model": model.get(system, "all x 1.3"),
            "system": system,
            "seed": seed,
            "requests": 1_000.0,
            "promised": float(promised),
            "kept": float(count),
            "attained": float(count),
        }
        for system, (promised, count) in (
            (ORACLE, kept["oracle"]),
            (NONE, kept["none"]),
            (MARGINS, kept["margins"]),
        )
        for seed in (1, 2)
    ]


def verdicts(rows: list[Row]) -> list[str]:
    return [line[-1] for line in targets(sums_of(rows)).rows]


def test_targets_hold_where_enough_is_kept_and_no_goodput_is_lost() -> None:
    good = rows_of(0.9, oracle=(950, 950), none=(900, 850), margins=(880, 875))
    assert verdicts(good) == ["yes"] * 4


def test_each_target_fails_by_itself() -> None:
    missed = rows_of(0.9, oracle=(950, 950), none=(900, 850), margins=(900, 875))
    assert verdicts(missed) == ["NO", "yes", "yes", "yes"]
    good = rows_of(0.9, oracle=(950, 950), none=(900, 850), margins=(880, 875))
    loses = rows_of(1.3, oracle=(850, 850), none=(850, 850), margins=(824, 824))
    assert verdicts(good + loses) == ["yes", "NO", "yes", "NO"]
    far = rows_of(0.9, oracle=(990, 990), none=(850, 850), margins=(880, 880))
    assert verdicts(far) == ["yes", "yes", "NO", "yes"]


def test_cells_of_few_promises_say_nothing_of_the_share_kept() -> None:
    few = rows_of(0.9, oracle=(50, 50), none=(60, 48), margins=(60, 50))
    assert len(verdicts(few)) == 3


def test_a_wrong_model_believes_less_than_is_true_by_its_factors() -> None:
    true = LinearLatency(a=0.009, b=9e-5, c=9e-8)
    assert Wrong(1.5, 3.0).believed(true).coefficients == pytest.approx((0.006, 3e-5, 3e-8, 0.0))
    for wrong in WRONG.values():
        assert wrong.believed(true).fixed_s * wrong.fixed == pytest.approx(true.fixed_s)


def test_what_is_kept_is_counted() -> None:
    slo = SLO(ttft_s=0.02, tpot_s=0.004, e2e_s=10.0)
    load = workload((0.0, 10, 1), (5.0, 10, 5), (9.0, 3_000, 1), slo=slo)
    result = simulate(load, batch("fcfs")("mixed"), Truth(MODEL, 0.0))
    result.requests.promised_s[:] = [0.01, 0.01, 0.01]
    found = counts(result)
    # The second is off its pace, and the third one's first token is late.
    assert found["promised"] == 3 and found["kept"] == found["attained"] == 1
    assert found["late_p95"] > 1
    result.requests.promised_s[1:] = np.nan
    found = counts(result)
    assert found["promised"] == found["kept"] == 1
    assert found["late_p95"] == 0


def four_served() -> Requests:
    """Four requests, the last of which is late; all are promised but the first."""
    load = workload(
        (0.0, 10, 1), (4.0, 10, 1), (13.0, 10, 1), (19.0, 3_000, 1), slo=SLO(ttft_s=0.02)
    )
    requests = simulate(load, batch("fcfs")("mixed"), Truth(MODEL, 0.0)).requests
    requests.promised_s[:] = [nan, 0.01, 0.01, 0.01]
    return requests


def test_the_warm_up_and_what_comes_after_the_last_new_request_are_left_out() -> None:
    requests = four_served()
    requests.retries += [
        Retry(1, 4.0, 9.0, False),
        Retry(2, 12.0, 1.0, False),
        Retry(2, 13.0, 2.0, True),
        Retry(3, 25.0, 9.0, True),
    ]
    found = retry_counts(requests, 20.0)
    # The first third of so short a run.
    assert (found["returns"], found["held"]) == (2, 1)
    assert found["retry_after_p95"] == pytest.approx(1.95)
    assert found["promised"] == 0.75
    assert found["goodput"] == pytest.approx(1 / (20.0 - 20.0 / 3))


def of_clients(returns: float, held: float) -> list[Row]:
    figures = {"retry_after_p95": 1.0, "promised": 1.0, "goodput": 9.0}
    cell: Row = {"workload": "chat", "load": 1.2, "seed": 1}
    return [
        {**cell, "clients": AGAIN, "returns": returns, "held": held, **figures},
        {**cell, "clients": GONE, "goodput": 9.9},
        {**cell, "clients": NOT_RESERVED, "goodput": 10.0},
    ]


@pytest.mark.parametrize(
    ("returns", "held", "verdict"),
    [(100, 80, "yes"), (100, 79, "NO"), (49, 0, "-"), (0, 0, "-")],
)
def test_a_cell_holds_where_four_fifths_are_promised(
    returns: float, held: float, verdict: str
) -> None:
    assert moments(of_clients(returns, held)).rows[0][4] == verdict
    assert costs(of_clients(returns, held)).rows[0][-1] == "0.990"


def test_a_quote_counts_if_the_load_went_on_until_its_answer_had_ended() -> None:
    arrived_s = np.arange(10.0)
    ended_s = arrived_s + 2.5
    assert range(10)[quotes.counted(arrived_s, ended_s)] == range(2, 7)
    ended_s[[3, 8]] = nan  # refused
    assert range(10)[quotes.counted(arrived_s, ended_s)] == range(2, 7)
    ended_s[4] = 9.5
    assert range(10)[quotes.counted(arrived_s, ended_s)] == range(2, 4)
    assert range(10)[quotes.counted(arrived_s, arrived_s)] == range(2, 10)


def test_a_degraded_answer_counts_by_its_own_objective_and_by_the_first_one() -> None:
    span = Span(6.0, 20, 60)
    found = {
        (accepts, engines): consent.measure(1_001, 1.5, accepts, engines, span)
        for accepts, engines in (
            *((consent.NONE, 1), (consent.TIMES, 1), (consent.ALL, 1)),
            (consent.MODEL, 2),
        )
    }
    nothing, longer = found[consent.NONE, 1], found[consent.TIMES, 1]
    assert nothing["degraded"] == 0 and nothing["whole"] == nothing["in_time"]
    assert 0 < longer["degraded"] < longer["in_time"]
    assert longer["whole"] >= longer["in_time"] - longer["degraded"] - 1e-9
    of_all = found[consent.ALL, 1]
    assert of_all["degraded"] == of_all["in_time"] > of_all["whole"]
    smaller = found[consent.MODEL, 2]
    assert smaller["whole"] + smaller["degraded"] == pytest.approx(smaller["in_time"])
    assert smaller["degraded"] > 0
