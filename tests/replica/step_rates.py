"""What Sluice's scheduler costs of vLLM's steps, with and without asynchronous scheduling.

Run with ``python -m tests.replica.step_rates [--rounds 7] [--requests 64] [--step-ms 10]``. One
engine core runs the same requests in turns under vLLM's own scheduler and under Sluice's: with a
small model on this machine's CPU (``model``), one batch at a time, and on a device whose every step
takes ``--step-ms`` (``device``), one batch at a time and two in flight; it computes nothing, so
this shows what the engine's loop can hide. In a round all requests decode together. Printed are
medians of the steps per second, of the loop's processor time per step, and of the ratios within a
round."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from sluice.benchmarks.live.report import table
from sluice.benchmarks.options import number_option, show
from sluice.replica.vllm.local_model import local_model
from sluice.scheduling.latency.model import LinearLatency
from sluice.simulation.engine import Launches

from . import in_process  # noqa: F401  # isort: skip  # it sets what vLLM reads on import
from sluice.benchmarks.live.step_rates import Core, Counting, compare  # isort: skip

from .gpu_device import Device  # isort: skip
from .timed_device import TimedDevice, Times  # isort: skip


class NotingDevice(TimedDevice):
    """Takes the same time for each batch, and notes sequences and tokens of each in ``ran``."""

    ran: list[tuple[int, int]]

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        self.ran.append((len(output.num_scheduled_tokens), output.total_num_scheduled_tokens))
        return super().execute_model(output, non_block)


class PipelinedDevice(NotingDevice):
    """Has the next batch ready while it computes one."""


@click.command()
@number_option("--rounds", default=7, least=1, most=100, words="Rounds of each system.")
@number_option("--requests", default=64, least=1, most=256, words="Requests of a round.")
@number_option("--step-ms", default=10, least=1, most=1000, words="Of the device, milliseconds.")
@click.option("--policy", default="deadline_triage", show_default=True, help="Sluice's policy.")
def main(rounds: int, requests: int, step_ms: int, policy: str) -> None:
    """Compare the rates of steps."""
    steps, in_no_time = LinearLatency(step_ms / 1e3, 0.0), Launches(0.0, 0.0, 0.0)
    NotingDevice.times = Times(Device(steps, in_no_time), 1.0, asynchronous=False)
    PipelinedDevice.times = NotingDevice.times._replace(asynchronous=True)
    kinds = {
        "model": Counting,
        "device": NotingDevice,
        "device, asynchronous": PipelinedDevice,
    }
    args = {
        **{"enforce-eager": True, "max-model-len": 256, "max-num-batched-tokens": 2048},
        **{"max-num-seqs": 256, "kv-cache-memory-bytes": 256 << 20, "block-size": 32},
        "dtype": "float32",
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = local_model(directory / "model", layers=4, hidden=512)
        for runs_on, kind in kinds.items():
            core = Core(model, directory, kind, policy, args)
            rows.append({"runs on": runs_on, **compare(core, rounds, requests)})
            core.core.shutdown()
    show(rows, [table(rows, *rows[0], title="")], False)


if __name__ == "__main__":
    main()
