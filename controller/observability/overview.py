"""The state of each replica for an operator, as plain JSON data.

Durations are milliseconds, as everywhere on the wire.
"""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import Any

from sluice.controller.state.mirror import Mirror, MirroredReplica
from sluice.controller.state.quarantine import Quarantine
from sluice.controller.state.request_classes import RequestClasses
from sluice.scheduling import fleet_rows as figure
from sluice.scheduling.fleet import Fleet
from sluice.scheduling.job import Tier
from sluice.scheduling.state import RUNNING, WAITING

OPERATOR = "operator"
REPLICA = "replica"
"""What drains a replica: an operator's request, or the replica's own shutdown."""


def describe(
    mirror: Mirror,
    fleet: Fleet,
    classes: RequestClasses,
    quarantine: Quarantine,
    replica_id: str,
    now_s: float,
) -> dict[str, Any]:
    """The state of one known replica. ``O(its live requests)``."""
    replica = mirror.replicas[replica_id]
    row = fleet.row_of[replica_id]
    figures = fleet.figures[row].tolist()
    free, total = int(figures[figure.FREE_BLOCKS]), int(figures[figure.TOTAL_BLOCKS])
    pab_tokens = figures[figure.PAB]
    summary = replica.summary
    return {
        "replica_id": replica_id,
        "node_id": replica.hello.node_id,
        "model": replica.hello.model,
        "policy": replica.hello.policy,
        "role": replica.hello.role,
        "condition": fleet.condition(row, now_s),
        "drain": drain_of(mirror, fleet, replica_id),
        "quarantine": _quarantine(quarantine, replica_id, now_s),
        "report_age_ms": _ms(now_s - replica.received_s),
        "reports": replica.seq,
        "waiting": int(figures[figure.WAITING]),
        "running": int(figures[figure.RUNNING]),
        "reserved": int(figures[figure.RESERVED]),
        "queue": _queue(replica, classes),
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


def drain_of(mirror: Mirror, fleet: Fleet, replica_id: str) -> str | None:
    """What drains a known replica: :data:`OPERATOR`, :data:`REPLICA`, or ``None``."""
    if fleet.is_closed(replica_id):
        return OPERATOR
    return REPLICA if mirror.replicas[replica_id].draining else None


def _quarantine(quarantine: Quarantine, replica_id: str, now_s: float) -> dict[str, Any] | None:
    """The quarantine of a replica, if it is in one: reason, breaker state, time since its start,
    and time until the replica is tried: ``None`` if it must first report that it works."""
    found = quarantine.of(replica_id, now_s)
    if found is None:
        return None
    return {
        "reason": found.cause.value,
        "state": found.state.value,
        "since_ms": _ms(now_s - found.since_s),
        "retry_in_ms": None if found.retry_in_s is None else _ms(found.retry_in_s),
    }


def left_at(fleet: Fleet, replica_id: str) -> dict[str, int]:
    """Requests that a replica has yet to finish; 0 for an unknown replica."""
    row = fleet.row_of.get(replica_id)
    waiting = running = reserved = 0
    if row is not None:
        figures = fleet.figures[row]
        waiting, running = int(figures[figure.WAITING]), int(figures[figure.RUNNING])
        reserved = int(figures[figure.RESERVED])
    return {
        "left": waiting + running + reserved,
        "waiting": waiting,
        "running": running,
        "reserved": reserved,
    }


def _queue(replica: MirroredReplica, classes: RequestClasses) -> list[dict[str, Any]]:
    """The live requests by class and tier."""
    rows = replica.table[: replica.used_slots]
    rows = rows[rows["phase"] > 0]
    names = classes.of(rows["key"].tolist())
    lent, phases = rows["best_effort"].tolist(), rows["phase"].tolist()
    counts = Counter(zip(names, lent, phases, strict=True))
    groups = sorted({(name, tier) for name, tier, _ in counts})
    return [
        {
            "class": name or None,
            "tier": (Tier.BEST_EFFORT if tier else Tier.GUARANTEED).value,
            "waiting": counts[name, tier, WAITING],
            "running": counts[name, tier, RUNNING],
        }
        for name, tier in groups
    ]


def _ms(seconds: float) -> float | None:
    return round(seconds * 1000, 3) if isfinite(seconds) else None
