"""The simulator has the steps of an H100: the figures of stock vLLM there follow."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from .recorded import RECORDED, simulated


def assert_alike(found: Mapping[str, float], known: Mapping[str, float]) -> None:
    assert found["sent"] == known["sent"]
    assert found["attained"] == pytest.approx(known["attained"], abs=0.05)
    for name in ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95"):
        assert found[name] == pytest.approx(known[name], rel=0.15)


@pytest.mark.parametrize("load", RECORDED)
def test_the_simulator_gives_the_times_that_were_recorded(load: float) -> None:
    assert_alike(simulated(load), RECORDED[load])
