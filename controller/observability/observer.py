"""The second actor: it merges the processes' metrics and explains the deciding actor's state.

The deciding actor never calls it, so requests are placed in the same way without it. Some two
seconds after a restart it has all pushed state again."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf, isfinite
from typing import Any

import numpy as np
from prometheus_client import Metric

from sluice.controller.config import ControllerConfig, fingerprint_of
from sluice.controller.observability.cells import DecidingActor
from sluice.controller.observability.decision_log import DecisionLog
from sluice.controller.observability.history import History
from sluice.controller.observability.instruments import NAMES, families, refused_metrics
from sluice.controller.observability.metrics import KEPT_S, controller_age, controller_up, text_of
from sluice.controller.observability.metrics_hub import MetricsHub
from sluice.controller.observability.readings import Detail, Reliable, ReplicaDetail
from sluice.controller.observability.recent_decisions import DECISIONS
from sluice.controller.state.promises import QUANTILES, EndedPromise
from sluice.controller.state.quarantine import Quarantined
from sluice.controller.transport.channel import NoAnswerError
from sluice.controller.transport.checks import checked, short
from sluice.protocol.messages import MetricsPush
from sluice.scheduling.autoscaling import Load
from sluice.scheduling.autoscaling.head_room import HeadRoomOptions
from sluice.scheduling.autoscaling.load import Pressure
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.state import RUNNING, SUMMARY, WAITING
from sluice.scheduling.placement.loops import LoopEnding
from sluice.scheduling.request.job import Tier
from sluice.scheduling.request.objective import Objective
from sluice.scheduling.roles import Role

_USAGE = {
    "engine_seconds": "sluice_engine_seconds",
    "gpu_seconds": "sluice_engine_gpu_seconds",
    "kv_block_seconds": "sluice_engine_kv_block_seconds",
    "promised": "sluice_client_promises",
}
"""What processes push by tenant and class, by its name in the answer on usage."""

# The deciding actor's state for an operator, as plain JSON data. Durations are milliseconds.


def promise_summary(
    level: float,
    margins: Mapping[Objective, float],
    ended: Mapping[EndedPromise, int],
    overall: Reliable,
    replicas: Mapping[str, Reliable],
    loops: Mapping[LoopEnding, int],
) -> dict[str, Any]:
    """A summary of the latest promises, ``O(promises + replicas)``. ``level`` is the target
    share that is kept, ``margins`` the safety margin of each objective as a share of it; ``loops``:
    the tool loops that ended since the controller's start."""
    classes: Counter[tuple[str, bool]] = Counter()
    placed: Counter[tuple[str, bool]] = Counter()
    moved: Counter[bool] = Counter()
    for each, count in ended.items():
        classes[each.service_class, each.kept] += count
        placed[each.replica_id, each.kept] += count
        moved[each.kept] += count if each.moved else 0
    return {
        "level": level,
        "margins": {name: round(margin, 4) for name, margin in margins.items()},
        "promised": sum(ended.values()),
        "kept": sum(count for (_, kept), count in classes.items() if kept),
        "moved": sum(moved.values()),
        "moved_kept": moved[True],
        "loops": {
            "ended": sum(loops.values()),
            "promised": sum(count for each, count in loops.items() if each.promised),
            "kept": sum(count for each, count in loops.items() if each.promised and each.kept),
        },
        "quantiles": list(QUANTILES),
        "reliability": _curve(overall),
        "classes": [
            {"class": name, **_counts(classes, name)} for name in sorted({n for n, _ in classes})
        ],
        "replicas": [
            {
                "replica_id": name,
                **_counts(placed, name),
                "reliability": _curve(replicas[name]),
            }
            for name in sorted(replicas)
        ],
    }


def _counts(found: Counter[tuple[str, bool]], name: str) -> dict[str, int]:
    kept = found[name, True]
    return {"promised": kept + found[name, False], "kept": kept}


def _curve(found: Reliable) -> dict[str, Any]:
    return {"count": found.forecasts, "observed": [round(share, 4) for share in found.shares]}


_GPU_GAUGES = {
    "utilization": "sluice_replica_gpu_utilization_ratio",
    "memory_used_bytes": "sluice_replica_gpu_memory_used_bytes",
    "memory_bytes": "sluice_replica_gpu_memory_bytes",
}
"""What replicas push of their GPUs, by its name in the view for operators."""


def overview(
    config: ControllerConfig, detail: Detail, gpus: Mapping[str, dict[str, float]]
) -> dict[str, Any]:
    """The state of the deciding actor and of its replicas; ``gpus`` of those that have some.
    ``O(replicas)``."""
    return {
        "epoch": detail.epoch,
        "fingerprint": fingerprint_of(config),
        "up_ms": round(detail.up_s * 1000),
        "policy": config.policy,
        "admission": config.admission,
        "startup_ms": None if detail.figures.startup_s is None else _ms(detail.figures.startup_s),
        "reservations": detail.figures.reservations,
        "reservations_expired": detail.expired,
        "decision_ms": _took_ms(detail.took_s),
        "calibration": promise_summary(
            config.promise_level,
            detail.figures.margins,
            detail.promises,
            detail.reliability,
            {name: each.reliability for name, each in detail.replicas.items()},
            detail.figures.loops,
        ),
        "pressure": [_pressure(role, each) for role, each in detail.pressure.items()],
        "replicas": [
            _replica(detail, place, name, detail.replicas[name])
            | ({"gpu": gpus[name]} if name in gpus else {})
            for place, name in enumerate(detail.figures.replicas)
            if name in detail.replicas
        ],
    }


def _pressure(role: Role, found: Pressure) -> dict[str, Any]:
    """The demand on the replicas of a role, and how many the autoscaler would have for it."""
    return {
        "role": role,
        "window_ms": round(found.span_s * 1000),
        "ready": int(found.ready),
        "demand": round(found.demand, 3),
        "needed": ceil(found.demand / TARGET_LOAD - 1e-9),
    }


def _took_ms(took_s: Sequence[float]) -> dict[str, float | int | None]:
    """How long decisions took, milliseconds."""
    if not took_s:
        return {"count": 0, "p50": None, "p99": None, "max": None}
    p50, p99, longest = (np.percentile(took_s, (50, 99, 100)) * 1000).tolist()
    return {"count": len(took_s), "p50": p50, "p99": p99, "max": longest}


def _replica(detail: Detail, place: int, name: str, own: ReplicaDetail) -> dict[str, Any]:
    """The state of one replica. ``place``: its index in the figures."""
    found, summary = detail.figures, np.frombuffer(own.summary, SUMMARY)[0]
    figures = found.figures[place].tolist()
    free, total = int(figures[figure.FREE_BLOCKS]), int(figures[figure.TOTAL_BLOCKS])
    pab_tokens = float(found.pab_tokens[place])
    return {
        "replica_id": name,
        "node_id": own.node_id,
        "model": own.model,
        "policy": own.policy,
        "role": found.roles[place],
        "condition": found.conditions[place],
        "drain": own.drain,
        "quarantine": _quarantine(found.quarantined.get(name), found.now_s),
        "report_age_ms": _ms(found.ages_s[place]),
        "reports": own.reports,
        "waiting": int(figures[figure.WAITING]),
        "running": int(figures[figure.RUNNING]),
        "reserved": int(figures[figure.RESERVED]),
        "queue": _queue(own.queue),
        "prefill_tokens": int(figures[figure.TOKENS]),
        "prefill_ms": _ms(figures[figure.PREFILL_S]),
        "best_effort_prefill_ms": _ms(figures[figure.BEST_EFFORT_S]),
        "decodes": int(figures[figure.DECODES]),
        "context_tokens": int(figures[figure.CONTEXT]),
        "kv_blocks_free": free,
        "kv_blocks_total": total,
        "kv_usage": round(1 - free / total, 4) if total else None,
        # Infinite for a model in which tokens cost nothing; JSON has no infinity.
        "pab_tokens": round(pab_tokens, 1) if isfinite(pab_tokens) else None,
        "last_step_ms": _ms(float(summary["last_step_s"])),
        "predicted_step_ms": _ms(float(summary["predicted_step_s"])),
        "latency_correction": round(float(summary["correction"]), 4),
        "latency_fixed_correction": round(float(summary["fixed_correction"]), 4),
        "latency_spread": round(float(summary["step_spread"]), 4),
        "best_effort_wait_ms": _ms(float(summary["best_effort_wait_s"])),
        "steps": int(summary["steps"]),
        "preemptions": int(summary["preemptions"]),
        "evictions": int(summary["evictions"]),
    }


def _quarantine(found: Quarantined | None, now_s: float) -> dict[str, Any] | None:
    """The quarantine of a replica, if it is in one: reason, breaker state, time since its start,
    and time until the replica is tried: ``None`` if it must first report that it works."""
    if found is None:
        return None
    return {
        "reason": found.cause.value,
        "state": found.state.value,
        "since_ms": _ms(now_s - found.since_s),
        "retry_in_ms": None if found.retry_in_s is None else _ms(found.retry_in_s),
    }


def _queue(counts: Mapping[tuple[str, int, int], int]) -> list[dict[str, Any]]:
    """The live requests by class and tier."""
    groups = sorted({(name, best_effort) for name, best_effort, _ in counts})
    return [
        {
            "class": name or None,
            "tier": (Tier.BEST_EFFORT if best_effort else Tier.GUARANTEED).value,
            "waiting": counts.get((name, best_effort, WAITING), 0),
            "running": counts.get((name, best_effort, RUNNING), 0),
        }
        for name, best_effort in groups
    ]


def _ms(seconds: float) -> float | None:
    return round(seconds * 1000, 3) if isfinite(seconds) else None


TARGET_LOAD = HeadRoomOptions().target_load
"""Share of a replica's time that promises may take, by default."""

SETTLING_S = 5.0
"""Time after a start in which all processes push their metrics, seconds."""


class Observer:
    """Metrics, history, decision log and the operator's view of one application."""

    def __init__(
        self,
        deciding: DecidingActor,
        config: ControllerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deciding = deciding
        self._config = config
        self._clock = clock
        self._hub = MetricsHub(reserved=NAMES)
        self._history = History()
        self._log = DecisionLog(config.make_routing())
        self._refused = 0
        # The controller's last own metrics, and when it gave them.
        self._own: list[Metric] = []
        self._own_s = -inf
        self._started_s = self._last_call_s = clock()

    @property
    def silent_s(self) -> float:
        """Seconds since any process last called it."""
        return self._clock() - self._last_call_s

    async def fingerprint(self) -> str:
        """See :func:`sluice.controller.config.fingerprint_of`."""
        self._touch()
        return fingerprint_of(self._config)

    async def push_metrics(self, push: MetricsPush) -> None:
        """Take a process's metrics. Raises ValueError: refused whole, as ``MetricsHub.push``."""
        now_s = self._touch()
        try:
            added = self._hub.push(push, now_s)
        except ValueError:
            self._refused += 1
            raise
        self._history.joined(added)
        self._history.note(self._hub, now_s)

    async def render_metrics(self) -> bytes:
        """All metrics in Prometheus' text format, ``O(series)``. If the controller does not
        answer, its own are the last ones, for at most ``KEPT_S``."""
        now_s = self._touch()
        try:
            self._own = list(families(await self._deciding.figures(), self._config.policy))
            self._own_s, up = self._clock(), True
        except NoAnswerError:
            up = False
        age_s = 0.0 if up else self._clock() - self._own_s
        own = [*self._own, controller_age(age_s)] if age_s <= KEPT_S else []
        # The controller's own metrics bypass the hub, whose limits are for pushed metrics.
        pushed = self._hub.families(self._clock())
        if now_s - self._started_s < SETTLING_S:
            # Only some processes have pushed: a scraper would count the others' totals as new.
            pushed = [family for family in pushed if family.type == "gauge"]
        # In a thread, so that pushes are not late meanwhile.
        status = refused_metrics(self._refused, self._hub.skipped), controller_up(up)
        return await asyncio.to_thread(text_of, [*own, *pushed, *status])

    async def load(self, role: Role | None = None) -> Load | None:
        """The load on all replicas, or those of ``role``; ``None`` if the controller does not
        answer. ``O(series of metrics by class)``. Raises ValueError: no such role."""
        if role is not None:
            checked("role", role, Role)
        self._touch()
        try:
            load = await self._deciding.demand(role)
        except NoAnswerError:
            return None
        judged, attained = self._history.objectives(self._hub)
        return load._replace(judged=judged, attained=attained)

    async def snapshot(self) -> dict[str, Any] | None:
        """The controller's state for an operator, as plain JSON data; ``None`` if the controller
        does not answer. ``O(replicas + series)``."""
        self._touch()
        try:
            detail = await self._deciding.detail()
        except NoAnswerError:
            return None
        return {
            **overview(self._config, detail, self._gpus()),
            "metric_sources": self._hub.sources,
            "shadow": self._shadow(),
            "recent": self._history.recent(self._hub, self._clock()),
        }

    async def decisions(self, limit: int) -> list[dict[str, Any]] | None:
        """The last decisions, the latest first; ``None`` if the controller does not answer.
        Raises ValueError: ``limit`` is no number from 1 to ``DECISIONS``."""
        if not isinstance(limit, int) or not 1 <= limit <= DECISIONS:
            raise ValueError(f"limit must be an integer from 1 to {DECISIONS}, got {short(limit)}")
        self._touch()
        try:
            latest = await self._deciding.latest_decisions(limit)
        except NoAnswerError:
            return None
        records = [pickle.loads(each) for each in latest.pickled]
        return list(self._log.explained(records, latest.now_s))

    async def usage(self) -> dict[str, Any]:
        """Who has used the engines, by tenant and class. ``O(series)``."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        counted_s = self._touch() - self._started_s
        for field, family in _USAGE.items():
            for _, labels, value in self._hub.series(family):
                of = dict(labels)
                by = {"client": of["client"], "class": of["class"]}
                row = rows.setdefault(
                    (of["client"], of["class"]), by | dict.fromkeys((*_USAGE, "kept"), 0.0)
                )
                row[field] += value
                row["kept"] += value if of.get("outcome") == "kept" else 0.0
        return {"counted_s": counted_s, "rows": [rows[key] for key in sorted(rows)]}

    def _gpus(self) -> dict[str, dict[str, float]]:
        """The use of the GPUs of each replica that has some."""
        found: dict[str, dict[str, float]] = {}
        for field, family in _GPU_GAUGES.items():
            for _, labels, value in self._hub.series(family):
                found.setdefault(dict(labels).get("replica", ""), {})[field] = value
        return found

    def _shadow(self) -> dict[str, Any] | None:
        """What other policies would have changed; ``None`` where none are configured."""
        if self._config.shadow is None:
            return None
        figures: dict[str, dict[str, float]] = {}
        for family in ("live", "replayed", "difference"):
            for _, labels, value in self._hub.series(f"sluice_shadow_{family}"):
                of = dict(labels)
                figures.setdefault(of["figure"], {})[of.get("bound", family)] = value
        windows = sum(value for *_, value in self._hub.series("sluice_shadow_windows"))
        policies = self._config.shadow.model_dump(exclude_none=True, exclude_defaults=True)
        return {"policies": policies, "windows": int(windows), "figures": figures}

    def _touch(self) -> float:
        """Note that a process called. Returns the time, monotonic seconds."""
        self._last_call_s = self._clock()
        return self._last_call_s
