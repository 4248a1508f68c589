"""Compiles what a decision runs, before the first one that matters."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.state import ROW, RUNNING, WAITING
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.placement.late_first_tokens import late
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from sluice.scheduling.routing import RouteQuery, RoutingPolicy, Tier
from sluice.scheduling.routing.most_gain import NEAREST

_MODEL = LinearLatency(a=0.005, b=0.0002, c=0.000001)
_PROMISED, _BEST_EFFORT = frozenset({Tier.GUARANTEED}), frozenset({Tier.BEST_EFFORT})


def warm_up_placement(
    make_routing: Callable[[], RoutingPolicy], make_admission: Callable[[], AdmissionPolicy | None]
) -> None:
    """Run every compiled loop of placement and its metrics once, on a toy fleet of more replicas
    than a policy tests first. Some seconds of one core if nothing is compiled yet, else less than
    one."""
    fleet = Fleet()
    for index in range(NEAREST + 1):
        fleet.report(str(index), _report(), 0.0)
    placer = Placer(fleet, make_routing(), make_admission())
    queries = [
        RouteQuery(1, SLO(ttft_s=1.0, tpot_s=0.1), 100),
        RouteQuery(2, SLO(ttft_s=1e-6), 100, tiers=_PROMISED, session=1, prefix=(1, 2)),
        RouteQuery(3, SLO(), 100, tiers=_BEST_EFFORT),
        RouteQuery(4, SLO(e2e_s=60.0), 100),
        RouteQuery(5, SLO.of_stages((Stage(1.0), Stage(1.0, prompt_tokens=10))), 100),
        RouteQuery(6, SLO(ttft_s=1.0), 100, moves_from="0", brings_kv=True),
    ]
    placer.order(queries, 0.0)
    for query in queries:
        placer.place(query, 0.0)
    fleet.slack_s(0.0)
    late(fleet, 0, 2_048, (0.0, 0.0), np.ones(1), np.ones(1))


def _report() -> Report:
    """A waiting and a running request of each tier."""
    rows = np.zeros(4, ROW)
    rows["ttft_s"], rows["tpot_s"], rows["e2e_s"], rows["priority"] = 1.0, 0.1, inf, 1
    rows["prompt_tokens"] = rows["pending_tokens"] = 100
    rows["first_token_s"] = rows["last_token_s"] = nan
    rows["phase"] = WAITING
    running = rows[::2]
    running["computed_tokens"], running["pending_tokens"], running["emitted_tokens"] = 100, 1, 1
    running["first_token_s"] = running["last_token_s"] = 0.0
    running["kv_blocks"], running["phase"] = 7, RUNNING
    rows["best_effort"][2:] = 1
    return Report(rows, 0.0, 0.0, 0.0, _MODEL, 1_000, 1_000, 16, 256)
