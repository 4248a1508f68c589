"""The figures that the live benchmarks share, as plain data, and tables of such data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
from rich.table import Table

from sluice.benchmarks.live.client import End, Outcome

GUARANTEED, BEST_EFFORT = "guaranteed", "best-effort"
_Z = 1.96  # of a two-sided interval of 95 % under a normal distribution

Json = dict[str, Any]


MEDIAN_P99 = (0.5, 0.99)


def of_class(outcomes: Sequence[Outcome], at: Sequence[float] = MEDIAN_P99) -> Json:
    """Counts, attainment and latencies of some requests.

    ``attained``: share of all sent requests that were answered within their objectives; refused
    requests count as missed. ``kept``: the same share of the guaranteed requests. Times are
    quantiles of the answers, by default median and 99th percentile.
    """
    ends = Counter(each.end for each in outcomes)
    promised = [each for each in outcomes if each.admission == GUARANTEED]
    answered = [each for each in outcomes if each.end is End.ANSWERED]
    return {
        "sent": len(outcomes),
        "guaranteed": len(promised),
        "best_effort": sum(each.admission == BEST_EFFORT for each in outcomes),
        **{end.value: ends[end] for end in End},
        "attained": share(sum(each.attained for each in outcomes), len(outcomes)),
        "kept": share(sum(each.attained for each in promised), len(promised)),
        "ttft_ms": milliseconds([each.ttft_s or 0.0 for each in answered], at),
        "tpot_ms": milliseconds([each.tpot_s or 0.0 for each in answered], at),
    }


def by_class(outcomes: Sequence[Outcome], at: Sequence[float] = MEDIAN_P99) -> dict[str, Json]:
    """:func:`of_class` of each service class, and of all requests."""
    found = {}
    for name in sorted({each.slo.service_class for each in outcomes}):
        found[name] = of_class([each for each in outcomes if each.slo.service_class == name], at)
    return {**found, "all": of_class(outcomes, at)}


def class_table(classes: Mapping[str, Json], title: str) -> Table:
    """:func:`by_class` as a table."""
    rows = [{"class": name, **row} for name, row in classes.items()]
    met = ("attained", "guaranteed", "kept", "ttft_ms", "tpot_ms")
    return table(rows, "class", "sent", *(end.value for end in End), *met, title=title)


def reasons(outcomes: Sequence[Outcome], end: End) -> dict[str, int]:
    """Number of the requests that ended in this way, by reason."""
    return dict(Counter(each.reason for each in outcomes if each.end is end).most_common())


def share(count: int, of: int) -> float | None:
    """A share; ``None`` of nothing."""
    return round(count / of, 4) if of else None


def interval(count: int, of: int) -> list[float] | None:
    """The 95 % confidence interval of a share (Wilson 1927); ``None`` if ``of`` is 0."""
    if not of:
        return None
    mean, spread = count / of, _Z * _Z / of
    middle = mean + spread / 2
    reach = _Z * sqrt(mean * (1 - mean) / of + spread / (4 * of))
    ends = (middle - reach) / (1 + spread), (middle + reach) / (1 + spread)
    return [round(min(max(end, 0.0), 1.0), 4) for end in ends]


def quantiles(values: Any, at: Sequence[float] = (0.5, 0.99), digits: int = 1) -> list[float]:
    """Quantiles, by default median and 99th percentile; zeros without values."""
    found = np.quantile(values if len(values) else [0.0], at)
    return [round(float(value), digits) for value in found]


def milliseconds(
    values_s: Sequence[float], at: Sequence[float] = (0.5, 0.99)
) -> list[float] | None:
    """Quantiles of seconds, in milliseconds; ``None`` without values."""
    return quantiles(1e3 * np.array(values_s), at) if values_s else None


def table(rows: Iterable[Mapping[str, Any]], *columns: str, title: str) -> Table:
    """A table of plain data: a row for each of ``rows``, and a column for each key, which is its
    heading, too. Dots in a key lead into nested mappings."""
    headings = (each.replace(".", " ").replace("_", " ") for each in columns)
    shown = Table(*headings, title=title)
    for row in rows:
        shown.add_row(*(_text(_value(row, column)) for column in columns))
    return shown


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    first, _, rest = column.partition(".")
    inner = row.get(first)
    return _value(inner, rest) if rest and isinstance(inner, Mapping) else None


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return " / ".join(map(_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(each)}" for key, each in value.items())
    return str(value)
