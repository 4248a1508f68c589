"""The fleet and decisions of production (``placement.placer``), fed with simulated reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from math import isnan
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.autoscaling.load import sum_of
from sluice.scheduling.fleet.fleet import Fleet, FleetSettings
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.state import rows_of
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.placement.cells import CellChoice, cell_of
from sluice.scheduling.placement.output_lengths import OutputLengths
from sluice.scheduling.placement.placer import Placer, Planned
from sluice.scheduling.placement.quotes import Quote
from sluice.scheduling.request.job import NO_REPLICA, PLACED, RouteDecision
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import Times, tpot_s
from sluice.scheduling.roles import WHOLE, Role
from sluice.scheduling.routing import RouteQuery, RoutingPolicy
from sluice.simulation.config import ClusterConfig
from sluice.simulation.requests import Requests

Seen = tuple[float, float, float]
"""TTFT, TPOT and time to the last token of a stage, seconds; nan where it got not so far."""


class SLOCounter:
    """Counts requests with an objective that ended, and those that met it at every stage."""

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
    """TTFT, TPOT and end-to-end time; None without all output. Of several stages: the whole's
    objectives times the largest share that a stage took of its own."""
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
    """TTFT and TPOT of a request in progress, of the first stage late by now, or None."""
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
        own_tpot_s = tpot_s(requests.emitted_s[offset : offset + tokens], anchor) or 0.0
        yield first_s - start_s, own_tpot_s, last_s - start_s
        start_s = last_s


PREFILL_KEYS = 1 << 40
"""Added to the key of a request: that of the computation of its prompt for another replica."""


class Sent(NamedTuple):
    """A report under way: live requests, the rest, how many keys the replica had been given, hashes
    of cached blocks, and ``Requests.later``."""

    table: Floats
    report: Report
    received: int
    held: frozenset[int] = frozenset()
    later: Floats | None = None


class _Known:
    """One replica: what it is given, and the report that no decision has looked at yet."""

    def __init__(self, given: Sequence[int], role: Role) -> None:
        self.given = given
        self.confirmed = 0
        self.held: frozenset[int] = frozenset()
        self.draining = False
        self.role = role
        self.news: tuple[Sent, float] | None = None


class VirtualMirror:
    """The replicas of all roles, and the decisions. Reports are taken in at the next decision.
    ``depths``: prompt tokens up to the end of each hashed block, by hash."""

    def __init__(
        self,
        config: ClusterConfig,
        routing: RoutingPolicy,
        admission: AdmissionPolicy | None = None,
        depths: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        settings = FleetSettings(
            stale_after_s=config.stale_after_s, reservation_ttl_s=config.reservation_ttl_s
        )
        self.fleet = Fleet(settings)
        self.calibration: Calibration | None = None
        """The margins of promises, if there are any and margins are enabled."""
        if admission is not None and config.promise_level is not None:
            self.calibration = Calibration(config.promise_level)
        self._lengths = OutputLengths()
        self._placer = Placer(
            self.fleet, routing, admission, calibration=self.calibration, lengths=self._lengths
        )
        self.quotes = self._placer.quotes
        self.window_s = admission.window_s if admission is not None else 0.0
        """How long a request waits for others that are decided with it, seconds."""
        self._known: dict[str, _Known] = {}
        self._depths = depths
        self._turn = 0

    @property
    def replicas(self) -> int:
        """How many it knows."""
        return len(self._known)

    def of(self, name: str) -> VirtualMirror:
        """The mirror of a replica."""
        return self

    def by(self, key: int) -> VirtualMirror:
        """The mirror that decided last on a request."""
        return self

    def register(self, name: str, given: Sequence[int], sent: Sent, now_s: float) -> None:
        """A replica says hello. ``given`` are the keys that it gets, in order; the list grows."""
        self._known[name] = _Known(given, sent.report.role)
        self.receive(name, sent, now_s)

    def receive(self, name: str, sent: Sent, now_s: float) -> None:
        """A report arrives; one of a replica that is not known is ignored."""
        known = self._known.get(name)
        if known is not None:
            known.draining = sent.report.draining
            known.news = (sent, now_s)

    def assign(self, name: str, role: Role) -> None:
        """A known replica has another role from now on, also in the reports under way."""
        self._take_in()
        self._known[name].role = role
        self.fleet.assign(name, role)

    def forget(self, name: str) -> None:
        """A replica is gone, with what was on its way to it."""
        if self._known.pop(name, None) is not None:
            self.fleet.leave(name)

    def release(self, key: int) -> None:
        """The router abandons the decision on a request."""
        self.fleet.release((key, key + PREFILL_KEYS))

    def ended(self, key: int, tokens: int) -> None:
        """A request has ended after ``tokens`` tokens, prompt and output."""
        self._placer.shares.settle(key, tokens)

    def learn(
        self,
        key: int,
        observed: Times | None,
        service_class: str,
        output_tokens: int,
        now_s: float,
    ) -> None:
        """Learn the margins, and the output lengths of its class, from a request that has ended."""
        self.quotes.ended(key, observed)
        if self.calibration is None:
            return
        if observed is None:
            self.calibration.dropped(key)
        else:
            self.calibration.ended(key, *observed, now_s)
            self._lengths.observe(service_class, 0, output_tokens, ended=True)

    def behind(self, key: int, ttft_s: float | None, tpot_s: float | None, now_s: float) -> None:
        """Learn the margins from a request in progress that misses an objective."""
        if self.calibration is not None:
            self.calibration.behind(key, ttft_s, tpot_s, now_s)

    def order(self, queries: Sequence[RouteQuery], now_s: float) -> list[Planned]:
        """See :meth:`sluice.scheduling.placement.placer.Placer.order`."""
        self._take_in()
        return self._placer.order(queries, now_s)

    def place(self, query: RouteQuery, now_s: float, at: int | None = None) -> RouteDecision:
        """The decision on a request, or what happens without one (:meth:`without_decision`)."""
        placement = self.decide(query, now_s, at)
        return self.without_decision() if placement.reason == NO_REPLICA else placement

    def decide(self, query: RouteQuery, now_s: float, at: int | None = None) -> RouteDecision:
        """See :meth:`sluice.scheduling.placement.placer.Placer.place`."""
        self._take_in()
        return self._placer.place(query, now_s, at)

    def quote(self, query: RouteQuery, now_s: float) -> Quote:
        """See :meth:`sluice.scheduling.placement.placer.Placer.quote`."""
        self._take_in()
        return self._placer.quote(query, now_s)

    def without_decision(self) -> RouteDecision:
        """Silent replicas that serve whole requests take turns, as in Serve's own routing."""
        for role in WHOLE:
            willing = [
                name
                for name, known in self._known.items()
                if known.role == role and not known.draining
            ]
            if willing:
                self._turn += 1
                return RouteDecision(willing[self._turn % len(willing)], PLACED, role=role)
        return RouteDecision(None, NO_REPLICA)

    def load_of_all(self, now_s: float) -> Load:
        """The load by which roles change."""
        self._take_in()
        return self._placer.demand.load(self.fleet, now_s)

    def load(self, judged: SLOCounter, role: Role, now_s: float) -> Load:
        """The load on the replicas of a role, for autoscaling."""
        self._take_in()
        demand = self._placer.demand
        return demand.load(self.fleet, now_s, judged.count, judged.attained, role)

    def _take_in(self) -> None:
        for name, known in self._known.items():
            if known.news is not None:
                sent, received_s = known.news
                known.news = None
                self.fleet.confirm(known.given[known.confirmed : sent.received], name)
                known.confirmed = sent.received
                rows = rows_of(sent.table, sent.later)
                report = sent.report._replace(rows=rows, role=known.role)
                self.fleet.report(name, report, received_s)
                row, index = self.fleet.row_of[name], self.fleet.prefixes
                index.drop(row, known.held - sent.held)
                index.hold(row, {block: self._depths[block] for block in sent.held - known.held})
                known.held = sent.held


class CellMirrors:
    """All cells' mirrors behind the methods of one (``placement.cells``). Raises ValueError if
    admission decides on several requests together."""

    window_s = 0.0

    def __init__(
        self,
        config: ClusterConfig,
        routing: RoutingPolicy,
        admission: AdmissionPolicy | None = None,
        depths: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        if admission is not None and admission.window_s > 0.0:
            raise ValueError(f"with cells, admission {admission.name!r} needs window_ms: 0")
        self._cells = [
            VirtualMirror(config, deepcopy(routing), admission, depths) for _ in range(config.cells)
        ]
        self._choice = CellChoice(config.cells)
        self._placed: dict[int, VirtualMirror] = {}
        self.calibration = self._cells[0].calibration
        """The first cell's margins; ``None``: no cell has any."""

    def of(self, name: str) -> VirtualMirror:
        """The cell of a replica."""
        return self._cells[cell_of(name, len(self._cells))]

    def by(self, key: int) -> VirtualMirror:
        """The cell that decided last on a request."""
        return self._placed.get(key, self._cells[0])

    def release(self, key: int) -> None:
        """The router abandons the decision on a request."""
        for cell in self._cells:
            cell.release(key)

    def order(self, queries: Sequence[RouteQuery], now_s: float) -> list[Planned]:
        """In the order given."""
        return list(map(Planned, range(len(queries))))

    def quote(self, query: RouteQuery, now_s: float) -> Quote:
        """Ask the cell that would be asked first."""
        up = [cell.replicas > 0 for cell in self._cells]
        number, _ = next(self._choice.questions(query, now_s, up))
        return self._cells[number].quote(query, now_s)

    def place(self, query: RouteQuery, now_s: float, at: int | None = None) -> RouteDecision:
        """Ask one cell, or two."""
        # A router learns within a second which cells have replicas.
        up = [cell.replicas > 0 for cell in self._cells]
        questions = self._choice.questions(query, now_s, up)
        number, question = next(questions)
        while True:
            cell = self._cells[number]
            decision = cell.decide(question, now_s)
            self._choice.heard(number, cell.fleet.slack_s(now_s), now_s)
            self._choice.answered(number, question, decision, now_s)
            try:
                number, question = questions.send(decision)
            except StopIteration:
                break
        self._placed[query.key] = cell
        return cell.without_decision() if decision.reason == NO_REPLICA else decision

    def load(self, judged: SLOCounter, role: Role, now_s: float) -> Load:
        """The load on the replicas of a role in all cells."""
        load = sum_of([cell.load(judged, role, now_s) for cell in self._cells])
        return load._replace(judged=judged.count, attained=judged.attained)
