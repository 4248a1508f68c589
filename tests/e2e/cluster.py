"""A Ray cluster of several nodes on this machine, by Ray's own commands, with a token."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import ray

from sluice.deploy import ray_start
from sluice.deploy.json_http import AnswerError, JsonServer, UnreachableError
from sluice.deploy.ray_start import free_port
from sluice.replica.private_dir import make_private_dir
from tests.e2e.conftest import wait_until
from tests.wire import Wire, network

BIN = Path(sys.executable).parent
HEAD = "head"
START_S = 400.0
"""Longest wait for nodes and applications to start, seconds: many processes import Ray."""

_FAST = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "OMP_NUM_THREADS": "1",
}


class Cluster:
    """Nodes by name; the head does no work. ``wires`` joins a node with a network of its own."""

    def __init__(self) -> None:
        self.wires: dict[str, Wire] = {}
        self._networks = ExitStack()
        self.folder = make_private_dir()
        self.token = secrets.token_hex(32)
        self.gcs_port, self.dashboard_port, self.port = free_port(), free_port(), free_port()
        self.environment = self._environment()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.dashboard = JsonServer(f"http://127.0.0.1:{self.dashboard_port}", self.token, 120)
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        def runs() -> bool:
            self._keep_starting(
                HEAD,
                *("--head", f"--port={self.gcs_port}", "--num-cpus=0"),
                *("--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard_port}"),
                f"--ray-client-server-port={free_port()}",
            )
            return self._answers("GET", "/api/serve/applications/")

        serve = {"proxy_location": "Disabled", "applications": []}
        self.wait(runs, "Ray runs")
        # Its answer may take longer than Ray gives Serve to start on a busy machine.
        self.wait(lambda: self._answers("PUT", "/api/serve/applications/", serve), "Serve runs")

    def add_node(self, name: str, *more: str, cpus: int = 4, apart: bool = False) -> None:
        address = f"{ray.util.get_node_ip_address()}:{self.gcs_port}"
        options = [f"--address={address}", f"--num-cpus={cpus}", *more]
        inside: tuple[str, ...] = ()
        if apart:
            own = self._networks.enter_context(network())
            inside, (self.wires[name],) = own.inside, own.wires
            options.append(f"--node-ip-address={self.wires[name].there}")

        def joined() -> bool:
            self._keep_starting(name, *options, inside=inside)
            return name in self.node_names().values()

        self.wait(joined, f"node {name} has joined")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            try:
                return condition()
            except (UnreachableError, AnswerError):
                return False

        wait_until(holds, what, START_S, every_s=0.5)

    def kill_node(self, name: str) -> None:
        self._end(self.nodes.pop(name))

    def node_names(self) -> dict[str, str]:
        rows = self._listed("nodes")
        return {row["node_id"]: row["node_name"] for row in rows if row["state"] == "ALIVE"}

    def node_of_actor(self, name: str) -> str | None:
        rows = [row for row in self._listed("actors") if row["name"] == name]
        return next((row["node_id"] for row in rows if row["state"] == "ALIVE"), None)

    def placement_groups(self) -> dict[str, dict[str, Any]]:
        rows = self._listed("placement_groups")
        return {row["placement_group_id"]: row for row in rows if row["state"] != "REMOVED"}

    def actors(self, name: str) -> list[dict[str, Any]]:
        rows = self._listed("actors")
        return [row for row in rows if row["class_name"] == name and row["state"] == "ALIVE"]

    def sluice(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BIN / "sluice", *words],
            env={
                **self.environment,
                "RAY_DASHBOARD_ADDRESS": self.dashboard.address,
                "SLUICE_ADDRESS": self.url,
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=START_S + 60,
            check=False,
        )

    def close(self) -> None:
        with self._networks as undo:
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            for name in self.nodes:
                undo.callback(self._end, self.nodes[name])
            self.nodes.clear()

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        saved = dict(os.environ)
        try:
            for name in [name for name in os.environ if name.startswith("RAY_")]:
                del os.environ[name]
            ray_start.apply(self.folder)
            settings = {n: value for n, value in os.environ.items() if n.startswith("RAY_")}
        finally:
            os.environ.clear()
            os.environ.update(saved)
        own = {"RAY_AUTH_TOKEN": self.token, "RAY_TMPDIR": str(self.folder)}
        own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
        return {**kept, **settings, **_FAST, **own}

    def _keep_starting(self, name: str, *options: str, inside: tuple[str, ...] = ()) -> None:
        if name not in self.nodes or self.nodes[name].poll() is not None:
            self._start_node(name, *options, inside=inside)

    def _start_node(self, name: str, *options: str, inside: tuple[str, ...]) -> None:
        command = [*inside, BIN / "ray", "start", "--block", f"--node-name={name}", *options]
        command += ["--dashboard-agent-listen-port=0", "--object-store-memory=80000000"]
        command += ["--include-log-monitor=false"]  # it serves drivers that print what workers do
        # Each picks its own: the nodes share this machine's ports.
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.nodes[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        # At once: a node that is asked to end first waits for others to take over its work.
        family = psutil.Process(process.pid).children(recursive=True)
        for member in (process, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(timeout=120)
        _, alive = psutil.wait_procs(family, timeout=120)
        assert alive == [], "processes of a node were left behind"

    def _answers(self, method: str, path: str, body: dict[str, Any] | None = None) -> bool:
        try:
            self.dashboard.ask(method, path, body)
        except (UnreachableError, AnswerError):
            return False
        return True

    def _listed(self, what: str) -> list[dict[str, Any]]:
        answer = self.dashboard.ask("GET", f"/api/v0/{what}?detail=1&limit=1000")
        rows = answer["data"]["result"]["result"]
        assert isinstance(rows, list), json.dumps(answer)[:400]
        return rows
