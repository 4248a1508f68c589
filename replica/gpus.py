"""How busy a replica's GPUs are, from NVML, whose binding Ray brings. Without a GPU or a driver
nothing is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Time between two readings, seconds."""


class GpuUse(NamedTuple):
    """Use of the GPUs of one engine. ``busy``: share of NVML's last sample period in which a kernel
    ran, mean of the GPUs; ``None`` for a part of a GPU (MIG), of which NVML does not say it."""

    busy: float | None
    used_bytes: int
    total_bytes: int


class GpuMonitor:
    """Reads once a second in a thread. ``ids``: indices or UUIDs, as in ``CUDA_VISIBLE_DEVICES``;
    each of ``ranks`` engines has as many of them, in order."""

    def __init__(self, ids: Sequence[str], ranks: int = 1) -> None:
        size = len(ids) // ranks
        self._ids = [ids[rank * size :][:size] for rank in range(ranks)] if size else []
        self._task: asyncio.Task[None] | None = None
        self.uses: list[GpuUse] = []
        """By rank, as last read; empty if they cannot be read."""

    def start(self) -> None:
        """Start to read, if there is a GPU."""
        if self._ids:
            self._task = asyncio.create_task(self._run(), name="gpus")

    def stop(self) -> None:
        """Stop to read."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            handles = await asyncio.to_thread(_handles, self._ids)
            while True:
                self.uses = await asyncio.to_thread(_read, handles)
                await asyncio.sleep(PERIOD_S)
        except Exception as error:  # whatever the driver says, the replica serves
            self.uses = []
            logger.warning("the use of GPUs is not shown, NVML failed: %s", error)


def _handles(ids: Sequence[Sequence[str]]) -> list[list[Any]]:
    from ray._private.thirdparty import pynvml

    pynvml.nvmlInit()
    by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    return [[by_index(int(i)) if i.isdigit() else by_uuid(i) for i in each] for each in ids]


def _read(handles: list[list[Any]]) -> list[GpuUse]:
    from ray._private.thirdparty import pynvml

    def busy(handle: Any) -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except pynvml.NVMLError_NotSupported:
            return None

    uses = []
    for each in handles:
        memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in each]
        rates = [rate for rate in map(busy, each) if rate is not None]
        uses.append(
            GpuUse(
                sum(rates) / len(rates) if rates else None,
                sum(int(one.used) for one in memory),
                sum(int(one.total) for one in memory),
            )
        )
    return uses
