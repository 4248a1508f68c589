"""The orders in which local policies take guaranteed prefills, as far as routing predicts them.

Each batch policy states its own (``local_order``), and a replica reports it. An order is coarse:
chunks, memory and the state that a policy keeps between batches are not part of it.
"""

from __future__ import annotations

SLIDE = 0
"""Deadline first while all can be on time; those at risk by priority per second of work."""

DEADLINE = 1
ARRIVAL = 2
BY_PRIORITY = 3
"""The higher priority first, and in a priority by arrival."""

SHORTEST = 4
LOCAL_ORDERS = (SLIDE, DEADLINE, ARRIVAL, BY_PRIORITY, SHORTEST)
