"""Tables on a terminal of any width, and those of the admin API's answer on a fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sluice.deploy.json_http import printable

# The admin API's data on a fleet, as tables and sentences for a terminal.

# Tables on a terminal of any width: a number or a name is never cut.


def print_table(table: Table, console: Console | None = None) -> None:
    """Print ``table``, beyond the console's width if its words do not fit."""
    console = console or Console()
    console.width = max(console.width, fit(table, console.width))
    console.print(table)


def print_list(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows as a table on a terminal; else a line each, with tabs, for `grep` and `cut`."""
    console = Console()
    if not console.is_terminal:
        for row in rows:
            print(*row, sep="\t")
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    print_table(table, console)


def fit(table: Table, width: int) -> int:
    """Break the columns of ``table`` between words to at most ``width``, without lines and
    margins if need be. Returns its width, more than ``width`` if its words do not fit."""
    least = [_widest(column, str.split) for column in table.columns]
    if sum(least) + _overhead(table, least) > width:
        compact(table)
    overhead = _overhead(table, least)
    full = [_widest(column, str.splitlines) for column in table.columns]
    widths = _shared(least, full, width - overhead)
    for column, each in zip(table.columns, widths, strict=True):
        column.width = each
    return sum(widths) + overhead


def compact(table: Table) -> Table:
    """``table`` with a blank between columns and nothing else."""
    table.box, table.padding, table.collapse_padding, table.pad_edge = None, (0, 1), True, False
    return table


def _shared(least: Sequence[int], full: Sequence[int], room: int) -> list[int]:
    """Widths from ``least`` to ``full`` that sum up to ``room``, the narrow ones widened first."""
    widths = list(least)
    for _ in range(room - sum(least)):
        tight = [index for index, width in enumerate(widths) if width < full[index]]
        if not tight:
            break
        widths[min(tight, key=widths.__getitem__)] += 1
    return widths


def _overhead(table: Table, widths: Sequence[int]) -> int:
    """The width of a table beyond its columns. Sets the columns to ``widths``."""
    for column, width in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap, column.overflow = width, False, "fold"
    console = Console(width=1 << 16)
    return console.measure(table).maximum - sum(widths)


def _widest(column: Column, parts: Callable[[str], list[str]]) -> int:
    """The width of the widest part of a column's texts."""
    texts = (
        each.plain if isinstance(each, Text) else Text.from_markup(str(each)).plain
        for each in chain([column.header], column.cells)
    )
    return max((cell_len(part) for text in texts for part in parts(text)), default=0)


FRESH, AGED, QUARANTINED = "fresh", "aged", "quarantined"
"""Conditions of a replica that takes new requests. Aged replicas take them only if none is fresh;
quarantined ones only if there are no others, and as a trial."""

_NONE = "-"

_CHECKED = (0.5, 0.9, 0.99)
"""Forecast quantiles that are shown."""

_REASONS = {
    "draining": "it is being stopped",
    "gone": "a router saw it leave",
    "stale": "it has not reported for too long",
}
"""Why a replica in this condition takes no new requests."""

_SILENT = (AGED, "stale")
"""Conditions caused by missing reports."""


def problems(fleet: Mapping[str, Any]) -> list[str]:
    """The problems that impair service, a sentence each; empty if there are none."""
    found = [
        f"the controller of {model} or its observer does not answer: without the controller "
        "Serve places the requests, and nothing is guaranteed"
        for model in fleet["unavailable"]
    ]
    fresh = Counter(row["model"] for row in fleet["replicas"] if row["condition"] == FRESH)
    taking = Counter(row["model"] for row in fleet["replicas"] if _takes(row))
    for model, facts in fleet["models"].items():
        if not facts["up"] or fresh[model]:
            continue
        found.append(
            f"every replica of {model} is late with its reports or in quarantine: they take "
            "requests, and nothing is guaranteed"
            if taking[model]
            else f"no replica of {model} takes requests"
        )
    return [printable(sentence) for sentence in found]


def notes(fleet: Mapping[str, Any]) -> list[str]:
    """Replicas that take no new requests, or only as a last resort."""
    lacking = [
        f"replica {row['replica_id']} of {row['model']} {what}"
        for row in fleet["replicas"]
        if (what := _lack(row)) is not None
    ]
    return [printable(sentence) for sentence in (*lacking, *_half_pairs(fleet))]


def replica_tables(fleet: Mapping[str, Any]) -> Iterator[Text | Table]:
    """A table of replicas for each model, below the model's name where there are several."""
    for model, replicas in _by_model(fleet, "replicas"):
        split = _splits(replicas)
        table = _table("replica", *(["role"] if split else []), "state")
        for name in ("wait", "run", "prefill ms", "KV", "PAB", "step ms", "predicted", "preempt"):
            table.add_column(name, justify="right")
        for row in sorted(replicas, key=lambda row: (row["role"], row["replica_id"])):
            table.add_row(
                _text(row["replica_id"]),
                *([_text(row["role"])] if split else []),
                _state(row),
                str(row["waiting"]),
                str(row["running"]),
                _ms(row["prefill_ms"]),
                _NONE if row["kv_usage"] is None else f"{row['kv_usage']:.0%}",
                _NONE if row["pab_tokens"] is None else f"{row['pab_tokens']:,.0f}",
                _ms(row["last_step_ms"]),
                _ms(row["predicted_step_ms"]),
                str(row["preemptions"]),
            )
        yield from _titled(model, table, fleet)


def class_tables(fleet: Mapping[str, Any]) -> Iterator[Text | Table]:
    """The same with a row for each service class, over the last minutes."""
    for model, classes in _by_model(fleet, "classes"):
        table = _table("class")
        for name in (
            *("requests", "attained", "TDG", "TTFT p50, ms", "p95, ms"),
            *("promised", "best effort", "refused"),
        ):
            table.add_column(name, justify="right")
        for row in classes:
            admission = row["admission"]
            table.add_row(
                _text(row["class"]),
                f"{row['requests']:,.0f}",
                _percent(row["attainment"]),
                _percent(row["tdg"]),
                _ms(row["ttft_ms"]["p50"]),
                _ms(row["ttft_ms"]["p95"]),
                *(f"{admission[name]:,.0f}" for name in ("guaranteed", "best_effort", "refused")),
            )
        yield from _titled(model, table, fleet)


def promise_tables(fleet: Mapping[str, Any]) -> Iterator[Text | Table]:
    """For each model with recent promises: the share kept, and that of first tokens by the
    forecasts."""
    for model, facts in fleet["models"].items():
        # A controller of an earlier version does not report it.
        found = facts.get("calibration")
        if not found or not found["promised"]:
            continue
        checked = [found["quantiles"].index(quantile) for quantile in _CHECKED]
        table = _table("promises")
        for name in ("promised", "kept", *(f"<=p{100 * quantile:.0f}" for quantile in _CHECKED)):
            table.add_column(name, justify="right")
        moved = {"promised": found.get("moved"), "kept": found.get("moved_kept")}
        rows = [
            (f"all, level {found['level']:.1%}", found),
            *([("moved", moved)] if found.get("moved") else []),
            *((f"class {row['class']}", row) for row in found["classes"]),
            *((f"replica {row['replica_id']}", row) for row in found["replicas"]),
        ]
        for name, row in rows:
            shares = row.get("reliability", {}).get("observed")
            table.add_row(
                _text(name),
                f"{row['promised']:,}",
                _percent(row["kept"] / row["promised"] if row["promised"] else None),
                *(_percent(shares[place] if shares else None) for place in checked),
            )
        yield from _titled(model, table, fleet)


def headline(fleet: Mapping[str, Any]) -> Text:
    """One line for each model: replicas, policies, and how long a decision takes."""
    lines = []
    for model, facts in fleet["models"].items():
        rows = [row for row in fleet["replicas"] if row["model"] == model]
        line = f"{model}: {sum(map(_takes, rows))} of {len(rows)} replicas take requests"
        if _splits(rows):
            taking, known = (_by_role(each) for each in (filter(_takes, rows), rows))
            parts = (f"{taking[role]} of {known[role]} {role}" for role in sorted(known))
            line += f" ({', '.join(parts)})"
        if last := sum(row["condition"] in (AGED, QUARANTINED) for row in rows):
            line += f" ({last} only as a last resort)"
        if facts["up"]:
            took = facts["decision_ms"]["p99"]
            line += f", routing {facts['policy']}, admission {facts['admission']}"
            line += "" if took is None else f", decisions p99 {took:.2f} ms"
        lines.append(printable(line))
    return Text("\n".join(lines))


def _table(*names: str) -> Table:
    return compact(Table(*names, header_style="bold"))


def _by_model(fleet: Mapping[str, Any], rows: str) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Each model with its rows, if it has any."""
    for model in fleet["models"]:
        if found := [row for row in fleet[rows] if row["model"] == model]:
            yield model, found


def _titled(model: str, table: Table, fleet: Mapping[str, Any]) -> Iterator[Text | Table]:
    if len(fleet["models"]) > 1:
        yield Text(printable(model), style="bold")
    yield table


def _by_role(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(row["role"] for row in rows)


def _splits(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether requests may begin at one of these replicas and end at another."""
    return not _by_role(rows).keys() <= {"mixed"}


def _half_pairs(fleet: Mapping[str, Any]) -> Iterator[str]:
    """Models without replicas for one of the P/D phases, a sentence each."""
    for model in fleet["models"]:
        rows = [row for row in fleet["replicas"] if row["model"] == model]
        taking = _by_role(filter(_takes, rows))
        if not taking or not _splits(rows):
            continue  # no replica takes requests, or every replica takes both phases
        yield from (
            f"no {role} replica of {model} takes requests: others serve them whole"
            for role in ("prefill", "decode")
            if not taking[role]
        )


def _takes(row: Mapping[str, Any]) -> bool:
    return row["condition"] in (FRESH, AGED, QUARANTINED)


def _lack(row: Mapping[str, Any]) -> str | None:
    """How a replica's service is restricted, and why; ``None`` if it is not."""
    condition = str(row["condition"])
    if row["drain"] == "operator":
        return "takes no new requests: an operator drains it"
    if condition == FRESH:
        return None
    if condition == QUARANTINED:
        return f"is in quarantine: {_quarantine(row)}"
    if condition == AGED:
        lack = "is chosen only if no other is left, and guarantees nothing"
    else:
        lack = f"takes no new requests: {_REASONS.get(condition, condition)}"
    return f"{lack}, silent for {_silent(row)}" if condition in _SILENT else lack


def _state(row: Mapping[str, Any]) -> Text:
    if row["drain"] == "operator":
        left = row["waiting"] + row["running"] + row["reserved"]
        return Text("draining" if left else "drained", style="yellow")
    condition = printable(row["condition"])
    styles = {FRESH: "green", "draining": "yellow", AGED: "yellow"}
    style = styles.get(condition, "red")
    if condition == QUARANTINED and row["quarantine"] is not None:
        return Text(f"{condition} {printable(row['quarantine']['reason'])}", style=style)
    return Text(f"{condition} {_silent(row)}" if condition in _SILENT else condition, style=style)


def _quarantine(row: Mapping[str, Any]) -> str:
    """The quarantine's cause and duration, and the next step."""
    found = row["quarantine"]
    if found is None:
        return "it failed or hung"
    saw = {"hung": "it hangs", "failed": "requests failed there"}.get(found["reason"], "it failed")
    words = f"{saw}, for {found['since_ms'] / 1e3:,.1f}s; "
    if found["state"] == "half-open":
        return words + "one request at a time tries it"
    if found["retry_in_ms"] is None:
        return words + "it gets no requests until it says that it works"
    return words + f"it is tried again in {found['retry_in_ms'] / 1e3:,.1f}s"


def _silent(row: Mapping[str, Any]) -> str:
    """The time since its last report, without a blank."""
    return f"{row['report_age_ms'] / 1e3:,.1f}s"


def _text(value: str) -> Text:
    """A name from outside, which must not be read as markup."""
    return Text(printable(value))


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{share:.1%}"


def _ms(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}" if value >= 1_000 else f"{value:,.1f}"
