"""The figures of the real experiment on guarantees, from its client's outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any, Final

import numpy as np
from rich.table import Table

from sluice.benchmarks.experiments.promises import MARGINS, NONE
from sluice.benchmarks.live.replay.client import End, Outcome
from sluice.benchmarks.live.replay.report import GUARANTEED
from sluice.benchmarks.options import percent, slashed

Json = dict[str, Any]

COUNTS: Final = (
    *("sent", "attained", "failed", "promised", "kept", "kept_ttft", "kept_tpot", "unanswered"),
    *("promised_late", "kept_late", "router_promised", "router_kept"),
)
"""Figures that are summed over the seeds of a cell."""

ALL: Final = "all"
"""The load of the line that sums up all loads."""

_Z = 1.96  # of a two-sided interval of 95 % under a normal distribution


def counts(outcomes: Sequence[Outcome], seconds: float) -> Json:
    """The client's counts of one run whose arrivals lasted ``seconds``.

    Of the guaranteed requests: ``kept`` met every objective, ``kept_ttft`` and ``kept_tpot`` that
    one, and ``unanswered`` were not answered to the end, so they met none. ``promised_late`` and
    ``kept_late`` count those sent in the second half. ``late`` has an entry for each objective that
    an answered request missed; see :func:`misses`.
    """
    promised = [each for each in outcomes if each.admission == GUARANTEED]
    second = [each for each in promised if each.sent_s >= seconds / 2]
    late = [miss for each in promised for miss in misses(each)]
    missed = {name: sum(each["objective"] == name for each in late) for name in ("ttft", "tpot")}
    unanswered = sum(each.end is not End.ANSWERED for each in promised)
    answered = len(promised) - unanswered
    return {
        "seconds": seconds,
        "sent": len(outcomes),
        "attained": sum(each.attained for each in outcomes),
        "failed": sum(each.end is not End.ANSWERED for each in outcomes),
        "promised": len(promised),
        "kept": sum(each.attained for each in promised),
        "kept_ttft": answered - missed["ttft"],
        "kept_tpot": answered - missed["tpot"],
        "unanswered": unanswered,
        "promised_late": len(second),
        "kept_late": sum(each.attained for each in second),
        "late": late,
        "client_late_ms": [
            round(1e3 * float(late_s), 1)
            for late_s in np.quantile([each.late_s for each in outcomes], (0.5, 0.99, 1.0))
        ],
    }


def misses(outcome: Outcome) -> Iterator[Json]:
    """How late an answer was, for each objective that it missed: ``late_s`` is the delay of its
    first token after the TTFT, or of its last one after the time that the TPOT allows from the
    first on; ``times`` is the same in multiples of the objective, and ``ttfts`` is ``late_s`` in
    multiples of the TTFT."""
    if outcome.end is not End.ANSWERED or outcome.ttft_s is None or outcome.tpot_s is None:
        return
    ttft_s, tpot_s = outcome.slo.columns[:2]
    gaps = outcome.output_tokens - 1
    observed = ("ttft", outcome.ttft_s, ttft_s, 1), ("tpot", outcome.tpot_s, tpot_s, gaps)
    for objective, took_s, stated_s, tokens in observed:
        if took_s > stated_s:
            late_s = (took_s - stated_s) * tokens
            yield {
                "class": outcome.slo.service_class,
                "objective": objective,
                "late_s": round(late_s, 4),
                "times": round(took_s / stated_s - 1, 4),
                "ttfts": round(late_s / ttft_s, 4),
            }


def cells(runs: Sequence[Json]) -> list[Json]:
    """Each machine, load and system over all seeds, then each machine and system over all loads."""
    found: list[Json] = []
    machines = list(dict.fromkeys(run["machine"] for run in runs))
    for machine in machines:
        own = [run for run in runs if run["machine"] == machine]
        for load in (*dict.fromkeys(run["load"] for run in own), ALL):
            of_load = [run for run in own if load in (run["load"], ALL)]
            for system in dict.fromkeys(run["system"] for run in of_load):
                part = [run for run in of_load if run["system"] == system]
                labels = {"machine": machine, "load": load, "system": system}
                found.append({**labels, **pooled(part)})
    return found


def pooled(runs: Sequence[Json]) -> Json:
    """The sums of some runs, shares with their intervals, and quantiles of the lateness."""
    sums = {name: sum(run[name] for run in runs) for name in COUNTS}
    seconds = sum(run["seconds"] for run in runs)
    late = [miss for run in runs for miss in run["late"]]
    return {
        "runs": len(runs),
        "seconds": seconds,
        **sums,
        "promised_share": _share(sums["promised"], sums["sent"]),
        **{
            f"{name}_share": _share(sums[name], sums["promised"])
            for name in ("kept", "kept_ttft", "kept_tpot")
        },
        "kept_interval": interval(sums["kept"], sums["promised"]),
        "kept_late_share": _share(sums["kept_late"], sums["promised_late"]),
        "router_kept_share": _share(sums["router_kept"], sums["router_promised"]),
        "attained_share": _share(sums["attained"], sums["sent"]),
        "attained_interval": interval(sums["attained"], sums["sent"]),
        "goodput": round(sums["kept"] / seconds, 3),
        "goodput_interval": [
            round(share * sums["sent"] / seconds, 3)
            for share in interval(sums["kept"], sums["sent"]) or ()
        ],
        "late": {
            name: lateness([each for each in late if each["objective"] == name])
            for name in ("ttft", "tpot")
        },
        "client_late_ms": [max(run["client_late_ms"][at] for run in runs) for at in range(3)],
        "others_cores": max(run["others_cores"] for run in runs),
    }


def lateness(late: Sequence[Json]) -> Json | None:
    """Number of misses, and P50 and P95 of their lateness; ``None`` without misses."""
    if not late:
        return None
    found: Json = {"missed": len(late)}
    for name in ("times", "late_s", "ttfts"):
        quantiles = np.quantile([each[name] for each in late], (0.5, 0.95))
        found[name] = [round(float(value), 4) for value in quantiles]
    return found


def interval(count: int, of: int) -> list[float] | None:
    """The 95 % confidence interval of a share (Wilson 1927); ``None`` if ``of`` is 0."""
    if not of:
        return None
    share, spread = count / of, _Z * _Z / of
    middle = share + spread / 2
    reach = _Z * sqrt(share * (1 - share) / of + spread / (4 * of))
    ends = (middle - reach) / (1 + spread), (middle + reach) / (1 + spread)
    return [round(min(max(end, 0.0), 1.0), 4) for end in ends]


def _share(count: int, of: int) -> float | None:
    return round(count / of, 4) if of else None


def tables(found: Sequence[Json], capacity: float) -> list[Table]:
    """The cells as tables: guarantees, lateness of the missed ones, and checks of the run."""
    return [_promises(found, capacity), _lateness(found), _trust(found)]


def _promises(found: Sequence[Json], capacity: float) -> Table:
    table = Table(
        *("machine", "load", "system", "sent", "promised", "kept", "95 %", "kept TTFT"),
        *("kept TPOT", "kept, 2nd half", "goodput /s", "to none", "attained"),
        title=f"guarantees as their client saw them; load 1 is {capacity:.2f} requests/s",
        caption=f"Goodput: promised and kept. To none: goodput over that of {NONE!r}. The interval "
        "takes requests as independent; those of one burst are not, so it is too narrow.",
    )
    none = {(cell["machine"], cell["load"]): cell for cell in found if cell["system"] == NONE}
    for cell in found:
        promised = percent(cell["promised_share"], "-")
        base = none.get((cell["machine"], cell["load"]))
        ratio = cell["goodput"] / base["goodput"] if base and base["goodput"] else None
        table.add_row(
            *_labels(cell),
            *(str(cell["sent"]), f"{cell['promised']}, {promised}"),
            *(percent(cell["kept_share"], "-"), _percents(cell["kept_interval"])),
            *(percent(cell["kept_ttft_share"], "-"), percent(cell["kept_tpot_share"], "-")),
            *(percent(cell["kept_late_share"], "-"), f"{cell['goodput']:.2f}"),
            "-" if ratio is None or cell["system"] != MARGINS else f"{ratio:.3f}",
            percent(cell["attained_share"], "-"),
        )
    return table


def _lateness(found: Sequence[Json]) -> Table:
    table = Table(
        *("machine", "load", "system", "TTFT missed", "late, times", "late, s"),
        *("TPOT missed", "late, times", "last token late, s", "last token late, TTFTs"),
        "unanswered",
        title="missed guarantees: P50 / P95 of their lateness",
        caption="Wanted: a P95 of at most 1 TTFT.",
    )
    for cell in found:
        ttft, tpot = cell["late"]["ttft"], cell["late"]["tpot"]
        table.add_row(
            *_labels(cell),
            *_late(ttft, "times", "late_s"),
            *_late(tpot, "times", "late_s", "ttfts"),
            str(cell["unanswered"]),
        )
    return table


def _trust(found: Sequence[Json]) -> Table:
    table = Table(
        *("machine", "load", "system", "runs", "seconds", "failed", "client late, ms: P50"),
        *("P99", "most", "kept by the client", "kept by the router", "cores of others"),
        title="whether these figures can be trusted",
        caption="Worst run of each cell. Where client and router differ, the client was late.",
    )
    for cell in found:
        table.add_row(
            *_labels(cell),
            *(str(cell["runs"]), f"{cell['seconds']:g}", str(cell["failed"])),
            *(f"{value:.0f}" for value in cell["client_late_ms"]),
            *(percent(cell["kept_share"], "-"), percent(cell["router_kept_share"], "-")),
            f"{cell['others_cores']:.2f}",
        )
    return table


def _labels(cell: Mapping[str, Any]) -> tuple[str, str, str]:
    load = cell["load"]
    return cell["machine"], load if load == ALL else f"{load:g}", cell["system"]


def _late(late: Json | None, *names: str) -> list[str]:
    if late is None:
        return ["0", *("-" for _ in names)]
    pairs = [slashed(late[name], 2) for name in names]
    return [str(late["missed"]), *pairs]


def _percents(ends: Sequence[float] | None) -> str:
    return "-" if ends is None else " to ".join(f"{100 * end:.1f}" for end in ends)
