"""The figures of the real experiment on guarantees, from its client's outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.table import Table

from sluice.benchmarks.experiments.promises import NONE
from sluice.benchmarks.live.client import End, Outcome
from sluice.benchmarks.live.report import (
    GUARANTEED,
    Json,
    interval,
    milliseconds,
    quantiles,
    share,
    table,
)

COUNTS: Final = (
    *("sent", "attained", "failed", "promised", "kept", "kept_ttft", "kept_tpot", "unanswered"),
    *("promised_late", "kept_late", "router_promised", "router_kept"),
)
"""Figures that are summed over the seeds of a cell."""

ALL: Final = "all"
"""The load of the line that sums up all loads."""


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
        "client_late_ms": milliseconds([each.late_s for each in outcomes], (0.5, 0.99, 1.0)),
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
    for machine in dict.fromkeys(run["machine"] for run in runs):
        own = [run for run in runs if run["machine"] == machine]
        for load in (*dict.fromkeys(run["load"] for run in own), ALL):
            of_load = [run for run in own if load in (run["load"], ALL)]
            base = None
            for system in dict.fromkeys(run["system"] for run in of_load):
                cell = pooled([run for run in of_load if run["system"] == system])
                base = cell["goodput"] if system == NONE else base
                cell["goodput_to_none"] = round(cell["goodput"] / base, 3) if base else None
                found.append({"machine": machine, "load": load, "system": system, **cell})
    return found


def pooled(runs: Sequence[Json]) -> Json:
    """The sums of some runs, shares with their intervals, and quantiles of the lateness."""
    sums = {name: sum(run[name] for run in runs) for name in COUNTS}
    sent, promised = sums["sent"], sums["promised"]
    seconds = sum(run["seconds"] for run in runs)
    late = [miss for run in runs for miss in run["late"]]
    goodput = interval(sums["kept"], sent) or ()
    return {
        "runs": len(runs),
        "seconds": seconds,
        **sums,
        "promised_share": share(promised, sent),
        "kept_share": share(sums["kept"], promised),
        "kept_interval": interval(sums["kept"], promised),
        "kept_ttft_share": share(sums["kept_ttft"], promised),
        "kept_tpot_share": share(sums["kept_tpot"], promised),
        "kept_late_share": share(sums["kept_late"], sums["promised_late"]),
        "router_kept_share": share(sums["router_kept"], sums["router_promised"]),
        "attained_share": share(sums["attained"], sent),
        "attained_interval": interval(sums["attained"], sent),
        "goodput": round(sums["kept"] / seconds, 3),
        "goodput_interval": [round(each * sent / seconds, 3) for each in goodput],
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
    names = ("times", "late_s", "ttfts")
    of_all = {name: quantiles([each[name] for each in late], (0.5, 0.95), 4) for name in names}
    return {"missed": len(late), **of_all}


def tables(found: Sequence[Json], capacity: float) -> list[Table]:
    """The cells as tables: guarantees, lateness of the missed ones, and checks of the run."""
    labels = ("machine", "load", "system")
    kept = ("kept_share", "kept_interval", "kept_ttft_share", "kept_tpot_share", "kept_late_share")
    late = [f"late.{each}" for each in ("ttft.missed", "ttft.times", "ttft.late_s", "tpot.missed")]
    late += [f"late.tpot.{each}" for each in ("times", "late_s", "ttfts")]
    trust = ("runs", "seconds", "failed", "client_late_ms", "kept_share", "router_kept_share")
    return [
        table(
            found,
            *(*labels, "sent", "promised", "promised_share", *kept),
            *("goodput", "goodput_to_none", "attained_share"),
            title=f"guarantees as their client saw them; load 1 is {capacity:.2f} requests/s",
            caption="Goodput: promised and kept, requests/s. The interval takes requests as "
            "independent; those of one burst are not, so it is too narrow.",
        ),
        table(
            found,
            *(*labels, *late, "unanswered"),
            title="missed guarantees: P50 / P95 of their lateness",
            caption="Wanted: a P95 of at most 1 TTFT.",
        ),
        table(
            found,
            *(*labels, *trust, "others_cores"),
            title="whether these figures can be trusted",
            caption="Worst run of each cell. Where client and router differ, the client was late.",
        ),
    ]
