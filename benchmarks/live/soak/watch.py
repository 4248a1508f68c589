"""Resources of every process of a running application, and the application's own figures."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

import ray

from sluice.benchmarks.live.application import metrics
from sluice.benchmarks.live.resources import held
from sluice.benchmarks.live.soak.trends import APPLICATION, Sample, Series
from sluice.controller.lookup import NAMESPACE, observer_actor_name

GAUGES: Final = (
    "sluice_in_flight_requests",
    "sluice_held_body_bytes",
    "sluice_line_requests",
    "sluice_reservations",
    "sluice_replica_live_requests",
    "sluice_replica_waiting_requests",
    "sluice_replica_running_requests",
    "sluice_batches_running",
    "sluice_batch_lines_in_flight",
)
"""Figures of the application's own page that are 0 when it is idle."""

COUNTERS: Final = (
    "sluice_resumes_total",
    "sluice_retries_total",
    "sluice_retries_refused_total",
    "sluice_fallback_total",
)

_USED_BLOCKS = "used KV blocks"
_CALL_S = 2.0


class Watch:
    """Samples an application on this machine, from the process that has joined its Ray.

    Args:
        url: of the application.
        app: its name.

    Attributes:
        idle: the figures that are 0 when the application is idle.
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
        """The application's own figures; unavailable ones are missing."""
        try:
            page = metrics(self._url, _CALL_S)
        except OSError:
            return {}
        found: dict[str, float] = {
            name: page[name] for name in (*GAUGES, *COUNTERS) if name in page
        }
        snapshot = self._snapshot()
        if snapshot is not None:
            for each in snapshot["replicas"]:
                state = f"{each['condition']} replicas"
                found[state] = found.get(state, 0.0) + 1
            found["reservations_expired"] = snapshot["reservations_expired"]
            found[_USED_BLOCKS] = sum(
                each["kv_blocks_total"] - each["kv_blocks_free"] for each in snapshot["replicas"]
            )
        return found

    def _snapshot(self) -> dict[str, Any] | None:
        try:
            actor = ray.get_actor(observer_actor_name(self._app), namespace=NAMESPACE)
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
    """Runs in the sampled process, beside its event loop."""
    import os

    # Tasks of every loop of the process; asyncio's public function needs a loop. Python 3.12
    # renamed the set.
    tasks = getattr(asyncio.tasks, "_scheduled_tasks", None)
    if tasks is None:
        tasks = asyncio.tasks._all_tasks  # type: ignore[attr-defined]
    return os.getpid(), len(tasks), sys.getallocatedblocks()
