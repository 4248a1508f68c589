"""Several simulated controllers that share the replicas, asked as a router asks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.autoscaling.load import sum_of
from sluice.scheduling.placement.cells import CellChoice, cell_of
from sluice.scheduling.placement.together import Turn
from sluice.scheduling.request.job import NO_REPLICA, RouteDecision
from sluice.scheduling.request.objective import Times
from sluice.scheduling.roles import Role
from sluice.scheduling.routing import RouteQuery, RoutingPolicy
from sluice.simulation.config import ClusterConfig
from sluice.simulation.judged import Judged
from sluice.simulation.mirror import Sent, VirtualMirror


class CellMirrors:
    """The mirrors of all cells, with the methods of one
    :class:`~sluice.simulation.mirror.VirtualMirror`.

    What each cell is asked, in which order, and which replicas it owns, is production's
    (:mod:`sluice.scheduling.placement.cells`).

    Raises:
        ValueError: the admission policy decides on several requests together, which no cell of the
            simulator does.
    """

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
        # Which cell decided last on each request.
        self._placed: dict[int, VirtualMirror] = {}
        self.calibration = self._cells[0].calibration
        """The first cell's margins; ``None``: no cell has any."""

    def _owner(self, name: str) -> VirtualMirror:
        return self._cells[cell_of(name, len(self._cells))]

    def register(self, name: str, given: Sequence[int], sent: Sent, now_s: float) -> None:
        """A replica says hello to its cell."""
        self._owner(name).register(name, given, sent, now_s)

    def hear(self, name: str, sent: Sent, now_s: float) -> None:
        """A report arrives at its replica's cell."""
        self._owner(name).hear(name, sent, now_s)

    def forget(self, name: str) -> None:
        """A replica is gone."""
        self._owner(name).forget(name)

    def release(self, key: int) -> None:
        """The router abandons the decision on a request."""
        for cell in self._cells:
            cell.release(key)

    def ended(self, key: int, tokens: int) -> None:
        """A request has ended."""
        if key in self._placed:
            self._placed[key].ended(key, tokens)

    def learn(
        self,
        key: int,
        observed: Times | None,
        service_class: str,
        output_tokens: int,
        now_s: float,
    ) -> None:
        """The cell that placed a request learns from it."""
        cell = self._placed.get(key, self._cells[0])
        cell.learn(key, observed, service_class, output_tokens, now_s)

    def behind(self, key: int, ttft_s: float | None, tpot_s: float | None, now_s: float) -> None:
        """The cell that placed a request learns that it is late."""
        if key in self._placed:
            self._placed[key].behind(key, ttft_s, tpot_s, now_s)

    def order(self, queries: Sequence[RouteQuery], now_s: float) -> list[Turn]:
        """In the order given."""
        return list(map(Turn, range(len(queries))))

    def place(self, query: RouteQuery, now_s: float, at: int | None = None) -> RouteDecision:
        """Ask one cell, or two."""
        # A router learns within a second which cells have replicas.
        up = [cell.replicas > 0 for cell in self._cells]
        questions = self._choice.questions(query, now_s, up)
        number, asked = next(questions)
        while True:
            cell = self._cells[number]
            decision = cell.decide(asked, now_s)
            self._choice.heard(number, cell.fleet.slack_s(now_s), now_s)
            self._choice.answered(number, asked, decision, now_s)
            try:
                number, asked = questions.send(decision)
            except StopIteration:
                break
        self._placed[query.key] = cell
        return cell.without_decision() if decision.reason == NO_REPLICA else decision

    def load(self, judged: Judged, role: Role, now_s: float) -> Load:
        """The load on the replicas of a role in all cells."""
        load = sum_of([cell.load(judged, role, now_s) for cell in self._cells])
        return load._replace(judged=judged.count, attained=judged.attained)
