"""The real benchmark of promises: its load, its systems, what runs beside it, and its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.benchmarks.experiments.promises import MARGINS, NONE
from sluice.benchmarks.live import promises as promises_real
from sluice.benchmarks.live.client import End, Outcome
from sluice.benchmarks.live.promises import (
    ALL,
    CLASSES,
    cells,
    lateness,
    tables,
)
from sluice.benchmarks.live.report import Run, Usage, interval
from sluice.benchmarks.live.systems import Bench, sums
from sluice.controller.config import ControllerConfig
from sluice.deploy.config import SluiceConfig
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.request.objective import SLO


@pytest.mark.parametrize("factor", [0.5, 1.05, 2.0])
def test_without_margins_what_is_late_teaches_nothing(factor: float) -> None:
    calibration = Calibration(promises_real.CONTROLLERS[NONE].promise_level)
    slo = CLASSES["chat"].objective("chat")
    ttft_s, tpot_s, _ = slo.times_s
    assert ttft_s is not None and tpot_s is not None
    for number in range(500):
        assert calibration.plan(slo, float(number), f"r{number % 2}") == slo
        calibration.promised(number, slo, slo, f"r{number % 2}")
        # One in ten is punctual.
        late = 1.0 if number % 10 == 0 else factor
        calibration.behind(number, None, tpot_s * late, number + 0.1)
        calibration.ended(number, ttft_s * late, tpot_s * late, None, number + 0.2)
    assert not calibration.apart


def test_the_command_line_leaves_ray_for_after_its_settings() -> None:
    code = "import sys, sluice.benchmarks.cli; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_two_replicas_of_the_local_model_serve_the_classes(tmp_path: Path) -> None:
    bench = Bench({}, tmp_path, print, threading.Event(), 0.0)
    config = SluiceConfig.model_validate(promises_real.make_config(MARGINS, bench, 8_000))
    assert config.replica.count == 2 and config.router.default_class == "chat"
    assert config.controller == ControllerConfig() == promises_real.CONTROLLERS[MARGINS]


def test_the_busy_loop_is_pinned_and_of_this_session() -> None:
    with promises_real.busy_loop(0.0) as loop:
        assert loop.nice() == os.nice(0)
        assert len(loop.cpu_affinity()) == 1
        assert os.getsid(loop.pid) == os.getsid(0)
    assert not loop.is_running()


def test_the_sum_of_a_metric_is_over_all_other_labels() -> None:
    page = (
        "# TYPE sluice_promises_total counter\n"
        'sluice_promises_total{class="chat",outcome="kept"} 7.0\n'
        'sluice_promises_total{class="code",outcome="kept"} 2.0\n'
        'sluice_promises_total{class="chat",model="m",outcome="missed"} 1.0\n'
        'sluice_promises_missed_total{class="chat",objective="ttft"} 1.0\n'
    )
    assert sums(page, outcome="kept")["sluice_promises_total"] == 9
    assert sums(page, outcome="missed")["sluice_promises_total"] == 1


def outcome(sent_s: float, ttft_s: float, tpot_s: float, admission: str = "guaranteed") -> Outcome:
    slo = SLO(ttft_s=0.5, tpot_s=0.1, service_class="chat")
    return Outcome(slo, 10, 11, sent_s, 0.0, End.ANSWERED, "", 1.0, admission, ttft_s, tpot_s)


def seen() -> list[Outcome]:
    lost = outcome(8.0, 0.1, 0.1)
    lost.end = End.CUT
    return [
        outcome(1.0, 0.5, 0.1),
        outcome(2.0, 1.25, 0.1),
        outcome(6.0, 0.1, 0.12),
        lost,
        outcome(7.0, 0.1, 0.1, "best-effort"),
        outcome(7.0, 9.0, 0.1, "best-effort"),
    ]


def run(system: str, machine: str, load: float, found: list[Outcome], seed: int = 1) -> Run:
    counted = {"missed": sum(each.admission == "guaranteed" for each in found)}
    labels = {"system": system, "machine": machine, "load": load, "seed": seed}
    others = 0.1 * seed / (psutil.cpu_count() or 1)
    return Run(labels, 10.0, found, Usage({}, others), counted)


def test_figures_are_those_of_the_promised_requests() -> None:
    found, _ = cells([run(NONE, "quiet", 0.7, seen())])
    assert (found["sent"], found["attained"], found["cut"]) == (6, round(2 / 6, 4), 1)
    assert (found["guaranteed"], found["kept"], found["kept_by_router"]) == (4, 0.25, 0.0)


def test_lateness_is_of_first_tokens() -> None:
    # A first token 0.75 s late, of an objective of 0.5 s.
    assert lateness(seen()[:4]) == [1.5] * 2


def test_cells_sum_up_seeds_and_then_loads() -> None:
    runs = [
        run(system, machine, load, seen(), seed)
        for system in (NONE, MARGINS)
        for machine in ("quiet", "busy")
        for load in (0.7, 1.4)
        for seed in (1, 2)
    ]
    found = cells(runs)
    assert len(found) == 2 * (2 + 1) * 2
    one = found[0]
    assert (one["machine"], one["load"], one["system"], one["rounds"]) == ("quiet", 0.7, NONE, 2)
    assert (one["guaranteed"], one["kept"], one["goodput"]) == (8, 0.25, 0.1)
    assert one["late"] == [1.5] * 2
    assert one["others_cores"] == 0.2
    every = [cell for cell in found if cell["load"] == ALL]
    assert [cell["guaranteed"] for cell in every] == [16] * 4


def test_tables_show_every_cell_also_one_without_promises_or_misses() -> None:
    nothing, good = [outcome(7.0, 0.1, 0.1, "best-effort")], [outcome(7.0, 0.1, 0.1)]
    runs = [run(NONE, "quiet", 0.7, nothing), run(MARGINS, "quiet", 0.7, good)]
    found = cells(runs)
    assert found[0]["kept"] is None and found[0]["late"] == [0.0] * 2
    assert {table.row_count for table in tables(found, 1.5)} == {4}
    assert json.loads(json.dumps(found)) == found


@given(count=st.integers(0, 500), missed=st.integers(0, 500))
def test_an_interval_holds_its_share_and_narrows(count: int, missed: int) -> None:
    total = count + missed
    found, more = interval(count, total), interval(4 * count, 4 * total)
    if found is None or more is None:
        assert total == 0
        return
    share = count / total
    assert 0.0 <= found[0] <= share + 1e-4 and share - 1e-4 <= found[1] <= 1.0
    assert more[1] - more[0] <= found[1] - found[0] + 1e-4


def test_a_known_interval() -> None:
    # Newcombe 1998, table I, example 81/263: 0.2553 to 0.3662.
    assert interval(81, 263) == pytest.approx([0.2553, 0.3662], abs=1e-4)
