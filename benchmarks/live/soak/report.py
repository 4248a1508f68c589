"""The figures of a soak: outcomes of requests, growth, and leftovers at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from sluice.benchmarks.live.replay.client import End, Outcome
from sluice.benchmarks.live.replay.kinds import Kind
from sluice.benchmarks.live.replay.report import of_class
from sluice.benchmarks.live.soak.batches import lost_lines
from sluice.benchmarks.live.soak.prometheus import agrees
from sluice.benchmarks.live.soak.trends import Sample, Series, Trend, trends
from sluice.benchmarks.options import percent

Json = dict[str, Any]

CUT_S = 5.0
"""How long after a router's death its clients may still find connections broken, seconds."""


MOST_FAILURES = 1_000
"""At most this many failed requests are listed one by one."""


class Injury(NamedTuple):
    """An injected fault: time from the load's start, kind, target, and duration."""

    at_s: float
    what: str
    target: str
    seconds: float

    @property
    def cuts(self) -> bool:
        """Whether it cuts client connections, because the router that held them is dead."""
        return self.what == "kill router"


def lost(outcomes: Sequence[Outcome], injuries: Sequence[Injury]) -> list[Outcome]:
    """Requests that ended neither complete nor in an explicit error. A cut connection counts as
    lost, except if its router was killed while it was open: no other router can resume it."""
    deaths = [injury.at_s for injury in injuries if injury.cuts]

    def excused(each: Outcome) -> bool:
        ended_s = float("inf") if each.ended_s is None else each.ended_s
        return any(each.sent_s <= at_s + CUT_S and at_s <= ended_s for at_s in deaths)

    return [
        each
        for each in outcomes
        if each.end is End.SILENT or (each.end is End.CUT and not excused(each))
    ]


def summary(
    outcomes: Sequence[Outcome],
    kinds: Sequence[Kind],
    samples: Sequence[Sample],
    injuries: Sequence[Injury],
    left: dict[str, float],
    batches: Mapping[str, int],
    scraped: Json | None = None,
) -> Json:
    """The report, as plain data.

    Args:
        kinds: of each outcome. samples: after the warm-up. left: figures that were not 0 when the
        application was idle at the end. batches: number of batch lines by how they ended. scraped:
        see :func:`sluice.benchmarks.live.soak.prometheus.comparison`; ``None``: without Prometheus.
    """
    gone = lost(outcomes, injuries)
    grown = trends(samples)
    classes = sorted({each.slo.service_class for each in outcomes})
    return {
        "lost": len(gone) + lost_lines(batches),
        "lost_reasons": dict(Counter(each.reason for each in gone)),
        "left_over": left,
        "growing": [_named(each.series) for each in grown if each.grows],
        "classes": {
            name: of_class([each for each in outcomes if each.slo.service_class == name])
            for name in classes
        },
        "all": of_class(outcomes),
        "batch_lines": {end: count for end, count in batches.items() if count},
        "ends": _ends(outcomes, kinds),
        "failures": [
            {"at_s": round(each.sent_s, 1), "kind": kind.name, "end": f"{each.end}: {each.reason}"}
            for each, kind in zip(outcomes, kinds, strict=True)
            if each.end in (End.FAILED, End.CUT, End.SILENT)
        ][:MOST_FAILURES],
        "late_ms": round(1e3 * max((each.late_s for each in outcomes), default=0.0), 1),
        "injuries": [
            {**injury._asdict(), "at_s": round(injury.at_s, 1), "seconds": round(injury.seconds, 1)}
            for injury in injuries
        ],
        "trends": [_of_trend(each) for each in grown],
        "samples": _series(samples),
        "prometheus": scraped,
    }


def is_well(found: Json) -> bool:
    """Whether nothing was lost, nothing grows and nothing is left over, and Prometheus's counters
    match the clients' counts."""
    wrong = found["lost"] or found["growing"] or found["left_over"]
    return not wrong and agrees(found["prometheus"])


def _ends(outcomes: Sequence[Outcome], kinds: Sequence[Kind]) -> dict[str, dict[str, int]]:
    """Kind of request -> number of requests by how they ended, with the reason."""
    found: dict[str, Counter[str]] = {}
    for outcome, kind in zip(outcomes, kinds, strict=True):
        words = f"{outcome.end}: {outcome.reason}" if outcome.reason else str(outcome.end)
        found.setdefault(kind.name, Counter())[words] += 1
    return {name: dict(counts.most_common()) for name, counts in sorted(found.items())}


def _of_trend(trend: Trend) -> Json:
    figures = {"first": trend.first, "last": trend.last}
    figures |= {"per_hour": trend.slope, "error": trend.error}
    rounded = {name: round(value, 2) for name, value in figures.items()}
    return {"series": _named(trend.series), **rounded, "grows": trend.grows}


def _series(samples: Sequence[Sample]) -> Json:
    names = sorted({series for sample in samples for series in sample.values})
    values = {
        _named(name): [
            None if name not in sample.values else round(sample.values[name], 2)
            for sample in samples
        ]
        for name in names
    }
    return {"at_s": [round(sample.at_s, 1) for sample in samples], **values}


def _named(series: Series) -> str:
    return " ".join(part for part in series if part)


def tables(found: Json) -> list[Table]:
    """The summary as tables."""
    shown = [_requests(found), _endings(found)]
    if found["trends"]:
        shown.append(_trends(found["trends"]))
    if found["prometheus"] is not None:
        shown.append(_scraped(found["prometheus"]))
    if found["injuries"]:
        shown.append(_injuries(found["injuries"]))
    return shown


def _requests(found: Json) -> Table:
    table = Table(
        *("class", "offered", "answered", "in time", "promised", "kept", "refused", "failed"),
        *("left", "cut"),
        title="requests",
        caption=f"lost: {found['lost']} {found['lost_reasons'] or ''}",
    )
    for name, row in [*found["classes"].items(), ("all", found["all"])]:
        table.add_row(
            *(name, str(row["sent"]), str(row["answered"]), percent(row["attained"])),
            *(str(row["guaranteed"]), percent(row["kept"]), str(row["refused"])),
            *(str(row["failed"]), str(row["left"]), str(row["cut"])),
        )
    return table


def _endings(found: Json) -> Table:
    table = Table("kind", "how they ended", title="by kind of request")
    for name, counts in [*found["ends"].items(), ("lines of batches", found["batch_lines"])]:
        table.add_row(name, ", ".join(f"{words} {count}" for words, count in counts.items()))
    return table


def _trends(rows: list[Json]) -> Table:
    table = Table(
        *("what", "first quarter", "last quarter", "per hour", "verdict"),
        title="process resources; the application's own figures",
    )
    for row in rows:
        table.add_row(
            *(row["series"], f"{row['first']:,.1f}", f"{row['last']:,.1f}"),
            f"{row['per_hour']:+,.1f} ± {row['error']:,.1f}",
            "[red]grows" if row["grows"] else "flat",
        )
    return table


def _scraped(found: Json) -> Table:
    falls = found["falls"]
    table = Table(
        *("what", "Prometheus", "clients", "verdict"),
        title="Prometheus against the clients' counts",
        caption=f"counters that fell: {falls or 'none'}",
    )
    for row in found["counts"]:
        least, most = f"{row['least']:,.0f}", f"{row['most']:,.0f}"
        told = least if least == most else f"{least} to {most}"
        verdict = "[red]differs" if row["differs"] else "agrees"
        table.add_row(row["what"], f"{row['scraped']:,.0f}", told, verdict)
    return table


def _injuries(rows: list[Json]) -> Table:
    table = Table("at, s", "fault", "target", "for, s", title="faults")
    for row in rows:
        seconds = f"{row['seconds']:.1f}" if row["seconds"] else ""
        table.add_row(f"{row['at_s']:.0f}", row["what"], row["target"], seconds)
    return table
