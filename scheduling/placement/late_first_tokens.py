"""Which promised first tokens a replica will miss, by its current state.

The test is that of ``admission.moore_hodgson``, which can fail later as steps take longer than
predicted or the engine stalls. Our reading for a stall: an overdue step, longer than the longest
possible batch, takes as long again as it is overdue by now, the median if its scale is unknown
(Gott, Nature 1993)."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.admission.room import place_of
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import (
    BEGUN_S,
    BEST_EFFORT_S,
    DECODE_S,
    FIXED_S,
    LEFT_AHEAD_S,
    LEFT_S,
    PREFILL_S,
    FleetArrays,
    capacity_s,
)
from sluice.scheduling.request.kernels import Floats, compiled, most_work_s


def late(
    fleet: Fleet,
    row: int,
    batch_tokens: int,
    step_s: tuple[float, float],
    planned_s: Floats,
    stated_s: Floats,
) -> NDArray[np.bool_]:
    """Which promised prefills of a replica will miss their first tokens. Where one is late, the
    later ones count as if it left. ``O(n log m)`` with ``m`` promised requests there, compiled.

    ``step_s``: when its step under way began, and until when it is known not to have ended, on the
    fleet's clock. ``planned_s``: due by the replica's plan, ascending; ``stated_s``: due for the
    client."""
    begun_s, seen_s = step_s
    step = (float(begun_s), float(seen_s))
    return _late(fleet.arrays, row, float(batch_tokens), step, planned_s, stated_s)


@compiled
def _late(
    fleet: FleetArrays,
    row: int,
    batch_tokens: float,
    step_s: tuple[float, float],
    planned_s: Floats,
    stated_s: Floats,
) -> NDArray[np.bool_]:
    all_figures, pieces, starts, all_prefills, all_loads, _ = fleet
    figures = all_figures[row]
    prefills, loads = all_prefills[starts[row] :], all_loads[starts[row] :]
    lost_s = lost_time_s(figures, pieces[row], batch_tokens, step_s[0], step_s[1])
    found = np.zeros(planned_s.shape[0], np.bool_)
    leaving_s = 0.0
    for item in range(planned_s.shape[0]):
        place = place_of(figures, prefills, planned_s[item])
        if place == 0:
            continue  # it is not known there
        ahead_s = prefills[place - 1, LEFT_AHEAD_S] - leaving_s
        if ahead_s > capacity_s(figures, loads, stated_s[item] - lost_s):
            found[item] = True
            leaving_s += prefills[place - 1, LEFT_S]
    return found


@compiled
def lost_time_s(
    figures: Floats, pieces: Floats, batch_tokens: float, begun_s: float, seen_s: float
) -> float:
    """For how long the replica is expected to do none of the work that its figures say it does."""
    prefill_s = min(
        figures[PREFILL_S] + figures[BEST_EFFORT_S], most_work_s(pieces, batch_tokens, 0.0)
    )
    longest_s = figures[FIXED_S] + figures[DECODE_S] + prefill_s
    overdue_s = seen_s - begun_s - longest_s
    if overdue_s <= 0.0:
        return 0.0
    # The figures count from the report's step on, or a second before the report.
    return max(0.0, seen_s + overdue_s - figures[BEGUN_S] - longest_s)
