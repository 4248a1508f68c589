"""The contract of an admission policy: which replicas can promise a request its objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.fleet import Fleet
from scheduling.job import Job
from scheduling.kernels import Floats
from scheduling.policy import PolicyOptions


class Promises(NamedTuple):
    """What each replica of a job can promise.

    Attributes:
        holds: ``bool[n]``, whether its objective can be held there, and every promise made before.
        ttft_s: ``float64[n]``, predicted time from now to the first token there, seconds; where the
            job's prompt only is computed there, to the end of that.
        wait_s: ``float64[n]``, where it cannot be held: the predicted time until it could; infinite
            where it never can.
        binds: ``int8[n]``, the :class:`~scheduling.admission.constraint.Constraint` that forbids it
            there; 0 where it can be held.
    """

    holds: NDArray[np.bool_]
    ttft_s: Floats
    wait_s: Floats
    binds: NDArray[np.int8]


class AdmissionPolicy(ABC):
    """Tells what can be promised. One file, one subclass, one registry line. It keeps no state: a
    promise that is made counts through its reservation in the fleet."""

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """What each of ``job.rows`` can promise ``job.query``.

        One that would compute its prompt only (``job.splits``) promises to have done so by
        ``job.due_s - job.lead_s``. Where the KV comes along (``job.moved``) a replica needs room
        for all of the prompt's. Where it must leave room (``job.reserve_tokens``), one more request
        with such a prompt would be held beside it with the same objective, at each replica to which
        anything is promised: what is idle is kept for nobody.
        """
