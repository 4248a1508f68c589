"""Which guaranteed requests are predicted to miss their TTFT where they are, and should move.

With each push of metrics a router names its guaranteed requests that wait for their first tokens.
The answer names those predicted to miss their TTFT
(:mod:`sluice.scheduling.placement.late_first_tokens`). The router then asks for another replica as
for any request; the request leaves the first replica only if another one guarantees what is left of
the objective (:attr:`RouteQuery.moves_from <sluice.scheduling.request.job.RouteQuery.moves_from>`).

No state is kept between pushes, and decisions do no work for this.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Final, NamedTuple

import numpy as np

from sluice.controller.state.mirror import Mirror, MirroredReplica
from sluice.protocol.messages import FirstTokenWait
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.placement.late_first_tokens import late

MOST_LATE: Final = 16
"""Most requests that one answer names: each of them causes another decision."""

MOST_LOOKED_AT: Final = 32
"""Most replicas that are checked for one push, ordered by their soonest due first token."""


class _Due(NamedTuple):
    """When a first token is due: as the replica plans it and as the client stated it, seconds on
    the controller's clock."""

    planned_s: float
    stated_s: float
    key: int


def late_of(
    waits: Sequence[FirstTokenWait],
    mirror: Mirror,
    fleet: Fleet,
    now_s: float,
    has_cells: bool = False,
) -> tuple[int, ...]:
    """The keys of the requests in ``waits`` (already checked) that are predicted to miss their
    TTFT; at most :data:`MOST_LATE`. Requests at unknown replicas are skipped, and those that could
    move nowhere; with ``has_cells`` they may move to a replica of another cell.

    ``O(requests at the replicas named)`` of at most :data:`MOST_LOOKED_AT` replicas.
    """
    by_replica: dict[str, dict[int, float]] = {}
    for wait in sorted(waits, key=lambda wait: wait.ttft_s - wait.waited_s):
        due_s = now_s - wait.waited_s + wait.ttft_s
        if wait.replica_id in mirror.replicas and due_s > now_s:
            by_replica.setdefault(wait.replica_id, {})[wait.key] = due_s
    found: list[int] = []
    for replica_id, stated_s in islice(by_replica.items(), MOST_LOOKED_AT):
        if has_cells or _is_elsewhere(replica_id, fleet, now_s):
            found += _late_at(mirror.replicas[replica_id], stated_s, fleet, now_s)
    return tuple(found[:MOST_LATE])


def _is_elsewhere(replica_id: str, fleet: Fleet, now_s: float) -> bool:
    """Whether another replica may give guarantees."""
    rows = fleet.candidates(now_s)
    others = rows[rows != fleet.row_of[replica_id]]
    return len(others) > 0 and fleet.is_sound(int(others[0]), now_s)


def _late_at(
    replica: MirroredReplica, stated_s: dict[int, float], fleet: Fleet, now_s: float
) -> list[int]:
    """The keys in ``stated_s`` that are predicted to be late at one replica."""
    hello, offset_s = replica.hello, replica.offset_s
    rows = replica.table[: replica.used_slots]
    rows = rows[rows["phase"] > 0]
    waiting = (rows["emitted_tokens"] == 0) & (rows["best_effort"] == 0)
    waiting &= np.isin(rows["key"], list(stated_s))
    dues = [
        _Due(arrival_s + min(ttft_s, e2e_s) + offset_s, stated_s[key], key)
        for key, arrival_s, ttft_s, e2e_s in rows[waiting][
            ["key", "arrival_s", "ttft_s", "e2e_s"]
        ].tolist()
    ]
    since_s = rows["arrival_s"].min() + offset_s if len(rows) else inf
    for key, each_s in stated_s.items():
        made = fleet.ledger.of(key)
        if made is not None and made.replica_id == hello.replica_id:
            dues.append(_Due(made.due_s, each_s, key))
            since_s = min(since_s, made.made_s)
    if not dues:
        return []
    dues.sort()
    begun_s = max(float(replica.summary["updated_s"]) + offset_s, float(since_s))
    # The state of a replica that reports is known as of its last report.
    silent = now_s - replica.received_s >= fleet.settings.aged_after_s
    found = late(
        fleet,
        fleet.row_of[hello.replica_id],
        hello.max_batch_tokens,
        (begun_s, now_s if silent else replica.received_s),
        np.array([due.planned_s for due in dues]),
        np.array([due.stated_s for due in dues]),
    )
    return [dues[place].key for place in np.flatnonzero(found).tolist()]
