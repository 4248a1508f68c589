"""The figures of a replay, from its client's outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from sluice.benchmarks.live.replay.client import End, Outcome
from sluice.benchmarks.live.resources import Usage
from sluice.benchmarks.options import percent, slashed

GUARANTEED, BEST_EFFORT = "guaranteed", "best-effort"
DECILES = 10

Json = dict[str, Any]


def summary(outcomes: Sequence[Outcome], usage: Usage, step_ratio: float) -> Json:
    """The report of one setting, as plain data.

    Args:
        outcomes: of every request that was sent.
        usage: of the cluster's processes during the replay.
        step_ratio: mean of real over predicted step time in the engines.
    """
    names = sorted({each.slo.service_class for each in outcomes})
    return {
        "classes": {
            name: of_class([each for each in outcomes if each.slo.service_class == name])
            for name in names
        },
        "all": of_class(outcomes),
        "refused": _reasons(outcomes, End.REFUSED),
        "failed": _reasons(outcomes, End.FAILED),
        "cut": _reasons(outcomes, End.CUT),
        "silent": _reasons(outcomes, End.SILENT),
        "predictions": predictions(outcomes),
        "late_ms": _milliseconds([each.late_s for each in outcomes], (0.5, 0.99, 1.0)),
        "step_ratio": round(step_ratio, 3),
        "machine_busy": usage.machine_busy,
        "processes": {kind: used._asdict() for kind, used in usage.kinds.items()},
    }


def of_class(outcomes: Sequence[Outcome]) -> Json:
    """Counts, attainment and latencies of some requests.

    ``attained``: share of all sent requests that were answered within their objectives; refused
    requests count as missed. ``kept``: the same share of the guaranteed requests.
    """
    ends = Counter(each.end for each in outcomes)
    promised = [each for each in outcomes if each.admission == GUARANTEED]
    answered = [each for each in outcomes if each.end is End.ANSWERED]
    return {
        "sent": len(outcomes),
        "answered": ends[End.ANSWERED],
        "guaranteed": len(promised),
        "best_effort": sum(each.admission == BEST_EFFORT for each in outcomes),
        "refused": ends[End.REFUSED],
        "failed": ends[End.FAILED],
        "cut": ends[End.CUT],
        "left": ends[End.LEFT],
        "silent": ends[End.SILENT],
        "attained": _share(outcomes),
        "kept": _share(promised),
        "ttft_ms": _milliseconds([each.ttft_s or 0.0 for each in answered]),
        "tpot_ms": _milliseconds([each.tpot_s or 0.0 for each in answered]),
    }


def predictions(outcomes: Sequence[Outcome]) -> list[Json]:
    """Observed minus predicted TTFT of the guaranteed requests, by decile of the prediction.

    With fewer than ten requests there are fewer parts.
    """
    pairs = sorted(
        (each.predicted_ttft_s, each.ttft_s)
        for each in outcomes
        if each.predicted_ttft_s is not None and each.ttft_s is not None
    )
    if not pairs:
        return []
    parts = np.array_split(1e3 * np.array(pairs), min(DECILES, len(pairs)))
    return [
        {
            "requests": len(part),
            "predicted_ms": _rounded(part[:, 0], (0.0, 0.5, 1.0)),
            "observed_ms": _rounded(part[:, 1], (0.1, 0.5, 0.9)),
            "error_ms": _rounded(part[:, 1] - part[:, 0], (0.1, 0.5, 0.9)),
        }
        for part in parts
    ]


def _reasons(outcomes: Sequence[Outcome], end: End) -> dict[str, int]:
    return dict(Counter(each.reason for each in outcomes if each.end is end).most_common())


def _share(outcomes: Sequence[Outcome]) -> float | None:
    """Share that was answered in time; ``None`` without requests."""
    if not outcomes:
        return None
    return round(sum(each.attained for each in outcomes) / len(outcomes), 4)


def _milliseconds(
    values_s: Sequence[float], quantiles: tuple[float, ...] = (0.5, 0.99)
) -> list[float] | None:
    return _rounded(1e3 * np.array(values_s), quantiles) if values_s else None


def _rounded(values: np.ndarray, quantiles: tuple[float, ...]) -> list[float]:
    return [round(float(value), 1) for value in np.quantile(values, quantiles)]


def tables(settings: dict[str, Json]) -> list[Table]:
    """The summaries of all settings as tables."""
    shown = [_attainment(settings)]
    for name, entry in settings.items():
        shown.append(_details(name, entry))
        if entry["predictions"]:
            shown.append(_predictions(name, entry["predictions"]))
    return [*shown, _machine(settings)]


def _attainment(settings: dict[str, Json]) -> Table:
    table = Table("class", *settings, title="answered within the objective, of all that were sent")
    for label, rows in _by_class(settings).items():
        table.add_row(label, *(percent(row["attained"]) for row in rows))
    return table


def _by_class(settings: dict[str, Json]) -> dict[str, list[Json]]:
    """Class, or "all" -> the figures of each setting."""
    rows = [{**entry["classes"], "all": entry["all"]} for entry in settings.values()]
    return {label: [row[label] for row in rows] for label in rows[0]}


def _details(name: str, entry: Json) -> Table:
    reasons = {
        reason: count
        for end in ("refused", "failed", "cut", "silent")
        for reason, count in entry[end].items()
    }
    words = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
    table = Table(
        *("class", "sent", "answered", "promised", "kept", "best effort", "refused", "failed"),
        *("cut", "silent", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms"),
        title=f"{name} (policy {entry['policy']}, admission {entry['admission']})",
        caption=words or None,
    )
    for label, row in [*entry["classes"].items(), ("all", entry["all"])]:
        table.add_row(
            *(label, str(row["sent"]), str(row["answered"]), str(row["guaranteed"])),
            *(percent(row["kept"]), str(row["best_effort"]), str(row["refused"])),
            *(str(row["failed"]), str(row["cut"]), str(row["silent"])),
            *(slashed(row["ttft_ms"]), slashed(row["tpot_ms"])),
        )
    return table


def _machine(settings: dict[str, Json]) -> Table:
    table = Table("", *settings, title="resources, until the last request was sent")
    entries = list(settings.values())
    table.add_row("machine busy", *(percent(entry["machine_busy"]) for entry in entries))
    table.add_row("sent late, p50 / p99 / most ms", *(slashed(e["late_ms"], 1) for e in entries))
    table.add_row("real / predicted step", *(f"{entry['step_ratio']:.3f}" for entry in entries))
    for kind in sorted({kind for entry in entries for kind in entry["processes"]}):
        used = [entry["processes"].get(kind) for entry in entries]
        cells = [f"{each['cores']:.2f}, {each['memory_mib']:.0f}" if each else "" for each in used]
        table.add_row(f"{kind}: cores, MiB", *cells)
    return table


def _predictions(name: str, parts: list[Json]) -> Table:
    table = Table(
        *("predicted, ms", "requests", "observed p10 / p50 / p90", "error p10 / p50 / p90"),
        title=f"{name}: TTFT, observed minus predicted, by decile of the prediction",
    )
    for part in parts:
        low, _, high = part["predicted_ms"]
        table.add_row(
            f"{low:.0f} to {high:.0f}",
            str(part["requests"]),
            slashed(part["observed_ms"]),
            " / ".join(f"{value:+.0f}" for value in part["error_ms"]),
        )
    return table
