"""The orders in which local policies take promised prefills, as far as routing predicts them:
without chunks, memory and state kept between batches. Each batch policy states its own, and a
replica reports it."""

from __future__ import annotations

SLIDE = 0
"""Deadline first while all can be on time; those at risk by priority per second of work."""

DEADLINE = 1
ARRIVAL = 2
BY_PRIORITY = 3
"""The higher priority first, and in a priority by arrival."""

SHORTEST = 4
LOCAL_ORDERS = (SLIDE, DEADLINE, ARRIVAL, BY_PRIORITY, SHORTEST)
