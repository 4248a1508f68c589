"""The contract of an admission policy: which replicas can guarantee a request's objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.request.job import Job
from sluice.scheduling.request.kernels import Floats


class Promises(NamedTuple):
    """What each replica of a job can guarantee.

    Attributes:
        holds: ``bool[n]``, whether the replica can meet the job's objective and every earlier
            guarantee.
        ttft_s: ``float64[n]``, predicted time from now to the first token there, seconds; where the
            replica computes only the prompt, to the end of the prefill.
        wait_s: ``float64[n]``, where ``holds`` is false: the predicted time until it could be true,
            seconds; infinite where it never can.
        binds: ``int8[n]``, the :class:`~sluice.scheduling.admission.constraint.Constraint` that
            prevents the guarantee; 0 where ``holds`` is true.
    """

    holds: NDArray[np.bool_]
    ttft_s: Floats
    wait_s: Floats
    binds: NDArray[np.int8]


class AdmissionPolicy(ABC):
    """Decides what can be guaranteed. One file, one subclass, one registry line. It keeps no state:
    earlier guarantees count through their reservations in the fleet."""

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
        """``bool[n]``: which of ``jobs`` a replica can guarantee together, beside all earlier
        guarantees: the set with the greatest sum of priorities. Only called if ``selects``.

        Args:
            jobs: at most :data:`~sluice.scheduling.admission.slos_serve.selection.MOST_NEW`, each
                with one row, the same for all, which serves them whole.
        """
        raise NotImplementedError

    @abstractmethod
    def promises(self, job: Job, fleet: Fleet) -> Promises:
        """What each of ``job.rows`` can guarantee for ``job.query``.

        A replica that would compute only the prompt (``job.splits``) guarantees to finish it by
        ``job.due_s - job.lead_s``. After a KV transfer (``job.moved``) a replica needs KV blocks
        for the whole prompt. With ``job.reserve_tokens``, each replica that has guarantees must be
        able to meet the same objective for one more request with a prompt of that length; an idle
        replica keeps no reserve.
        """
