"""The report of ``sluice bench gateway``, as plain data and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import sub, truediv
from statistics import median
from typing import Any, Final

import numpy as np
from rich.table import Table

from sluice.benchmarks.live.gateway.client import Load
from sluice.benchmarks.live.gateway.systems import ENGINES
from sluice.benchmarks.live.resources import CORES, OWN

DIRECT: Final = "direct"
REFERENCES: Final = (DIRECT, "vllm-router", "other sluice")
"""Systems with which the others' requests a second are compared, where they were measured."""

GATEWAY: Final = "gateway"
"""All processes but those of engines and the client."""

Json = dict[str, Any]


def figures(load: Load, cpu_s: Mapping[str, float]) -> Json:
    """One run, as plain data.

    Args:
        cpu_s: processor seconds by kind of process, while the requests ran.
    """
    requests = len(load.ttfts_s)
    each = {kind: 1e3 * seconds / requests for kind, seconds in cpu_s.items()}
    each[OWN] = 1e3 * load.cpu_s / requests
    p50, p99 = np.quantile(load.ttfts_s, (0.5, 0.99))
    return {
        "requests": requests,
        "per_second": round(requests / load.elapsed_s, 2),
        "ttft_p50_ms": round(1e3 * float(p50), 3),
        "ttft_p99_ms": round(1e3 * float(p99), 3),
        "cpu_ms": {kind: round(value, 4) for kind, value in each.items()},
    }


def summary(runs: Sequence[Json]) -> list[Json]:
    """Each cell and system over all rounds, in the order of ``runs``.

    Times and rates are medians over rounds; ratios and added times are computed within a round,
    since a busy moment of the machine hits a whole round, and their medians taken; processor time
    is that of all requests of all rounds.
    """
    cells: dict[tuple[int, int], dict[str, list[Json]]] = {}
    for run in runs:
        systems = cells.setdefault((run["at_once"], run["tokens"]), {})
        systems.setdefault(run["system"], []).append(run)
    rows = []
    for (at_once, tokens), systems in cells.items():
        for system, own in systems.items():
            direct = systems.get(DIRECT, [])
            row = {
                "at_once": at_once,
                "tokens": tokens,
                "system": system,
                "requests": sum(run["requests"] for run in own),
                **{
                    name: round(median(run[name] for run in own), 3)
                    for name in ("per_second", "ttft_p50_ms", "ttft_p99_ms")
                },
                "added_ttft_p50_ms": _added(own, direct, "ttft_p50_ms"),
                "added_ttft_p99_ms": _added(own, direct, "ttft_p99_ms"),
                "ratio": {
                    name: _ratio(own, systems[name])
                    for name in REFERENCES
                    if name in systems and name != system
                },
                "cpu_ms": _cpu_ms(own),
            }
            rows.append(row)
    return rows


def _added(own: Sequence[Json], direct: Sequence[Json], name: str) -> float | None:
    if not direct:
        return None
    values, of_direct = ([float(run[name]) for run in runs] for runs in (own, direct))
    return round(float(median(map(sub, values, of_direct))), 3)


def _ratio(own: Sequence[Json], base: Sequence[Json]) -> float:
    rates, of_base = ([float(run["per_second"]) for run in runs] for runs in (own, base))
    return round(float(median(map(truediv, rates, of_base))), 3)


def _cpu_ms(runs: Sequence[Json]) -> dict[str, float]:
    """Processor time of a request, by kind of process, and of all processes of the gateway."""
    requests = sum(run["requests"] for run in runs)
    kinds = dict.fromkeys(kind for run in runs for kind in run["cpu_ms"])
    spent = {
        kind: sum(run["cpu_ms"].get(kind, 0.0) * run["requests"] for run in runs) / requests
        for kind in kinds
    }
    spent[GATEWAY] = sum(ms for kind, ms in spent.items() if kind not in (ENGINES, CORES, OWN))
    return {kind: round(ms, 3) for kind, ms in spent.items()}


def further_tokens(rows: Sequence[Json]) -> list[Json]:
    """The cost of a further token of a stream for each system, in microseconds of processor time:
    from the difference between the longest and the shortest streams of :func:`summary`. Empty where
    all are equally long."""
    found: dict[tuple[int, str], list[Json]] = {}
    for row in rows:
        found.setdefault((row["at_once"], row["system"]), []).append(row)
    costs = []
    for (at_once, system), own in found.items():
        short, long = (pick(own, key=lambda row: row["tokens"]) for pick in (min, max))
        tokens = long["tokens"] - short["tokens"]
        if tokens:
            cpu_us = {
                kind: round(1e3 * (ms - short["cpu_ms"].get(kind, 0.0)) / tokens, 2)
                for kind, ms in long["cpu_ms"].items()
            }
            costs.append({"at_once": at_once, "system": system, "cpu_us": cpu_us})
    return costs


def speeds(rows: Sequence[Json]) -> Table:
    """Rates and times of :func:`summary`, as a table."""
    bases = [name for name in REFERENCES if any(name in row["ratio"] for row in rows)]
    shown = Table(
        *("at once", "tokens", "system", "requests/s", *(f"to {name}" for name in bases)),
        *("TTFT p50 / p99 ms", "added p50 / p99 ms", "requests"),
        title="speed: medians over rounds",
    )
    for index, row in enumerate(rows):
        ratios = [row["ratio"].get(name) for name in bases]
        added = (row["added_ttft_p50_ms"], row["added_ttft_p99_ms"])
        shown.add_row(
            *(str(row["at_once"]), str(row["tokens"]), row["system"], f"{row['per_second']:,.1f}"),
            *("" if ratio is None else f"x {ratio:.3g}" for ratio in ratios),
            f"{row['ttft_p50_ms']:.2f} / {row['ttft_p99_ms']:.2f}",
            "" if None in added else " / ".join(f"{ms:+.2f}" for ms in added),
            f"{row['requests']:,}",
            end_section=_last(rows, index),
        )
    return shown


def costs(rows: Sequence[Json]) -> Table:
    """Processor time of a request by :func:`summary`, as a table."""
    kinds = _kinds(row["cpu_ms"] for row in rows)
    shown = Table(*("at once", "tokens", "system", *kinds), title="processor time of a request, ms")
    for index, row in enumerate(rows):
        shown.add_row(
            *(str(row["at_once"]), str(row["tokens"]), row["system"]),
            *(_cell(row["cpu_ms"].get(kind)) for kind in kinds),
            end_section=_last(rows, index),
        )
    return shown


def token_costs(rows: Sequence[Json]) -> Table:
    """:func:`further_tokens`, as a table."""
    kinds = _kinds(row["cpu_us"] for row in rows)
    shown = Table(*("at once", "system", *kinds), title="processor time of a further token, us")
    for row in rows:
        shown.add_row(
            *(str(row["at_once"]), row["system"]),
            *(_cell(row["cpu_us"].get(kind), 1) for kind in kinds),
        )
    return shown


def _kinds(all_of: Any) -> list[str]:
    """The gateway as a whole, its parts, the engines and the client, in this order."""
    found = dict.fromkeys(kind for each in all_of for kind in each)
    ends = (ENGINES, *((CORES,) if CORES in found else ()), OWN)
    return [GATEWAY, *(kind for kind in found if kind not in (GATEWAY, *ends)), *ends]


def _cell(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _last(rows: Sequence[Json], index: int) -> bool:
    """Whether another cell begins after a row."""
    cell = [(row["at_once"], row["tokens"]) for row in rows[index : index + 2]]
    return len(set(cell)) > 1
