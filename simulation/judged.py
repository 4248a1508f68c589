"""Client-side times of requests, as they end, and which requests met their objectives."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

import numpy as np

from sluice.scheduling.request.objective import Times
from sluice.scheduling.request.tpot import tpot_s
from sluice.simulation.requests import Requests

Seen = tuple[float, float, float]
"""TTFT, TPOT and time to the last token of a stage, seconds; nan where it got not so far."""


class Judged:
    """Counts what the edge of a real cluster counts: requests with an objective that ended, and
    those of them that met it. ``O(stages)`` per request where TPOT is a mean, else ``O(tokens)``.

    Attributes:
        count: requests with an objective that ended.
        attained: of these, those that met it at every stage.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.count = 0.0
        self.attained = 0.0

    def ended(self, key: int) -> None:
        """A request ended, with its output or without."""
        requests = self._requests
        stages = range(int(requests.first_stage[key]), int(requests.first_stage[key + 1]))
        if not any(requests.stage_slos[stage].stated for stage in stages):
            return
        self.count += 1
        for seen, stage in zip(_stages(requests, key), stages, strict=True):
            pairs = zip(seen, requests.stage_slos[stage].columns, strict=False)
            if isnan(seen[2]) or any(real_s > due_s for real_s, due_s in pairs):
                return
        self.attained += 1


def observed(requests: Requests, key: int) -> Times | None:
    """TTFT, TPOT and end-to-end time of a request that has ended, beside the objective that it
    had at its arrival; ``None`` where it has not all its output.

    Of several stages it is, by objective, the one that took the largest share of what it states,
    and that share of the time that the whole request states. ``O(stages)``.
    """
    seen = list(_stages(requests, key))
    if isnan(seen[-1][2]):
        return None
    if len(seen) == 1:
        return seen[0]
    first = int(requests.first_stage[key])
    found: list[float | None] = []
    for place, whole_s in enumerate(requests.arrivals[key].slo.times_s):
        of_stages = [requests.stage_slos[first + n].columns[place] for n in range(len(seen))]
        worst = max(own[place] / due_s for own, due_s in zip(seen, of_stages, strict=True))
        found.append(None if whole_s is None else worst * whole_s)
    return found[0], found[1], found[2]


def late(requests: Requests, key: int) -> tuple[float | None, float | None]:
    """TTFT and TPOT of a request in progress, seconds, each of the first stage that is late by now;
    ``None`` if there is none. ``O(tokens)``."""
    stage = int(requests.first_stage[key])
    offset, slo = int(requests.offsets[stage]), requests.stage_slos[stage]
    times_s = requests.emitted_s[offset : offset + int(requests.stage_tokens[stage])]
    times_s = times_s[: int(np.count_nonzero(~np.isnan(times_s)))]
    if not len(times_s):
        return None, None
    ttft_s = float(times_s[0]) - requests.arrivals[key].arrival_s
    return slo.late(ttft_s, tpot_s(times_s, slo.tpot_anchor), len(times_s))


def _stages(requests: Requests, key: int) -> Iterator[Seen]:
    """Its stages, in order."""
    start_s = requests.arrivals[key].arrival_s
    for stage in range(int(requests.first_stage[key]), int(requests.first_stage[key + 1])):
        offset, tokens = int(requests.offsets[stage]), int(requests.stage_tokens[stage])
        first_s = float(requests.emitted_s[offset])
        last_s = float(requests.emitted_s[offset + tokens - 1])
        anchor = requests.stage_slos[stage].tpot_anchor
        pace_s = tpot_s(requests.emitted_s[offset : offset + tokens], anchor) or 0.0
        yield first_s - start_s, pace_s, last_s - start_s
        start_s = last_s
