"""A workload through one simulated engine that suspends prefills, with admission in front of it."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.state import ROW
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.job import Tier
from sluice.scheduling.request.kernels import BEST_EFFORT, FIELDS, KV_BLOCKS, TPOT, TTFT, Floats
from sluice.scheduling.routing import RouteQuery
from sluice.scheduling.routing import make_policy as make_routing
from sluice.simulation.config import ClusterConfig
from sluice.simulation.forward import LLAMA3_8B, Model
from sluice.simulation.mirror import Sent, VirtualMirror
from sluice.simulation.preemption import BLOCK_TOKENS, Counts, PreemptiveEngine, SuspensionConfig
from sluice.simulation.requests import Requests
from sluice.simulation.run import HEADROOM
from sluice.simulation.truth import Truth
from sluice.simulation.workload import Workload

REFUSED = "no replica can meet its SLO"

_REPLICA = "prefill"
_BLOCKS = 1 << 24
_NO_ROWS = np.zeros(0, ROW)


class PrefillRun(NamedTuple):
    """A run: its requests with the times of their first tokens, and what was done."""

    requests: Requests
    counts: Counts


class Gate:
    """Decides which requests an engine is given, as the router in front of one replica does, from
    a report that is made at the request's arrival.

    Args:
        admission: decides which requests can be guaranteed.
        refuses: requests that cannot be guaranteed are refused; otherwise they are best effort.
        requests: of the run.
        latency: of the replica.
        now_s: the time.
    """

    def __init__(
        self,
        admission: AdmissionPolicy,
        refuses: bool,
        requests: Requests,
        latency: LatencyModel,
        now_s: float,
    ) -> None:
        self._mirror = VirtualMirror(ClusterConfig(), make_routing("round_robin"), admission)
        self._tiers = frozenset({Tier.GUARANTEED}) if refuses else frozenset(Tier)
        self._requests = requests
        self._latency = latency
        self._given: list[int] = []
        self._mirror.register(_REPLICA, self._given, self._sent(np.empty((0, FIELDS)), 0.0), now_s)

    def _sent(self, table: Floats, now_s: float) -> Sent:
        free = _BLOCKS - int(table[:, KV_BLOCKS].sum())
        report = Report(
            _NO_ROWS,
            now_s,
            0.0,
            now_s,
            self._latency,
            free,
            _BLOCKS,
            BLOCK_TOKENS,
            _BLOCKS,
            preempts=True,
        )
        return Sent(table, report, len(self._given))

    def lets_in(self, key: int, engine: PreemptiveEngine, now_s: float) -> bool:
        """Whether a request is admitted to the engine, guaranteed or not; a refused one fails."""
        requests = self._requests
        self._mirror.hear(_REPLICA, self._sent(engine.table(requests, now_s), now_s), now_s)
        arrival = requests.arrivals[key]
        waited_s = now_s - arrival.arrival_s
        query = RouteQuery(
            key, arrival.slo, arrival.prompt_tokens, waited_s, self._tiers, output_tokens=1
        )
        placement = self._mirror.place(query, now_s)
        if placement.replica_id is None:
            requests.failures[key] = REFUSED
            return False
        self._given.append(key)
        requests.serve_as(key, placement.tier is Tier.BEST_EFFORT)
        return True


def simulate_prefills(
    workload: Workload,
    truth: Truth,
    believed: LatencyModel | None = None,
    config: SuspensionConfig | None = None,
    model: Model = LLAMA3_8B,
    seed: int = 0,
    admission: AdmissionPolicy | None = None,
    refuses: bool = False,
) -> PrefillRun:
    """Run ``workload`` through one engine until every request has its tokens or was refused.

    Args:
        workload: what arrives. With ``admission`` each request emits one token.
        truth: real times of a task.
        believed: the latency model used for decisions; default: the truth with head-room.
        config: where prefills stop.
        model: the operators.
        seed: of the noise.
        admission: see :class:`Gate`; default: every request is served by its objective.
        refuses: see :class:`Gate`.

    Raises:
        ValueError: a request emits more than one token, and there is an admission policy.
    """
    longer = [key for key, each in enumerate(workload.arrivals) if each.output_tokens != 1]
    if longer and admission is not None:
        raise ValueError(
            f"workload {workload.name}: request {longer[0]} emits "
            f"{workload.arrivals[longer[0]].output_tokens} tokens; with an admission policy this "
            "engine only prefills, and takes requests of one"
        )
    believed = truth.model.with_headroom(HEADROOM) if believed is None else believed
    requests = Requests(workload)
    rng = np.random.default_rng(seed)
    engine = PreemptiveEngine(config or SuspensionConfig(), model, truth, believed, rng)
    gate = None
    if admission is not None:
        gate = Gate(admission, refuses, requests, believed.with_headroom(1.0), 0.0)
    engine.counts.end_s = _drive(engine, requests, gate)
    return PrefillRun(requests, engine.counts)


def _drive(engine: PreemptiveEngine, requests: Requests, gate: Gate | None) -> float:
    """Run the clock until all ``requests`` have ended; return the time."""
    arrivals = requests.arrivals
    places = requests.offsets[requests.first_stage[:-1]].copy()
    arrived, now_s = 0, 0.0
    while True:
        next_s = arrivals[arrived].arrival_s if arrived < len(arrivals) else inf
        next_s = min(next_s, engine.next_s)
        if next_s == inf:
            return now_s
        now_s = max(now_s, next_s)
        while arrived < len(arrivals) and arrivals[arrived].arrival_s <= now_s:
            if gate is None or gate.lets_in(arrived, engine, now_s):
                row = requests.rows[arrived]
                apart = bool(row[BEST_EFFORT])
                ttft_s = inf if apart else float(row[TTFT])
                arrival_s, tokens = arrivals[arrived].arrival_s, arrivals[arrived].prompt_tokens
                output, tpot_s = arrivals[arrived].output_tokens, float(row[TPOT])
                engine.submit(str(arrived), tokens, arrival_s, ttft_s, apart, output, tpot_s)
            arrived += 1
        for key, emitted_s in engine.round(now_s):
            requests.emitted_s[places[int(key)]] = emitted_s
            places[int(key)] += 1
