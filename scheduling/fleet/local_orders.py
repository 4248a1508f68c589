"""The orders in which local policies take guaranteed prefills, as far as routing predicts them.

A replica reports the name of its policy. Names that are not here, such as those of installed
packages, count as :data:`SLIDE`. An order is coarse: chunks, memory and the state that a policy
keeps between batches are not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping

SLIDE = 0
"""Deadline first while all can be on time; those at risk by priority per second of work."""

DEADLINE = 1
ARRIVAL = 2
BY_PRIORITY = 3
"""The higher priority first, and in a priority by arrival."""

SHORTEST = 4

ORDERS: Mapping[str, int] = {
    "slidebatching": SLIDE,
    "deadline_triage": SLIDE,
    "slos_serve": SLIDE,
    "annealing": SLIDE,
    "edf": DEADLINE,
    "fairbatching": DEADLINE,
    "d_edf": DEADLINE,
    "s_edf": DEADLINE,
    "fcfs": ARRIVAL,
    "sarathi": ARRIVAL,
    "weighted_vtc": ARRIVAL,
    "sarathi_priority": BY_PRIORITY,
    "sjf": SHORTEST,
}
"""Order by registered name of the local policy."""
