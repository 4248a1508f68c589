"""What the simulated router knows of its replicas: their last reports that arrived, and its own
decisions that no report has confirmed.

The rules are those of the controller's mirror and ledger: a replica that is silent for too long, is
draining, or was seen to fail gets nothing; a reservation counts until its replica reports the
request, or until it expires.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scheduling import kernels
from scheduling.admission.pab import replica_pab_tokens
from scheduling.kernels import Floats
from scheduling.latency import LatencyModel
from scheduling.routing import ReplicaView
from scheduling.state import ROW, RUNNING, WAITING
from simulation.config import ClusterConfig


class Report(NamedTuple):
    """The state of a replica when it was made.

    Attributes:
        made_s: when.
        table: its live requests, a copy.
        free_blocks: KV blocks.
        latency: what it plans with.
        received: how many requests it had been given until then.
        draining: it wants no more.
    """

    made_s: float
    table: Floats
    free_blocks: int
    latency: LatencyModel
    received: int
    draining: bool = False


class _Known:
    """One replica: its last report, and what is on its way to it."""

    def __init__(self, given: Sequence[int], report: Report, now_s: float) -> None:
        self.given = given
        self.report = report
        self.arrived_s = now_s
        self.confirmed = 0
        self.reserved = 0
        self.reserved_tokens = 0
        self.reported: ReplicaView | None = None


class Mirror:
    """The replicas of one role.

    The views are made when they are first asked for after a report, so that reports that no
    decision looks at cost nothing but their copy.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._known: dict[str, _Known] = {}
        # Key -> replica, tokens, when; the oldest first.
        self._reservations: OrderedDict[int, tuple[str, int, float]] = OrderedDict()

    def register(self, name: str, given: Sequence[int], report: Report, now_s: float) -> None:
        """A replica says hello. ``given`` are the keys that it gets, in order; the list grows."""
        self._known[name] = _Known(given, report, now_s)

    def hear(self, name: str, report: Report, now_s: float) -> None:
        """A report arrives; one of a replica that is not known is ignored."""
        known = self._known.get(name)
        if known is None:
            return
        known.report, known.arrived_s, known.reported = report, now_s, None
        for key in known.given[known.confirmed : report.received]:
            if self._reservations.get(key, ("",))[0] == name:
                self.release(key)
        known.confirmed = report.received

    def forget(self, name: str) -> None:
        """A replica is gone, with what was on its way to it."""
        if self._known.pop(name, None) is not None:
            for key in [k for k, made in self._reservations.items() if made[0] == name]:
                del self._reservations[key]

    def reserve(self, key: int, name: str, tokens: int, now_s: float) -> None:
        """A request is sent to a replica."""
        self.release(key)
        self._reservations[key] = (name, tokens, now_s)
        known = self._known[name]
        known.reserved += 1
        known.reserved_tokens += tokens

    def release(self, key: int) -> None:
        """A reservation ends, if there is one."""
        made = self._reservations.pop(key, None)
        if made is not None:
            known = self._known[made[0]]
            known.reserved -= 1
            known.reserved_tokens -= made[1]

    def views(self, now_s: float) -> list[ReplicaView]:
        """The replicas that may be chosen, in order of registration.

        Where none has been heard of lately, those that are merely silent are given, as Serve's own
        routing would take over there.
        """
        while self._reservations:
            key, made = next(iter(self._reservations.items()))
            if now_s - made[2] < self._config.reservation_ttl_s:
                break
            self.release(key)
        willing = [(n, k) for n, k in self._known.items() if not k.report.draining]
        patience_s = self._config.stale_after_s
        fresh = [(name, known) for name, known in willing if now_s < known.arrived_s + patience_s]
        return [self._view(name, known) for name, known in fresh or willing]

    def _view(self, name: str, known: _Known) -> ReplicaView:
        if known.reported is None:
            known.reported = self._reported(name, known.report)
        seen = known.reported
        return seen._replace(
            reserved=known.reserved,
            prefill_tokens=seen.prefill_tokens + known.reserved_tokens,
            pab_tokens=seen.pab_tokens - known.reserved_tokens,
        )

    def _reported(self, name: str, report: Report) -> ReplicaView:
        table = report.table
        prefill = kernels.is_prefill(table)
        running = int(np.count_nonzero(table[:, kernels.RUNNING]))
        pab_tokens = replica_pab_tokens(
            state_rows(table),
            report.made_s,
            report.latency,
            self._config.reference_ttft_s,
            self._config.reference_tpot_s,
        )
        return ReplicaView(
            name,
            len(table) - running,
            running,
            0,
            int(table[prefill, kernels.PENDING].sum()),
            int(table[~prefill, kernels.COMPUTED].sum()),
            report.free_blocks,
            pab_tokens,
        )


def state_rows(table: Floats) -> np.ndarray:
    """An engine's rows as a replica reports them, of dtype :data:`scheduling.state.ROW`."""
    rows = np.zeros(len(table), ROW)
    for name, column in (
        ("arrival_s", kernels.ARRIVAL),
        ("first_token_s", kernels.FIRST_TOKEN),
        ("last_token_s", kernels.LAST_TOKEN),
        ("ttft_s", kernels.TTFT),
        ("tpot_s", kernels.TPOT),
        ("e2e_s", kernels.E2E),
        ("priority", kernels.PRIORITY),
        ("prompt_tokens", kernels.PROMPT),
        ("computed_tokens", kernels.COMPUTED),
        ("pending_tokens", kernels.PENDING),
        ("emitted_tokens", kernels.EMITTED),
        ("kv_blocks", kernels.KV_BLOCKS),
        ("best_effort", kernels.BEST_EFFORT),
    ):
        rows[name] = table[:, column]
    rows["expected_tokens"] = np.nan_to_num(table[:, kernels.EXPECTED])
    rows["phase"] = np.where(table[:, kernels.RUNNING] > 0, RUNNING, WAITING)
    return rows
