"""The prefill-only instances of experiments."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from sluice.benchmarks.experiments.base import Plan
from sluice.benchmarks.experiments.flowprefill_bounds import admission_cells
from sluice.benchmarks.experiments.loads import Span
from sluice.benchmarks.experiments.prefills import (
    bounded,
    goodput,
    measure,
    mix,
    of_scale,
    setup_of,
    tightest,
    workloads,
)

LASTING = Span(40.0, 40, 120)
MAKE = partial(mix, "llama3-8b", 1.0)


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
    make = workloads("llama3-8b", 2.0, traces)["qwen (stretched)"]
    workload = make(setup_of("llama3-8b"), 3.0, 100, 5)
    assert workload.rate == pytest.approx(3.0)
    found = {(a.task, a.prompt_tokens, a.slo.ttft_s) for a in workload.arrivals}
    assert found == {
        ("text", 300, 0.5),
        ("search", 6_000, 8.0),
        ("code", 400, 0.5),
        ("code", 4_000, 8.0),
    }
    # Single turns that only prefill.
    assert all(a.output_tokens == 1 and not a.block_hashes for a in workload.arrivals)
    served = measure(make, "llama3-8b", 3.0, 100, bounded("ours"), 5)
    assert 0.8 < served["attainment_mean"] <= 1.0


def test_an_experiment_has_cells_for_each_recorded_workload(traces: Path) -> None:
    cells = admission_cells(Plan("quick", (1,), traces))
    names = {cell.labels["workload"] for cell in cells}
    assert names == {"generated", "qwen (stretched)", "qwen (thinned)"}


def test_the_goodput_and_the_tightest_objectives_are_at_90_percent() -> None:
    ours = bounded("ours")
    rate = goodput(MAKE, "llama3-8b", ours, LASTING, 1)["goodput"]
    requests = LASTING.requests(rate)
    assert measure(MAKE, "llama3-8b", rate, requests, ours, 1)["attainment_mean"] >= 0.9
    scale = tightest(of_scale("llama3-8b"), "llama3-8b", 0.5, ours, LASTING, 1)["tightest"]
    assert 0.25 <= scale < 1.0
