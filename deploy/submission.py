"""Hands an application to a running Ray cluster over Serve's REST API, and reads how it fares.

The API takes all applications at once and deletes those that are not named, so the others are sent
along as they are. What can change in place is kept out of the application's ``args``: Serve builds
the application anew, and replaces every replica, when those differ.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from deploy.config import SluiceConfig, parse_config
from deploy.json_http import JsonServer, printable

PATH = "/api/serve/applications/"
RUNNING = "RUNNING"
FAILED = "DEPLOY_FAILED"


class Part(NamedTuple):
    """One deployment of the application: replicas that run, those wanted, and its state."""

    running: int
    wanted: int
    status: str


class State(NamedTuple):
    """How an application fares, as Serve says.

    Attributes:
        status: Serve's name for it, such as ``DEPLOYING`` or ``RUNNING``.
        message: why, in one line; often empty.
        deployed_s: when it was last deployed, Unix seconds of the cluster.
        parts: its deployments by name.
        addresses: where it can be had, a URL for each node with a proxy.
    """

    status: str
    message: str
    deployed_s: float
    parts: dict[str, Part]
    addresses: tuple[str, ...]

    @property
    def progress(self) -> str:
        """One line: each deployment's replicas."""
        shown = [f"{name.lower()} {p.running}/{p.wanted}" for name, p in self.parts.items()]
        return ", ".join(shown) or "the application is being built"


def ray_token() -> str | None:
    """The cluster's token from where Ray's own tools take it; ``None`` where there is none.

    Raises:
        OSError: the file that ``RAY_AUTH_TOKEN_PATH`` names cannot be read.
    """
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return Path(named).read_text(encoding="utf-8").strip()
    usual = Path.home() / ".ray" / "auth_token"
    return usual.read_text(encoding="utf-8").strip() if usual.is_file() else None


def application_of(data: Mapping[str, Any], name: str, route_prefix: str) -> dict[str, Any]:
    """Serve's description of the application with the configuration ``data``.

    A number of replicas is an option of their deployment, so a change of it starts or drains some
    and touches no other. Keys go as digests: Serve shows what it was given.

    Raises:
        ValueError: ``data`` is not a valid configuration.
    """
    from deploy.app import deployment_name  # imports Ray

    config = parse_config(data)
    args = deepcopy(dict(data))
    # The name is the application's; a change of the field must not build it anew.
    args.pop("name", None)
    for section in (args, *(args.get("models") or {}).values()):
        if section and section.get("replica"):
            section["replica"].pop("count", None)
    router = args.get("router") or {}
    for holder in (router, router.get("admin") or {}, router.get("metrics") or {}):
        for field in ("api_keys", "keys"):
            if holder.get(field):
                holder[field] = [_digested(entry) for entry in holder[field]]
    return {
        "name": name,
        "route_prefix": route_prefix,
        "import_path": "deploy.app:build",
        "args": args,
        "deployments": [
            {"name": deployment_name(fleet.key), "num_replicas": fleet.config.replica.count}
            for fleet in config.fleets
            if fleet.config.replica.autoscaling is None
        ],
    }


def _digested(entry: str | dict[str, Any]) -> dict[str, Any]:
    """An entry of a list of keys without the key itself."""
    rest = {"key": entry} if isinstance(entry, str) else dict(entry)
    key = rest.pop("key", None)
    if key is not None:
        rest["sha256"] = hashlib.sha256(key.encode()).hexdigest()
    return rest


def submit(server: JsonServer, application: Mapping[str, Any], config: SluiceConfig) -> float:
    """Start or update the application; when it had been deployed before, Unix seconds, or 0.

    Where Serve does not run yet it is started, with the host and port of ``config``.

    Raises:
        UnreachableError, AnswerError: as :meth:`JsonServer.ask`.
    """
    details = server.ask("GET", PATH)
    known = details.get("applications", {})
    others = [
        each["deployed_app_config"]
        for name, each in known.items()
        # Those that a program deployed are left alone by Serve itself.
        if name != application["name"] and each.get("deployed_app_config")
    ]
    before = known.get(application["name"], {}).get("last_deployed_time_s", 0.0)
    body = {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.router.host, "port": config.router.port},
        "applications": [*others, application],
    }
    server.ask("PUT", PATH, body)
    return float(before)


def state_of(server: JsonServer, name: str) -> State | None:
    """How the application ``name`` fares; ``None`` where Serve does not know it.

    Raises:
        UnreachableError, AnswerError: as :meth:`JsonServer.ask`.
    """
    details = server.ask("GET", PATH)
    found = details.get("applications", {}).get(name)
    if found is None:
        return None
    deployments = found.get("deployments", {})
    messages = [found.get("message", ""), *(each["message"] for each in deployments.values())]
    return State(
        found["status"],
        next((line for line in map(_last_line, messages) if line), ""),
        float(found.get("last_deployed_time_s", 0.0)),
        {name: _part(each) for name, each in deployments.items()},
        _addresses(details, found.get("route_prefix") or "/"),
    )


def _part(deployment: Mapping[str, Any]) -> Part:
    running = [each for each in deployment["replicas"] if each["state"] == RUNNING]
    return Part(len(running), deployment["target_num_replicas"], deployment["status"])


def _addresses(details: Mapping[str, Any], route_prefix: str) -> tuple[str, ...]:
    options = details.get("http_options") or {}
    host, port = options.get("host"), options.get("port")
    if port is None:
        return ()
    local = host in ("127.0.0.1", "localhost", "::1")
    proxies = [each for each in details.get("proxies", {}).values() if each["status"] == "HEALTHY"]
    nodes = {"127.0.0.1"} if local else {each["node_ip"] for each in proxies}
    path = route_prefix.rstrip("/")
    return tuple(f"http://{node}:{port}{path}/v1" for node in sorted(nodes))


def _last_line(message: str) -> str:
    """What an exception's trace ends with, which says what went wrong."""
    lines = [line for line in message.splitlines() if line.strip()]
    return printable(lines[-1]).strip() if lines else ""
