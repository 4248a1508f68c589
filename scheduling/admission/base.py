"""The contract of an admission policy: which replicas can promise a request's objective."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.job import Job
from sluice.scheduling.request.kernels import Floats

# Which constraint kept a replica from guaranteeing a request its objective.


class Constraint(enum.IntEnum):
    """The constraint that binds, as an admission policy records it in compiled code."""

    NONE = 0
    """The objective can be promised."""
    TTFT = 1
    """Its first token would be late."""
    TPOT = 2
    """The decodes could not all be kept at their TPOT."""
    GUARANTEES = 3
    """Requests that are promised already would be late."""
    KV_MEMORY = 4
    """There are too few KV blocks."""
    SEQUENCES = 5
    """The engine runs as many sequences as it may."""
    PREFILL_BUDGET = 6
    """The prompt exceeds the prefill admission budget."""
    OVERTAKING = 7
    """No capacity would be left for requests of more worth that are expected and due before."""


class Promises(NamedTuple):
    """What each of ``n`` replicas of a job can promise: whether it ``holds`` with every earlier
    promise.

    ``ttft_s`` counts from now to the first token, ``job.lead_s`` included; for a job that
    ``moved``, to the end of its prefill. ``wait_s`` is the predicted time until a promise could be
    made; infinite where it never can. ``binds`` is the ``Constraint`` that prevents it; 0 where it
    ``holds``."""

    holds: NDArray[np.bool_]
    ttft_s: Floats
    wait_s: Floats
    binds: NDArray[np.int8]


# P/D pairs: one replica computes the prompt of a request, the other decodes.

TRANSFER_STEPS = 2.0
"""Steps of the decode replica between the arrival of the KV and the first token, at most: the one
under way, and the first of its own."""


class DecodeChoice(NamedTuple):
    """The decode replica, ``job.rows[chosen]``, for a request whose prompt another replica
    computes.

    ``promises`` is ``None`` without admission. ``kv_transfer_s`` is the predicted time from the end
    of the prefill to the first token there."""

    job: Job
    promises: Promises | None
    chosen: int
    kv_transfer_s: float

    @property
    def row(self) -> int:
        """Row of the chosen one."""
        return int(self.job.rows[self.chosen])

    @property
    def work_s(self) -> float:
        """Predicted time of its first step's work."""
        return float(self.job.work_s[self.chosen])

    @property
    def able(self) -> bool:
        """Whether it can promise its part; always true without admission."""
        return self.promises is None or bool(self.promises.holds[self.chosen])

    @property
    def wait_s(self) -> float:
        """Predicted time until some decode replica can promise that part, if none can now."""
        return 0.0 if self.promises is None else float(self.promises.wait_s.min())

    @property
    def binds(self) -> np.int8:
        """The constraint that binds if no decode replica can promise that part: at the replica
        with the shortest wait."""
        if self.promises is None:
            return np.int8(0)
        return self.promises.binds[self.promises.wait_s.argmin()]  # type: ignore[no-any-return]


def together(job: Job, promises: Promises, second: DecodeChoice) -> Promises:
    """The promises to the client. ``promises`` are those of the replicas where the request
    starts; a P/D pair promises what both replicas can."""
    holds, wait_s, binds = promises.holds, promises.wait_s, promises.binds
    if not second.able:
        binds = np.where(holds & job.splits, second.binds, binds)
        holds = holds & ~job.splits
        wait_s = np.where(job.splits, np.maximum(wait_s, second.wait_s), wait_s)
    return Promises(holds, promises.ttft_s, wait_s, binds)


class AdmissionPolicy(ABC):
    """Decides what can be promised. One file, one subclass, one registry line. It keeps no state:
    earlier promises count through their reservations in the fleet."""

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    selects: ClassVar[bool] = False
    """Whether it decides on several requests together (:meth:`select`)."""

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    @property
    def window_s(self) -> float:
        """How long a request may wait for others that are decided with it, seconds; 0: not."""
        return 0.0

    def select(self, jobs: Sequence[Job], fleet: Fleet) -> NDArray[np.bool_]:
        """``bool[n]``: the jobs, of the greatest sum of priorities, that a replica can promise
        together beside all earlier promises. Only called if ``selects``, with at most ``MAX_NEW``
        jobs, each with the same single row."""
        raise NotImplementedError

    def without_headroom(self) -> Self:
        """The same policy without head-room, if it has any."""
        if "headroom" not in type(self.options).model_fields:
            return self
        return type(self)(self.options.model_copy(update={"headroom": 0.0}))

    @abstractmethod
    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """What each of ``job.rows`` can promise for ``job.query``.

        A replica that computes only the prompt (``job.splits``) promises to finish it by
        ``job.due_s - job.lead_s``. With ``job.reserve_tokens``, each replica that has promises must
        also have room for one more request with a prompt of that length."""
