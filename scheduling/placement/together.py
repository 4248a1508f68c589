"""Requests that are decided together: those of greatest total priority get the guarantees.

One by one, a request that comes first takes capacity that two others could have shared. Requests
that wait at the controller together are therefore planned first, without consequences: where not
all of them could be guaranteed one after another, the admission policy chooses the best set for
each replica (SLOs-Serve §3.2.1). Then each request is decided as if it were alone, those of the set
first. So shares of tenants, margins and retry times apply as always, and what the plan leaves out
gets the capacity that remains.

The paper has a program for one replica, and the next replica tests what the first declined. Ours
for several replicas: each starts from the requests that it would get one by one, and may exchange
them for others that no replica has guaranteed. So the set is never worth less than one by one, and
on one replica none is worth more that the admission policy accepts as a set. In another order, one
by one can be worth more: a reservation counts up to some milliseconds less than a new request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.admission.slos_serve.selection import MOST_NEW
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.jobs import reservation_of
from sluice.scheduling.request.job import Job

MOST_TOGETHER: Final = MOST_NEW
"""Maximum number of requests that are decided together."""


class Turn(NamedTuple):
    """When and where to decide on one of several requests.

    Attributes:
        number: of the request in the order given.
        row: of the replica that is to guarantee it; ``None``: the routing policy chooses.
    """

    number: int
    row: int | None = None


def plan(
    jobs: Iterable[tuple[int, Job]],
    fleet: Fleet,
    admission: AdmissionPolicy,
    choose: Callable[[Job, Fleet], int],
) -> dict[int, int]:
    """The replica's row of each request that is to be guaranteed, by its index; empty where all can
    be guaranteed one by one. Leaves nothing reserved.

    A test and a reservation for each request, and a choice of the policy for each replica that
    could guarantee some.

    Args:
        jobs: at most :data:`MOST_TOGETHER`, with their indexes. Each is made when the ones before
            it are reserved.
        choose: among the replicas that can guarantee a job.
    """
    asked: dict[int, Job] = {}
    rows: dict[int, int] = {}
    for index, job in jobs:
        asked[index] = job
        able = np.flatnonzero(admission.promises(job, fleet).holds)
        if len(able):
            chosen = int(able[choose(job.of(able), fleet)])
            rows[index] = int(job.rows[chosen])
            fleet.reserve(job.query.key, reservation_of(job, chosen, fleet.ids, promised=True))
    fleet.release([asked[index].query.key for index in rows])
    if len(rows) == len(asked):
        return {}
    for row in dict.fromkeys(rows.values()):
        here = [
            index for index, job in asked.items() if rows.get(index, row) == row and row in job.rows
        ]
        chosen_here = admission.select(
            [asked[index].of(asked[index].rows == row) for index in here], fleet
        )
        best = [index for index, taken in zip(here, chosen_here.tolist(), strict=True) if taken]
        before = [index for index in here if index in rows]
        if _worth(asked, best) > _worth(asked, before):
            for index in before:
                del rows[index]
            rows.update(dict.fromkeys(best, row))
    return rows


def _worth(asked: dict[int, Job], indexes: list[int]) -> float:
    return sum(asked[index].query.slo.priority for index in indexes)
