"""The deciding actor's state for an operator, as plain JSON data. Durations are milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from sluice.controller.config import ControllerConfig, fingerprint_of
from sluice.controller.observability.readings import Detail, Reliable, ReplicaDetail
from sluice.controller.state.promises import EndedPromise
from sluice.controller.state.quarantine import Quarantined
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.state import RUNNING, SUMMARY, WAITING
from sluice.scheduling.placement.reliability import QUANTILES
from sluice.scheduling.request.job import Tier
from sluice.scheduling.request.objective import Objective

# How well guarantees are kept, as plain JSON data.


def promise_summary(
    level: float,
    margins: Mapping[Objective, float],
    ended: Sequence[EndedPromise],
    overall: Reliable,
    replicas: Mapping[str, Reliable],
    now_s: float,
) -> dict[str, Any]:
    """A summary of the latest promises, ``O(promises + replicas)``. ``level`` is the target
    share that is kept, ``margins`` the safety margin of each objective as a share of it."""
    classes = Counter((each.service_class, each.kept) for each in ended)
    placed = Counter((each.replica_id, each.kept) for each in ended)
    return {
        "level": level,
        "margins": {name: round(margin, 4) for name, margin in margins.items()},
        "window_ms": round((now_s - ended[0].at_s) * 1000) if ended else 0,
        "promised": len(ended),
        "kept": sum(each.kept for each in ended),
        "moved": sum(each.moved for each in ended),
        "moved_kept": sum(each.moved and each.kept for each in ended),
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


def overview(config: ControllerConfig, detail: Detail) -> dict[str, Any]:
    """The state of the deciding actor and of its replicas. ``O(replicas)``."""
    return {
        "epoch": detail.epoch,
        "fingerprint": fingerprint_of(config),
        "up_ms": round(detail.up_s * 1000),
        "policy": config.policy,
        "admission": config.admission,
        "reservations": detail.figures.reservations,
        "reservations_expired": detail.expired,
        "decision_ms": _took_ms(detail.took_s),
        "calibration": promise_summary(
            config.promise_level,
            detail.figures.margins,
            detail.promises,
            detail.reliability,
            {name: each.reliability for name, each in detail.replicas.items()},
            detail.figures.now_s,
        ),
        "replicas": [
            _replica(detail, place, name, detail.replicas[name])
            for place, name in enumerate(detail.figures.replicas)
            if name in detail.replicas
        ],
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
