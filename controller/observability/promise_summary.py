"""How well guarantees are kept, as plain JSON data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.controller.observability.records import Reliable
from sluice.controller.state.promises import EndedPromise
from sluice.scheduling.placement.reliability import QUANTILES
from sluice.scheduling.request.objective import Objective


def promise_summary(
    level: float,
    margins: Mapping[Objective, float],
    ended: Sequence[EndedPromise],
    overall: Reliable,
    replicas: Mapping[str, Reliable],
    now_s: float,
) -> dict[str, Any]:
    """A summary of the latest guarantees. ``O(guarantees + replicas)``.

    Args:
        level: target share of guarantees that are kept.
        margins: safety margin of each objective, as a share of it.
        ended: the guarantees, the oldest first.
        overall, replicas: reliability of the TTFT forecasts, of all and by replica.
        now_s: the time on the clock of ``ended``.
    """
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
