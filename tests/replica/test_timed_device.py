"""The device that only takes time has all of vLLM's loop run as beside one that computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.replica.vllm.local_model import local_model

from .recorded import RECORDED
from .test_recorded import assert_alike

pytestmark = pytest.mark.vllm

REQUESTS = 24


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_request_has_its_tokens_under_both_schedulers(
    tmp_path: Path, asynchronous: bool
) -> None:
    from . import in_process  # noqa: F401  # isort: skip  # it sets what vLLM reads on import
    from sluice.benchmarks.live.step_rates import Core

    from .timed_device import TimedDevice, Times

    class Quick(TimedDevice):
        times = Times(scale=0.05, asynchronous=asynchronous)

    args = {
        **{"enforce-eager": True, "max-model-len": 256, "max-num-seqs": 16, "dtype": "float32"},
        **{"max-num-batched-tokens": 64, "kv-cache-memory-bytes": 16 << 20},
    }
    core = Core(local_model(tmp_path / "model", layers=1, hidden=64), tmp_path, Quick, "fcfs", args)
    assert core.pipelined == asynchronous
    try:
        for system in core.schedulers:
            core.round(system, REQUESTS)  # it raises if a token is lost
    finally:
        core.core.shutdown()


def test_stock_vllm_beside_it_has_the_times_that_were_recorded_on_an_h100() -> None:
    from .virtual_core import VirtualCore

    core = VirtualCore()
    try:
        for load, known in RECORDED.items():
            assert_alike(core.run(load), known)
    finally:
        core.close()
