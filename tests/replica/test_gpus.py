"""What a replica says of its GPUs, from the driver's library to the operator's view."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sluice.controller.config import ControllerConfig
from sluice.controller.observability.metrics import samples_of
from sluice.protocol.messages import MetricsPush
from sluice.replica.gpus import GpuMonitor, GpuUse
from sluice.replica.metrics import ReplicaCollector
from sluice.replica.scheduler.state_table import StateTable
from tests.controller.fleet import Clock, ObservedController, hello
from tests.lacking import lacking

DRIVER = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned gpu, memory; } rates;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(index + 1); return index < 4 ? 0 : 2;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)9; return strcmp(uuid, "MIG-1") ? 6 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *found) {
    found->used = (long)device << 30; found->total = 16ull << 30; return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, rates *found) {
    found->gpu = 20 * (long)device; return device == (void *)9 ? 3 : 0;
}
const char *nvmlErrorString(int code) { return "no such device"; }
"""
"""A driver of four GPUs of 16 GiB, of which the first has 1 GiB in use and is busy for 20 %, the
second twice as much, and of a part of a GPU."""

READ = """
import asyncio, json, sys
from sluice.replica.gpus import GpuMonitor

async def main():
    monitor = GpuMonitor(json.loads(sys.argv[1]), int(sys.argv[2]))
    monitor.start()
    while not monitor.uses and not monitor._task.done():
        await asyncio.sleep(0.01)
    monitor.stop()
    print(json.dumps(monitor.uses))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library, as NVIDIA's driver installs it."""
    compiler = shutil.which("cc") or lacking("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "nvml.c").write_text(DRIVER, encoding="utf-8")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", folder / "nvml.c", "-o", library], check=True)
    return folder


def read(driver: Path, ids: list[str], ranks: int = 1) -> tuple[list[GpuUse], str]:
    """What a process with these GPUs reads of them, and what it logs."""
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(ids), str(ranks)],
        env=os.environ | {"LD_LIBRARY_PATH": str(driver)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [GpuUse(*each) for each in json.loads(done.stdout)], done.stderr


def test_the_gpus_of_each_rank_are_read(driver: Path) -> None:
    gib = 1 << 30
    assert read(driver, ["1"])[0] == [GpuUse(0.4, 2 * gib, 16 * gib)]
    assert read(driver, ["0", "1", "2", "3"], ranks=2)[0] == [
        GpuUse(pytest.approx(0.3), 3 * gib, 32 * gib),
        GpuUse(pytest.approx(0.7), 7 * gib, 32 * gib),
    ]


def test_of_a_part_of_a_gpu_the_memory_is_read(driver: Path) -> None:
    assert read(driver, ["MIG-1"])[0] == [GpuUse(None, 9 << 30, 16 << 30)]


def test_a_gpu_that_is_not_there_is_said_once(driver: Path) -> None:
    uses, log = read(driver, ["7"])
    assert uses == [] and log.count("the use of GPUs is not shown") == 1


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
async def test_without_a_driver_nothing_is_read(caplog: pytest.LogCaptureFixture) -> None:
    monitor = GpuMonitor(["0"])
    monitor.start()
    assert monitor._task is not None
    await asyncio.wait_for(monitor._task, 60)
    assert monitor.uses == [] and "NVML failed" in caplog.text


async def test_without_a_gpu_nothing_is_started() -> None:
    monitor = GpuMonitor([])
    monitor.start()
    assert monitor._task is None
    monitor.stop()


async def test_operators_see_them_of_the_replicas_that_have_some() -> None:
    uses: list[GpuUse] = []
    table = StateTable.create(8)
    engine = SimpleNamespace(state=table.read)
    rank: Any = SimpleNamespace(replica_id="a", engine=engine, live_requests=0)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReplicaCollector([rank], lambda: 1, gpus=lambda: uses))
    controller = ObservedController(ControllerConfig(), Clock())
    for name in "ab":
        await controller.hello(hello(name))
    numbers = count(1)

    async def seen() -> list[object]:
        push = MetricsPush("a", 1, next(numbers), samples_of(registry))
        await controller.push_metrics(push)
        return [each.get("gpu") for each in (await controller.snapshot())["replicas"]]

    assert await seen() == [None, None]
    uses.append(GpuUse(0.75, 3, 4))
    assert await seen() == [{"utilization": 0.75, "memory_used_bytes": 3, "memory_bytes": 4}, None]
    assert b'sluice_replica_gpu_utilization_ratio{replica="a"} 0.75' in (
        await controller.render_metrics()
    )
    uses[0] = GpuUse(None, 3, 4)
    assert await seen() == [{"memory_used_bytes": 3, "memory_bytes": 4}, None]
    uses.clear()
    assert await seen() == [None, None]
