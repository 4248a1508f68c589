"""What every process of a running application holds, and what the application says of itself, now
and then; and whether any of it grows."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import ray
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.resources import held
from controller.lookup import NAMESPACE, controller_actor_name

APPLICATION = "application"

GAUGES: Final = (
    "sluice_in_flight_requests",
    "sluice_held_body_bytes",
    "sluice_line_requests",
    "sluice_reservations",
    "sluice_replica_live_requests",
    "sluice_replica_waiting_requests",
    "sluice_replica_running_requests",
)
"""Of the application's own page: what is 0 when nobody asks anything."""

COUNTERS: Final = (
    "sluice_resumes_total",
    "sluice_retries_total",
    "sluice_retries_refused_total",
    "sluice_fallback_total",
)

JUDGED: Final = ("routers", "replicas", "controller", "HAProxy", "Serve", APPLICATION)
"""Whose growth counts. That of Ray's own processes and of the client is shown."""

LEAST_S: Final = 300.0
"""A shorter time says nothing of growth, seconds: caches fill and allocators settle."""

_USED_BLOCKS = "used KV blocks"
_CALL_S = 2.0
_ALLOWED: Final[dict[str, tuple[float, float]]] = {
    "memory MiB": (8.0, 0.04),
    "objects": (20_000.0, 0.03),
    "handles": (10.0, 0.1),
    "threads": (5.0, 0.1),
    "tasks": (30.0, 0.15),
}
_ALLOWED_OF_GAUGES = (20.0, 0.25)


class Series(NamedTuple):
    """What was looked at: of which kind of process, of which one, and what of it."""

    kind: str
    who: str
    what: str


class Sample(NamedTuple):
    """One look. ``values`` lacks what could not be had."""

    at_s: float
    values: dict[Series, float]


class Trend(NamedTuple):
    """How a series went.

    Attributes:
        first, last: medians of the first and the last quarter of its samples.
        slope: of a straight line through all, per hour; error: its standard error.
        grows: whether it is more in the end than the rule allows, and rises steadily.
    """

    series: Series
    first: float
    last: float
    slope: float
    error: float
    grows: bool


class Watch:
    """Looks at an application on this machine, from the process that has joined its Ray.

    Args:
        url: of the application.
        app: its name.

    Attributes:
        idle: the figures that are 0 when nobody asks anything.
    """

    idle = (*GAUGES, _USED_BLOCKS)

    def __init__(self, url: str, app: str) -> None:
        self._url = url
        self._app = app
        self._actors: dict[str, Any] = {}

    def look(self, at_s: float) -> Sample:
        """A sample; frozen processes are waited for no longer than 2 s."""
        processes = held()
        values: dict[Series, float] = {}
        for pid, each in processes.items():
            values[Series(each.kind, str(pid), "memory MiB")] = each.memory_mib
            values[Series(each.kind, str(pid), "handles")] = each.handles
            values[Series(each.kind, str(pid), "threads")] = each.threads
        for kind in {each.kind for each in processes.values()}:
            number = sum(each.kind == kind for each in processes.values())
            values[Series(kind, "all", "processes")] = number
        for pid, tasks, objects in self._inside():
            kind = processes[pid].kind if pid in processes else ""
            values[Series(kind, str(pid), "tasks")] = tasks
            values[Series(kind, str(pid), "objects")] = objects
        for what, value in self.figures().items():
            values[Series(APPLICATION, "", what)] = value
        return Sample(at_s, values)

    def figures(self) -> dict[str, float]:
        """What the application says of itself; what it does not say just now is missing."""
        found: dict[str, float] = {}
        try:
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=_CALL_S) as answer:
                page = answer.read().decode()
        except OSError:
            return found
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in (*GAUGES, *COUNTERS):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
                elif sample.name == "sluice_replicas":
                    state = f"{sample.labels['state']} replicas"
                    found[state] = found.get(state, 0.0) + sample.value
        snapshot = self._snapshot()
        if snapshot is not None:
            found["reservations_expired"] = snapshot["reservations_expired"]
            found[_USED_BLOCKS] = sum(
                each["kv_blocks_total"] - each["kv_blocks_free"] for each in snapshot["replicas"]
            )
        return found

    def _snapshot(self) -> dict[str, Any] | None:
        try:
            actor = ray.get_actor(controller_actor_name(self._app), namespace=NAMESPACE)
            snapshot: dict[str, Any] = ray.get(actor.snapshot.remote(), timeout=_CALL_S)
        except (ray.exceptions.RayError, ValueError):
            return None
        return snapshot

    def _inside(self) -> list[tuple[int, int, int]]:
        """Process id, tasks of its event loop and objects of Python, of each actor with a name."""
        named = ray.util.list_named_actors(all_namespaces=True)
        names = {each["name"]: each["namespace"] for each in named}
        self._actors = {name: actor for name, actor in self._actors.items() if name in names}
        for name in names.keys() - self._actors.keys():
            try:
                self._actors[name] = ray.get_actor(name, namespace=names[name])
            except ValueError:
                continue  # it has just ended
        asked = [actor.__ray_call__.remote(_count) for actor in self._actors.values()]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_CALL_S) if asked else ([], 0)
        found = []
        for reference in answered:
            try:
                found.append(ray.get(reference))
            except ray.exceptions.RayError:
                continue
        return found


def _count(_: object) -> tuple[int, int, int]:
    """Runs in the process that is looked at."""
    import os

    try:
        tasks = len(asyncio.all_tasks())
    except RuntimeError:  # it has no loop
        tasks = 0
    return os.getpid(), tasks, sys.getallocatedblocks()


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Of every series that is there in at least half of the samples, and in four."""
    found = []
    for series in sorted({series for sample in samples for series in sample.values}):
        points = [(each.at_s, each.values[series]) for each in samples if series in each.values]
        if len(points) >= max(4, len(samples) / 2):
            found.append(trend(series, np.array(points)))
    return found


def trend(series: Series, points: np.ndarray) -> Trend:
    """How a series went. It grows where the median of its last quarter is more than that of its
    first by more than is allowed of its kind (a number and a share), and its slope is more than
    twice its standard error.

    Args:
        points: ``[samples, 2]``, seconds and values, four samples or more.
    """
    hours, values = points[:, 0] / 3600, points[:, 1]
    quarter = max(1, len(values) // 4)
    first, last = float(np.median(values[:quarter])), float(np.median(values[-quarter:]))
    centred = hours - hours.mean()
    spread = float(centred @ centred)
    slope = float(centred @ values) / spread if spread else 0.0
    rest = values - values.mean() - slope * centred
    error = float(np.sqrt(rest @ rest / (len(values) - 2) / spread)) if spread else 0.0
    number, share = _ALLOWED.get(series.what, _ALLOWED_OF_GAUGES)
    grows = (
        series.kind in JUDGED
        and hours[-1] - hours[0] >= LEAST_S / 3600
        and last - first > max(number, share * first)
        and slope > 2 * error
    )
    return Trend(series, first, last, slope, error, bool(grows))
