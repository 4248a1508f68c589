"""Starts a Ray instance from this process with the settings that Sluice runs with. Ray reads
them on import, so ``apply`` comes before a process's first ``import ray``."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sluice.deploy.leftovers import end_processes
from sluice.replica.private_dir import SOCKETS_VARIABLE
from sluice.telemetry.phases import FILE_VARIABLE

TUNED: Mapping[str, str] = {
    # gRPC between router and replicas, no per-request log flush, no second thread per replica.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Which also has Serve open ports of its own in front of routers.
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    # Serve's own metrics leave each process once a second, and not ten times.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    # Serve leaves the messages of that data plane at gRPC's 4 MiB, which a large body or answer
    # exceeds. The most that gRPC takes: `router.max_body_bytes` bounds bodies, and replicas send
    # answers in chunks.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    # A replica that fails its health check is killed at once: draining an unresponsive process is
    # useless, and Serve would wait for as long as a drain may take.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Ray starts workers with niceness 15: beside one busy process of normal priority an engine, a
    # router or the controller would get 3 % of a core that they share.
    "RAY_worker_niceness": "0",
    # A replica imports vLLM before it tells Ray that it runs, for which Ray allows 60 s.
    "RAY_worker_register_timeout_seconds": "600",
}
"""For every cluster: set them in the cluster's environment too (`ray start`, KubeRay)."""

LOCAL: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Other programs of this machine must not be able to submit work to our Ray.
    "RAY_AUTH_MODE": "token",
    # Without clusters Ray's address is 127.0.0.1, also on Linux, and its ports listen there only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Engines transfer KV on this machine only.
    "VLLM_HOST_IP": "127.0.0.1",
    # Files in the folder where Sluice was started must not stand in for modules of the same name.
    "PYTHONSAFEPATH": "1",
    # What Ray's dashboard shows, which is left out: each process would report it all the time.
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    # How often the raylet says what is free here, where nothing else is placed, and looks for short
    # memory and disk, for garbage, for transfers and for workers without work.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    "RAY_local_fs_monitor_interval_ms": "1000",
    "RAY_object_manager_timer_freq_ms": "1000",
    # Serve's controller looks twice a second, and not ten times.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}
"""For a Ray instance that Sluice starts itself on this machine."""


TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Ray's token, and the file that holds it; without both Ray takes or writes
``~/.ray/auth_token``."""

_FREE_PORTS = range(31_100, 32_768)
"""For listeners that may have any port: above those of a Serve with its defaults, below those that
Linux gives to connections."""

_BLOCK = 16
"""Number of free ports that a process claims at a time."""

_claims: dict[int, socket.socket] = {}


def _claim(first: int) -> bool:
    """Keep the ports from ``first`` on from other processes of this machine; whether it succeeded.
    The claim is a name in Linux's abstract namespace, which ends with the process."""
    if first not in _claims:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0sluice-ports-{first}")
        except OSError:
            claim.close()
            return False
        _claims[first] = claim
    return True


def _ports() -> Iterator[int]:
    """The ports of the blocks that this process has claimed, repeatedly, or all if it can claim
    none."""
    while True:
        blocks = range(_FREE_PORTS.start, _FREE_PORTS.stop, _BLOCK)
        mine = False
        for first in random.sample(blocks, len(blocks)):
            if _claim(first):
                mine = True
                yield from range(first, min(first + _BLOCK, _FREE_PORTS.stop))
        if not mine:
            yield from random.sample(_FREE_PORTS, len(_FREE_PORTS))


_free_ports = _ports()


def _make_token(local_dir: Path) -> Path:
    """A file with a new token for Ray, for this user only."""
    path = local_dir / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def free_port() -> int:
    """A port that nothing listens on and no other process gets from here, outside the kernel's
    range for connections. Raises OSError: every port of the range is in use."""
    for port in itertools.islice(_free_ports, len(_FREE_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"every port of {_FREE_PORTS} is in use")


def apply(local_dir: Path | None = None) -> None:
    """Set the variables that are unset. ``local_dir``: a private folder for vLLM's sockets."""
    settings = dict(TUNED)
    if local_dir is not None:
        settings.update(LOCAL)
        if not os.environ.keys() & TOKEN_VARIABLES:
            settings[TOKEN_VARIABLES[1]] = str(_make_token(local_dir))
        sockets = local_dir / "v"
        sockets.mkdir(exist_ok=True)  # vLLM does not
        settings[SOCKETS_VARIABLE] = str(sockets)
        settings[FILE_VARIABLE] = str(local_dir / PHASES_FILE)
    for name, value in settings.items():
        os.environ.setdefault(name, value)


PHASES_FILE = "phases"
"""In the folder of one Ray instance: the phases of its start."""

TRIES = 5
"""How often Ray is started. It gives its node 30 s, and its node's agents 15 s of them, times that
cannot be set; the next try finds the files of its processes in memory."""

_TOO_SLOW = ("timed out during startup", "Timed out waiting for file", "Failed to start GCS")
"""What Ray says where a process of it was not there in time."""


class RayTooSlowError(RuntimeError):
    """Ray did not start within its own time limits."""


def start_ray(temp_dir: Path, tries: int = TRIES, **options: Any) -> None:
    """Start a Ray instance of this process's own, never the one that the environment may name; no
    process is left of a failed one. Raises RayTooSlowError: too slow in all ``tries``."""
    import ray
    from ray.job_config import JobConfig

    _leave_out_agent()
    for left in reversed(range(tries)):
        try:
            # Ray puts the driver's working folder on its workers' path, unless the driver is a
            # remote client. A file there must not stand in for one of our modules.
            with _without_idle_processes():
                ray.init(
                    address="local",
                    _temp_dir=str(temp_dir),
                    job_config=JobConfig(_client_job=True),
                    include_dashboard=False,
                    log_to_driver=False,
                    **options,
                )
            return
        except Exception as error:
            slow = any(words in str(error) for words in _TOO_SLOW)
            if slow:  # else it may be that this process has another Ray
                ray.shutdown()
            end_processes(temp_dir)
            if not slow:
                raise
            if not left:
                raise RayTooSlowError(str(error)) from error


def _leave_out_agent() -> None:
    """Have Ray start ``no_agent`` in place of the agent of the dashboard that is left out, which
    takes 70 MiB and a second of processor time."""
    from ray._private import ray_constants, services

    command = services._build_python_executable_command_memory_profileable

    def command_of(component: str, *words: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-IS", str(Path(__file__).with_name("no_agent.py"))]
        made: list[str] = command(component, *words)
        return made

    services._build_python_executable_command_memory_profileable = command_of


@contextlib.contextmanager
def _without_idle_processes() -> Iterator[None]:
    """Have Ray leave out the processes that have no work here: one looks for new lines in every log
    file ten times a second, for drivers that print them; one would start nodes; one serves the
    dashboard that is left out. They hold 150 MiB, and Ray's start waits for the last one."""
    from ray._private.node import Node

    starts = ("start_log_monitor", "start_monitor", "start_api_server")
    own = {name: getattr(Node, name) for name in starts}
    for name in starts:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, start in own.items():
            setattr(Node, name, start)
