"""Fleets for tests: replicas by their figures, or by the requests that they report."""

from __future__ import annotations

from math import inf, nan

import numpy as np

from sluice.scheduling.fleet import rows as fleet_rows
from sluice.scheduling.fleet.fleet import Fleet, FleetSettings
from sluice.scheduling.fleet.local_orders import SLIDE
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.state import ROW, RUNNING, WAITING
from sluice.scheduling.fleet.transfer import NO_TRANSFERS, Transfers
from sluice.scheduling.latency.model import LatencyModel, LinearLatency
from sluice.scheduling.request.deadline import paced
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role
from sluice.scheduling.routing import Job, RouteQuery

MODEL = LinearLatency(a=0.010, b=0.000_1, c=0.000_001)
PLAIN = SLO(ttft_s=1.0, tpot_s=0.1)
QUERY = RouteQuery(key=7, slo=SLO(ttft_s=1.0), prompt_tokens=500)


def row(
    slo: SLO = PLAIN,
    prompt: int = 100,
    *,
    key: int = 1,
    arrival_s: float = 0.0,
    emitted: int = 0,
    computed: int = 0,
    first_token_s: float = nan,
    running: bool = False,
    best_effort: bool = False,
    expected: int = 0,
) -> np.ndarray:
    """A request as its replica reports it; a decode where tokens have left."""
    made = np.zeros((), ROW)
    made["key"], made["arrival_s"] = key, arrival_s
    made["ttft_s"], made["tpot_s"], made["e2e_s"], made["priority"] = slo.columns
    made["prompt_tokens"] = prompt
    made["computed_tokens"] = computed or (prompt + emitted - 1 if emitted else 0)
    made["pending_tokens"] = 1 if emitted else prompt - computed
    made["emitted_tokens"] = emitted
    made["first_token_s"] = made["last_token_s"] = first_token_s
    made["kv_blocks"] = -(-int(made["computed_tokens"]) // 16)
    made["expected_tokens"] = expected
    made["best_effort"] = best_effort
    made["phase"] = RUNNING if running or emitted or computed else WAITING
    return made


def report(
    *rows: np.ndarray,
    made_s: float = 0.0,
    latency: LatencyModel = MODEL,
    free_blocks: int = 10_000,
    places: int = 256,
    draining: bool = False,
    preempts: bool = False,
    role: Role = "mixed",
    transfers: Transfers = NO_TRANSFERS,
    local_order: int = SLIDE,
) -> Report:
    """A report of a replica that has just ended a step, on the fleet's own clock."""
    table = np.array(list(rows), ROW)
    return Report(
        table, made_s, 0.0, made_s, latency, free_blocks, 20_000, 16, places, draining, preempts,
        role, transfers, local_order,
    )  # fmt: skip


def fleet_of(*reports: Report, now_s: float = 0.0, settings: FleetSettings | None = None) -> Fleet:
    """A fleet of replicas ``"0"``, ``"1"``, and so on."""
    fleet = Fleet(settings)
    for index, made in enumerate(reports):
        fleet.report(str(index), made, now_s)
    return fleet


def figures_of(*replicas: dict[str, float]) -> Fleet:
    """A fleet of idle replicas but for these figures, by their names in
    :mod:`sluice.scheduling.fleet.rows`."""
    fleet = fleet_of(*[report() for _ in replicas])
    for index, figures in enumerate(replicas):
        for name, value in figures.items():
            fleet.figures[index, getattr(fleet_rows, name)] = value
    return fleet


def job(fleet: Fleet, query: RouteQuery = QUERY, now_s: float = 0.0, cached: float = 0.0) -> Job:
    """The query on every replica of ``fleet``."""
    rows = np.array(sorted(fleet.row_of.values()))
    tokens = np.full(len(rows), cached)
    work_s = fleet_rows.work_on(fleet.pieces, rows, float(query.prompt_tokens), tokens)
    due_s = now_s - query.waited_s + query.slo.columns[0]
    output = min(256.0, query.output_tokens or inf)
    nowhere = np.zeros(len(rows), bool)
    _, tpot_s, e2e_s, priority = query.slo.columns
    if e2e_s < inf:
        _, tpot_s = paced(*query.slo.columns[:3], output)
    return Job(
        query, rows, tokens, work_s, np.zeros(len(rows)), nowhere, now_s, due_s,
        float(query.waited_s), tpot_s, priority, float(query.prompt_tokens), output,
    )  # fmt: skip
