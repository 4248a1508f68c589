"""The prefill-only instances of experiments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.benchmarks.experiments.flowprefill import (
    BOUNDS,
    bounded,
    mix,
    of_traces,
    setup_of,
    tightest,
)
from sluice.benchmarks.experiments.grid import Plan
from sluice.benchmarks.experiments.loads import Conditions, Search, Span, at_load, measure

LASTING = Span(40.0, 40, 120)
SETUP = setup_of("8b")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Four tasks of the recorded kind, one of which the paper does not have."""
    lines = []
    for index in range(400):
        task, tokens = (("text", 300), ("search", 6_000), ("code", 400), ("code", 4_000))[index % 4]
        blocks = list(range(index, index + -(-tokens // 16)))
        lines.append(
            {
                "chat_id": index,
                "parent_chat_id": -1,
                "timestamp": index * 0.2,
                "input_length": tokens,
                "output_length": 50,
                "type": task,
                "turn": 1,
                "hash_ids": blocks,
            }
        )
    (tmp_path / "qwen.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def test_recorded_prompts_are_judged_by_task_or_else_by_length(traces: Path) -> None:
    make = of_traces(traces)["qwen (stretched)"]
    workload = make(SETUP, 3.0, 100, 5)
    assert workload.rate == pytest.approx(3.0)
    found = {(a.task, a.prompt_tokens, a.slo.ttft_s) for a in workload.arrivals}
    assert found == {
        ("text", 300, 0.25),
        ("search", 6_000, 4.0),
        ("code", 400, 0.25),
        ("code", 4_000, 4.0),
    }
    # Single turns that only prefill.
    assert all(a.output_tokens == 1 and not a.block_hashes for a in workload.arrivals)
    served = measure(bounded("ours"), 5, Conditions(make, SETUP), 1.5, 100)
    assert 0.8 < served["attainment_mean"] <= 1.0


def test_an_experiment_has_cells_for_each_recorded_workload(traces: Path) -> None:
    cells = BOUNDS.cells(Plan("quick", (1,), traces))
    names = {cell.labels["workload"] for cell in cells}
    assert names == {"generated", "qwen (stretched)", "qwen (thinned)"}


def test_the_goodput_and_the_tightest_objectives_are_at_90_percent() -> None:
    ours = bounded("ours")
    case = Conditions(mix(1.0), SETUP)
    search = Search("attainment_mean")
    rate = at_load(ours, 1, case, case.full_rate, search, LASTING)["rate_0.9"]
    assert measure(ours, 1, case, rate, LASTING.requests(rate))["attainment_mean"] >= 0.9
    scale = tightest(1, ours, SETUP, 0.5, LASTING)["tightest"]
    assert 0.25 <= scale < 1.0
