"""The script for GPUs, from end to end on a CPU: real engines, a tiny model."""

import json

import pytest

from sluice.benchmarks.preemption_gpu import SIZES, measure, table, ways

pytestmark = pytest.mark.vllm


class Here:
    """An engine in this process, which has loaded vLLM already; one at a time."""

    def __init__(self, make):
        self.engine = make()

    def call(self, function, *args):
        return function(self.engine, *args)

    def close(self):
        self.engine.close()


def test_one_run_measures_everything(tmp_path):
    size = SIZES["tiny"]
    found = measure(
        size, tmp_path, rounds=1, requests=6, loads=[0.5], objectives=1.0, seed=0, host=Here
    )
    *ours, stock = found["blocking"]
    assert [row["way"] for row in ours] == [way.name for way in ways(size)]
    assert stock["tokens_s"] > 0
    for row in ours:
        assert row["tokens_s"] > 0
        assert row["short"] > 0
        # Without checks a task that is told to stop goes on to its end.
        assert row["stops"] == 0 or row["way"].startswith(("operator", "layer"))
    assert [row["prefills"] for row in found["memory"]] == [1, 2, 3]
    assert all(row["reserved"] > 0 for row in found["memory"])
    assert [row["way"] for row in found["serving"]] == [
        "operator",
        "128-token chunks",
        "stock, threshold 64",
        "stock, threshold 128",
    ]
    for row in found["serving"]:
        assert 0 <= row["attained"] <= 1
        assert row["goodput"] == pytest.approx(row["attained"] * row["rate"], abs=0.01, rel=0.01)
    rows = len(found["blocking"]) + len(found["memory"]) + len(found["serving"])
    assert table(json.loads(json.dumps(found)) | {"model": "tiny"}).row_count == rows
