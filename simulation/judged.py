"""Which requests met their objectives, counted as they end."""

from __future__ import annotations

from math import isnan

from simulation.requests import Requests


class Judged:
    """Counts what the edge of a real cluster counts: requests with an objective that ended, and
    those of them that met it, by mean TPOT. ``O(stages)`` per request.

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
        start_s = requests.arrivals[key].arrival_s
        for stage in stages:
            offset, tokens = int(requests.offsets[stage]), int(requests.stage_tokens[stage])
            first_s = float(requests.emitted_s[offset])
            last_s = float(requests.emitted_s[offset + tokens - 1])
            ttft_s, tpot_s, e2e_s, _ = requests.stage_slos[stage].columns
            pace_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else 0.0
            late = first_s - start_s > ttft_s or pace_s > tpot_s or last_s - start_s > e2e_s
            if isnan(last_s) or late:
                return
            start_s = last_s
        self.attained += 1
