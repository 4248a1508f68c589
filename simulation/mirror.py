"""What the simulated router knows of its replicas: the fleet and the decisions of production
(:mod:`sluice.scheduling.placement.placer`), fed with simulated reports.

The rules are the controller's: a replica that is silent for too long, is draining, or was seen to
fail gets nothing; a reservation counts until its replica reports the request, or until it expires.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.fleet.fleet import Fleet, FleetSettings
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.state import rows_of
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.placement.output_lengths import OutputLengths
from sluice.scheduling.placement.placer import Placer
from sluice.scheduling.placement.together import Turn
from sluice.scheduling.request.job import NO_REPLICA, PLACED, RouteDecision
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.request.objective import Times
from sluice.scheduling.roles import WHOLE, Role
from sluice.scheduling.routing import RouteQuery, RoutingPolicy
from sluice.simulation.config import ClusterConfig
from sluice.simulation.judged import Judged

PREFILL_KEYS = 1 << 40
"""Added to the key of a request: that of the computation of its prompt for another replica."""


class Sent(NamedTuple):
    """A report under way.

    Attributes:
        table: the replica's live requests, a copy.
        report: the rest of it, without rows.
        received: how many keys the replica had been given until then.
        held: hashes of the blocks of prompts in its prefix cache.
        later: see :meth:`sluice.simulation.requests.Requests.later`.
    """

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
    """The replicas of all roles, and the decisions about them.

    Reports are taken in when the next decision is made, so those that no decision looks at cost
    nothing but their copy.

    Args:
        config: how reports are judged.
        routing, admission: the policies that decide.
        depths: tokens of a prompt up to the end of each hashed block, by hash.
    """

    def __init__(
        self,
        config: ClusterConfig,
        routing: RoutingPolicy,
        admission: AdmissionPolicy | None = None,
        depths: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.fleet = Fleet(
            FleetSettings(
                config.aged_after_s,
                config.stale_after_s,
                config.reservation_ttl_s,
                config.reference_ttft_s,
            )
        )
        self.calibration: Calibration | None = None
        """The margins of guarantees, if there are any and margins are enabled."""
        if admission is not None and config.promise_level is not None:
            self.calibration = Calibration(config.promise_level)
        self._lengths = OutputLengths()
        self._placer = Placer(
            self.fleet, routing, admission, calibration=self.calibration, lengths=self._lengths
        )
        self.window_s = admission.window_s if admission is not None else 0.0
        """How long a request waits for others that are decided with it, seconds."""
        self._known: dict[str, _Known] = {}
        self._depths = depths
        self._turn = 0

    @property
    def replicas(self) -> int:
        """How many it knows."""
        return len(self._known)

    def register(self, name: str, given: Sequence[int], sent: Sent, now_s: float) -> None:
        """A replica says hello. ``given`` are the keys that it gets, in order; the list grows."""
        self._known[name] = _Known(given, sent.report.role)
        self.hear(name, sent, now_s)

    def hear(self, name: str, sent: Sent, now_s: float) -> None:
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
        """Learn the margins, and the output lengths of its class, from the client-side times of a
        request that was served completely."""
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

    def order(self, queries: Sequence[RouteQuery], now_s: float) -> list[Turn]:
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

    def without_decision(self) -> RouteDecision:
        """Where no replica has been heard of lately, those that are merely silent take turns, as
        Serve's own routing would take over there: of the ones that do both phases, or that decode.
        """
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

    def load(self, judged: Judged, role: Role, now_s: float) -> Load:
        """The load on the replicas of a role, for autoscaling."""
        self._take_in()
        demand = self._placer.demand
        return demand.load(self.fleet, now_s, judged.count, judged.attained, role)

    def _take_in(self) -> None:
        for name, known in self._known.items():
            if known.news is not None:
                sent, heard_s = known.news
                known.news = None
                self.fleet.confirm(known.given[known.confirmed : sent.received], name)
                known.confirmed = sent.received
                rows = rows_of(sent.table, sent.later)
                self.fleet.report(name, sent.report._replace(rows=rows, role=known.role), heard_s)
                self._hold(name, known, sent.held)

    def _hold(self, name: str, known: _Known, held: frozenset[int]) -> None:
        """What changed in a replica's prefix cache."""
        row, index = self.fleet.row_of[name], self.fleet.prefixes
        index.drop(row, known.held - held)
        index.hold(row, {block: self._depths[block] for block in held - known.held})
        known.held = held
