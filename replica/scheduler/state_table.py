"""One engine's scheduler state in shared memory: written after every step, readable at any time.

One writer (the process that schedules) and any number of readers on the host, without locks: a
sequence number is odd while a write is under way, and a reader copies again if it changed, with a
fence on either side. Writing takes microseconds and never waits. Readers write the latency
model, the role, and which tools turns call."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from math import inf, nan
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.fleet.prefix import HELD, HELD_SLOTS
from sluice.scheduling.fleet.state import ROW, RUNNING, SUMMARY, WAITING, EngineState
from sluice.scheduling.latency.model import FAMILIES, LatencyModel, StepSample
from sluice.scheduling.request.kernels import FIELDS, LIVE, Floats, Ints
from sluice.scheduling.request.lateness import ENGINE
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Later, later_of
from sluice.scheduling.roles import ROLES, Role
from sluice.scheduling.tenancy.usage import ACCOUNT, MAX_ACCOUNTS

# The order in which one process sees another's writes to shared memory.
#
# x86 makes writes visible, and executes reads, in program order. Other machines, such as ARM, may
# reorder both. There a reader *fences*: Linux's membarrier(2) has all cores that run a registered
# process pass a full barrier. So if the reader has seen a write, all earlier writes are visible
# after the fence; and if it has seen part of a write before the fence, it sees the beginning of
# that write after it. The reader pays some microseconds and the writer, an engine between two
# steps, nothing. Python has no fence of its own.

_IN_ORDER: Final = ("x86_64", "AMD64", "i686")

# Its number by machine, and its commands: linux/membarrier.h.
_SYSCALLS: Final = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365}
_EXPEDITED, _REGISTER = 1 << 1, 1 << 2


def reader_fence(machine: str | None = None) -> Callable[[], None]:
    """The function to call between two reads of shared memory that must not be reordered. Writer
    and reader must both have called this. Raises RuntimeError: this machine has no fence."""
    machine = machine or platform.machine()
    return (lambda: None) if machine in _IN_ORDER else membarrier(machine)


def membarrier(machine: str) -> Callable[[], None]:
    """The fence of Linux, on any machine. Raises RuntimeError: the kernel does not have it."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    number = _SYSCALLS.get(machine)

    def command(which: int) -> None:
        if number is None or call(ctypes.c_long(number), which, 0, 0) != 0:
            why = "" if number is None else f": {os.strerror(ctypes.get_errno())}"
            raise RuntimeError(
                f"engines share their state with other processes in memory, which on {machine} "
                f"needs Linux 4.16 or newer with membarrier(2); here it cannot be used{why}"
            )

    command(_REGISTER)
    return lambda: command(_EXPEDITED)


SAMPLE_RING = 2048
CALL_RING = 1024
LATE_RING = 256
_MAGIC = 0x534C5549_4345000B
_SAMPLE_FIELDS = len(StepSample._fields)
_ACCOUNTS_SIZE = MAX_ACCOUNTS * ACCOUNT.itemsize
_MODELS = list(FAMILIES.values())
_MAX_COEFFICIENTS = max(len(model.names) for model in _MODELS)

_CHANGING = (
    "computed_tokens",
    "pending_tokens",
    "emitted_tokens",
    "kv_blocks",
    "first_token_s",
    "last_token_s",
)

_HEADER = np.dtype(
    [
        ("magic", "<i8"),
        ("capacity", "<i8"),
        ("sequence", "<i8"),
        ("samples", "<i8"),
        ("model_version", "<i8"),
        ("family", "<i8"),
        ("coefficients", "<f8", (_MAX_COEFFICIENTS,)),
        ("headroom", "<f8"),
        ("role", "<i8"),
        ("calls", "<i8"),
        ("called", "<i8", (CALL_RING, 2)),
        ("lates", "<i8"),
        ("late_keys", "<i8", (LATE_RING,)),
        ("late_parts", "<f8", (LATE_RING, 2 * len(ENGINE))),
        ("summary", SUMMARY),
    ]
)


NO_SLOT = -1  # In place of a slot: the request has none


class ChangedRows(NamedTuple):
    """Live requests of which something changed: their ``slots``, ``int64[n]``, where
    :data:`NO_SLOT` is ignored, and their rows in the engine's queue, ``float64[n, FIELDS]``."""

    slots: Ints
    table: Floats


NO_ROWS = ChangedRows(np.empty(0, np.int64), np.empty((0, FIELDS)))


class TableFullError(RuntimeError):
    """More live requests than the table has slots."""


class StateTable:
    """The table of ``buffer``, zeroed memory of ``nbytes`` bytes if it is new. ``summary``'s
    histograms and ``accounts`` are counted outside a write. Raises RuntimeError: this machine has
    no fence."""

    def __init__(
        self,
        buffer: memoryview | mmap.mmap,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        header = np.frombuffer(buffer, dtype=_HEADER, count=1)
        offset = _HEADER.itemsize
        samples = np.frombuffer(
            buffer, dtype="<f8", count=SAMPLE_RING * _SAMPLE_FIELDS, offset=offset
        )
        self._samples = samples.reshape(SAMPLE_RING, _SAMPLE_FIELDS)
        self._rows = np.frombuffer(
            buffer, dtype=ROW, count=capacity, offset=offset + self._samples.nbytes
        )
        self._held = np.frombuffer(
            buffer,
            dtype=HELD,
            count=HELD_SLOTS,
            offset=offset + self._samples.nbytes + self._rows.nbytes,
        )
        self.accounts = np.frombuffer(
            buffer, dtype=ACCOUNT, count=MAX_ACCOUNTS, offset=self.nbytes(capacity) - _ACCOUNTS_SIZE
        )
        self._header = header[0:1]
        self.summary = self._header["summary"]
        self._sequence = self._header["sequence"]
        self._free = list(range(capacity - 1, -1, -1))
        self._model_version = 0
        self._calls = 0
        self._clock = clock
        self._fence = reader_fence()
        self.capacity = capacity

    @staticmethod
    def nbytes(capacity: int) -> int:
        """Memory of a table, bytes."""
        samples = SAMPLE_RING * _SAMPLE_FIELDS * 8
        rows = capacity * ROW.itemsize
        held = HELD_SLOTS * HELD.itemsize
        return int(_HEADER.itemsize + samples + rows + held + _ACCOUNTS_SIZE)

    @classmethod
    def create(
        cls,
        capacity: int,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> StateTable:
        """A new, empty table: in the file ``path`` (replaced) or, without one, in this process."""
        if path is None:
            table = cls(memoryview(bytearray(cls.nbytes(capacity))), capacity, clock)
        else:
            path.write_bytes(bytes(cls.nbytes(capacity)))
            table = cls(_map(path), capacity, clock)
        table._header["magic"] = _MAGIC
        table._header["capacity"] = capacity
        table.summary["correction"] = table.summary["fixed_correction"] = 1.0
        return table

    @classmethod
    def open(cls, path: Path) -> StateTable:
        """Join the table in ``path``. Raises ValueError: another version. Raises OSError."""
        buffer = _map(path)
        if len(buffer) < _HEADER.itemsize:
            raise ValueError(f"{path} is no state table")
        header = np.frombuffer(buffer, dtype=_HEADER, count=1)
        capacity = int(header["capacity"][0])
        if header["magic"][0] != _MAGIC or len(buffer) != cls.nbytes(capacity):
            raise ValueError(f"{path} is no state table of this version")
        return cls(buffer, capacity)

    # Methods of the writer.

    def allocate(
        self, key: int, slo: SLO, arrival_s: float, prompt_tokens: int, best_effort: bool = False
    ) -> int:
        """A slot for a new, waiting request. Raises TableFullError."""
        if not self._free:
            raise TableFullError(f"all {self.capacity} request slots are in use")
        slot = self._free.pop()
        later = later_of(slo.stages, 0)
        self._sequence += 1
        self._rows[slot] = (
            key,
            arrival_s,
            inf if slo.ttft_s is None else slo.ttft_s,
            inf if slo.tpot_s is None else slo.tpot_s,
            inf if slo.e2e_s is None else slo.e2e_s,
            slo.priority,
            prompt_tokens,
            0,
            prompt_tokens,
            0,
            0,
            WAITING,
            0,
            best_effort,
            nan,
            nan,
            later.stages,
            later.tokens,
        )
        self._sequence += 1
        return slot

    def begin_stage(
        self, slot: int, slo: SLO, now_s: float, prompt_tokens: int, later: Later
    ) -> None:
        """Another stage begins; its prompt grows by ``prompt_tokens``, the output before it."""
        ttft_s, tpot_s, e2e_s, _ = slo.columns
        self._sequence += 1
        row = self._rows[slot]
        row["arrival_s"] = now_s
        row["ttft_s"], row["tpot_s"], row["e2e_s"] = ttft_s, min(tpot_s, later.tpot_s), e2e_s
        row["prompt_tokens"] += prompt_tokens
        row["emitted_tokens"] = 0
        row["first_token_s"] = row["last_token_s"] = nan
        row["later_stages"], row["later_tokens"] = later.stages, later.tokens
        self._sequence += 1

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self._sequence += 1
        self._rows["phase"][slot] = 0
        self._sequence += 1
        self._free.append(slot)

    def write(self, changed: ChangedRows | None = None, **summary: float) -> None:
        """Write what changes of these rows, and the named fields of the summary, as one change."""
        slots, table = changed or NO_ROWS
        if len(slots) and slots.min() < 0:
            slots, table = slots[slots >= 0], table[slots >= 0]
        self._sequence += 1
        if len(slots):
            rows, live = self._rows, table.view(LIVE)[:, 0]
            for name in _CHANGING:
                rows[name][slots] = live[name]
            rows["phase"][slots] = np.where(live["running"] > 0, RUNNING, WAITING)
            rows["expected_tokens"][slots] = np.fmax(live["expected_tokens"], 0)
        for name, value in summary.items():
            self.summary[name] = value
        self._sequence += 1

    def write_held(self, slots: NDArray[np.integer], held: np.ndarray) -> None:
        """Write changed slots of the chunks that the engine holds: ``HELD[n]``, one per slot."""
        self._sequence += 1
        self._held[slots] = held
        self._sequence += 1

    def add_sample(self, sample: StepSample) -> None:
        """Keep a step sample; the oldest of ``SAMPLE_RING`` is overwritten."""
        count = int(self._header["samples"][0])
        self._samples[count % SAMPLE_RING] = sample
        self._header["samples"] = count + 1

    def row(self, slot: int) -> np.void:
        """A copy of a request's row."""
        row: np.void = self._rows[slot].copy()
        return row

    def add_late(self, key: int, parts: Sequence[float]) -> None:
        """Keep what a late request's time went to; the oldest of ``LATE_RING`` is overwritten."""
        count = int(self._header["lates"][0])
        self._header["late_keys"][0, count % LATE_RING] = key
        self._header["late_parts"][0, count % LATE_RING] = parts
        self._header["lates"] = count + 1

    def orders(self) -> tuple[LatencyModel | None, Role]:
        """The latency model, uncorrected, if it was set since the last call, and the role."""
        header = self._header[0]
        role = ROLES[header["role"]]
        version = header["model_version"]
        if version == self._model_version:
            return None, role
        self._model_version = int(version)
        self._fence()
        family = _MODELS[header["family"]]
        model = family.of(header["coefficients"][: len(family.names)].tolist())
        return model.with_headroom(float(header["headroom"])), role

    def take_calls(self) -> list[tuple[int, int]]:
        """What was noted by :meth:`add_call` since the last call, or the latest of it."""
        header = self._header[0]
        count, before = int(header["calls"]), self._calls
        if count == before:
            return []
        self._calls = count
        self._fence()
        places = [n % CALL_RING for n in range(max(before, count - CALL_RING), count)]
        return [(session, tool) for session, tool in header["called"][places].tolist()]

    # Methods of readers.

    def read(self) -> EngineState:
        """A consistent copy of all live rows and the summary, in microseconds or 20 ms at most.
        Raises RuntimeError: the writer stopped within a write for that long, dead or without a
        core."""
        for attempt in range(30):
            before = int(self._sequence[0])
            if before % 2 == 0:
                used = self.accounts["seconds"] > 0.0
                self._fence()
                slots = np.flatnonzero(self._rows["phase"]).astype(np.int32)
                rows = self._rows[slots]
                summary = self.summary[0].copy()
                held = self._held.copy()
                accounts = self.accounts[used]
                self._fence()
                if int(self._sequence[0]) == before:
                    return EngineState(self._clock(), slots, rows, summary, held, accounts)
            if attempt >= 10:
                # A write takes microseconds, unless the machine has taken the writer off its core.
                time.sleep(0.001)
        raise RuntimeError("the state table is stuck in a write: its engine is gone, or stalled")

    def late_parts(self, key: int) -> tuple[float, ...]:
        """What the time of a late request that has just ended went to, before and after its first
        token, seconds in the order of ``lateness.ENGINE``; empty: it was in time."""
        (places,) = np.nonzero(self._header["late_keys"][0] == key)
        return tuple(self._header["late_parts"][0, places[0]].tolist()) if len(places) else ()

    def set_model(self, model: LatencyModel) -> None:
        """Plan with ``model`` from the next step on, with its headroom but not its correction."""
        coefficients = model.coefficients
        self._header["family"] = _MODELS.index(type(model))
        self._header["coefficients"][0, : len(coefficients)] = coefficients
        self._header["headroom"] = model.headroom
        self._header["model_version"] += 1

    def add_call(self, session: int, tool: int) -> None:
        """The last turn of ``session`` has called ``tool``, 0: none."""
        count = int(self._header["calls"][0])
        self._header["called"][0, count % CALL_RING] = session, tool
        self._header["calls"] = count + 1

    @property
    def role(self) -> Role:
        """The role that the scheduler should follow."""
        return ROLES[int(self._header["role"][0])]

    def set_role(self, role: Role) -> None:
        """Have the scheduler follow ``role`` from its next step on."""
        self._header["role"] = ROLES.index(role)

    def samples(self) -> list[StepSample]:
        """The latest step samples, in no order."""
        count = min(int(self._header["samples"][0]), SAMPLE_RING)
        return [StepSample(*(float(value) for value in row)) for row in self._samples[:count]]

    def clear_samples(self) -> None:
        """Forget all step samples."""
        self._header["samples"] = 0


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
