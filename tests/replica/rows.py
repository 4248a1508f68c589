"""Rows as an engine writes them to its state table."""

from __future__ import annotations

import numpy as np

from sluice.replica.scheduler.state_table import ChangedRows
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, RequestView


def running(
    slots: int | list[int], computed: int, emitted: int, blocks: int, left_s: float | None
) -> ChangedRows:
    """Running decodes with these counts, whose tokens left at ``left_s``."""
    view = RequestView(
        "", SLO(), 0.0, 10, computed, 1, emitted, left_s, blocks, True, last_token_s=left_s
    )
    slots = np.atleast_1d(slots)
    return ChangedRows(slots, QueueView([view] * len(slots)).table)
