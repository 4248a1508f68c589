"""``sluice deploy``: an application on a Ray cluster that runs already."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import click
from pydantic import BaseModel, ValidationError
from rich.console import Console

from sluice.deploy.commands.options import CONFIG_FILE, Exit, Failure, address_option, load, talking
from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.config import (
    ROUTER_DEPLOYMENT,
    SluiceConfig,
    engine_faults,
    parse_config,
    read_mapping,
)
from sluice.deploy.json_http import AnswerError, JsonServer, printable
from sluice.replica.pools import needs
from sluice.router.wire import is_loopback

# Submits an application to a running Ray cluster over Serve's REST API, and reads its state.
#
# The API takes all applications at once and deletes those that are not named, so the others are
# sent along as they were deployed. Settings that can change in place are kept out of the
# application's ``args``: if those differ, Serve rebuilds the application and replaces every
# replica. Ray's own client, ``ServeSubmissionClient``, is not used: it waits without a timeout,
# and follows redirects, to which it would send the token.

PATH = "/api/serve/applications/"
HANDING_OVER_S = 90.0
"""Longest silence while the application is submitted, seconds: Serve may have to start first."""
RUNNING = "RUNNING"
FAILED = "DEPLOY_FAILED"
DELETING = "DELETING"
IMPERATIVE = "imperative"
"""Source of an application that a program deployed last, not a configuration."""


class _Replica(BaseModel):
    state: str
    node_ip: str | None = None


class _Deployment(BaseModel):
    status: str
    message: str = ""
    target_num_replicas: int
    replicas: list[_Replica]


class _Application(BaseModel):
    status: str
    message: str = ""
    last_deployed_time_s: float = 0.0
    source: str = "unknown"
    deployed_app_config: dict[str, Any] | None = None
    deployments: dict[str, _Deployment] = {}


class _Serve(BaseModel):
    """The fields of Serve's answer that are used here; it has more."""

    applications: dict[str, _Application]
    target_capacity: float | None = None
    proxy_location: str | None = None


class Part(NamedTuple):
    """One deployment of the application: replicas that run, those wanted, and its state."""

    running: int
    wanted: int
    status: str


class ApplicationState(NamedTuple):
    """An application's state, as Serve reports it. ``deployed_s``: Unix seconds of the cluster;
    ``parts``: its deployments by name; ``addresses``: a URL for each node with a router."""

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
    Raises OSError: its file cannot be read; ValueError: what is there cannot be a token."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return _checked(token, "RAY_AUTH_TOKEN")
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return _checked(Path(named).read_text(encoding="utf-8"), named)
    usual = Path.home() / ".ray" / "auth_token"
    return _checked(usual.read_text(encoding="utf-8"), str(usual)) if usual.is_file() else None


def _checked(token: str, place: str) -> str:
    """A token that may stand in a header. The message of HTTP's own check would show it."""
    token = token.strip()
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(f"the token in {place} is not printable ASCII without spaces")
    return token


def application_of(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Serve's description of the application with the configuration ``data``. Numbers of replicas
    are options of deployments, so their change replaces none; keys go as digests, since Serve shows
    them."""
    from sluice.deploy.app import deployment_name  # imports Ray

    config = parse_config(data)
    args = deepcopy(dict(data))
    # The name is the application's; a change of the field must not rebuild it.
    args.pop("name", None)
    shared = bool((args.get("replica") or {}).get("pools"))
    for section in (args, *(args.get("models") or {}).values()):
        if section and section.get("replica"):
            replica = section["replica"]
            if shared and section is not args and "count" in replica:
                # A model with its own number of replicas has none of the shared pools.
                replica.setdefault("pools", {})
            for sized in (replica, *(replica.get("pools") or {}).values()):
                if sized:
                    sized.pop("count", None)
    router = args.get("router") or {}
    for holder in (router, router.get("admin") or {}, router.get("metrics") or {}):
        for field in ("api_keys", "keys"):
            if holder.get(field):
                holder[field] = [_digested(entry) for entry in holder[field]]
    return {
        "name": name,
        "route_prefix": None,  # its routers listen themselves
        "import_path": "sluice.deploy.app:build",
        "args": args,
        "deployments": [
            {
                "name": deployment_name(fleet.key, pool.role, pool.name),
                "num_replicas": pool.replica.count,
            }
            for fleet in config.fleets
            for pool in fleet.pools
            if pool.replica.autoscaling is None
        ],
    }


def needs_of(config: SluiceConfig) -> dict[str, str]:
    """What a replica of each deployment needs to be placed: Serve's own message has no strategy and
    no labels."""
    from sluice.deploy.app import deployment_name, gpus_per_replica  # imports Ray

    return {
        deployment_name(fleet.key, pool.role): needs(
            pool.engine, pool.replica, gpus_per_replica(pool)
        )
        for fleet in config.fleets
        for pool in fleet.pools
    }


def _digested(entry: str | dict[str, Any]) -> dict[str, Any]:
    """An entry of a list of keys without the key itself."""
    rest = {"key": entry} if isinstance(entry, str) else dict(entry)
    key = rest.pop("key", None)
    if key is not None:
        rest["sha256"] = hashlib.sha256(key.encode()).hexdigest()
    return rest


def submit(server: JsonServer, application: Mapping[str, Any]) -> float:
    """Start or update the application; the Unix time of its previous deployment, or 0. Raises
    UnreachableError, AnswerError; ValueError: another application would be deleted, since Serve
    does not say how it was deployed."""
    serve = _serve_of(server)
    body: dict[str, Any] = {
        "proxy_location": serve.proxy_location or "Disabled",
        "applications": [*_others(serve, application["name"]), application],
    }
    if serve.target_capacity is not None:
        body["target_capacity"] = serve.target_capacity
    server.ask("PUT", PATH, body, HANDING_OVER_S)
    before = serve.applications.get(application["name"])
    return 0.0 if before is None else before.last_deployed_time_s


def _others(serve: _Serve, name: str) -> list[dict[str, Any]]:
    """The configurations of the other applications. Raises ValueError: one of them has none."""
    others = []
    for other, each in serve.applications.items():
        # Serve leaves alone what a program deployed with `serve.run`. It may still show the
        # configuration from before that; with that the application would go back to it.
        if other == name or each.source == IMPERATIVE:
            continue
        if each.deployed_app_config is not None:
            others.append(each.deployed_app_config)
        elif each.status != DELETING:
            raise ValueError(
                f"Serve does not say how {printable(other)!r} was deployed, and would delete it: "
                "try again once it has started"
            )
    return others


def state_of(server: JsonServer, name: str) -> ApplicationState | None:
    """The state of the application; ``None`` if Serve does not know it. Raises as
    :meth:`JsonServer.ask`."""
    serve = _serve_of(server)
    found = serve.applications.get(name)
    if found is None:
        return None
    # That of the application may only name the deployments that have failed.
    messages = [*(each.message for each in found.deployments.values()), found.message]
    return ApplicationState(
        found.status,
        next((line for line in map(_last_line, messages) if line), ""),
        found.last_deployed_time_s,
        {
            name: Part(
                sum(replica.state == RUNNING for replica in each.replicas),
                each.target_num_replicas,
                each.status,
            )
            for name, each in found.deployments.items()
        },
        _addresses(found),
    )


def _serve_of(server: JsonServer) -> _Serve:
    """Raises as :meth:`JsonServer.ask`."""
    try:
        return _Serve.model_validate(server.ask("GET", PATH))
    except ValidationError:
        raise AnswerError(200, "this is not Serve's state: is it the dashboard of Ray?") from None


def _addresses(application: _Application) -> tuple[str, ...]:
    routers = application.deployments.get(ROUTER_DEPLOYMENT)
    deployed = application.deployed_app_config
    if routers is None or deployed is None:
        return ()
    try:
        config = parse_config(deployed.get("args", {})).router
    except ValueError:
        return ()
    nodes = {each.node_ip for each in routers.replicas if each.state == RUNNING and each.node_ip}
    if is_loopback(config.host):
        nodes = {"127.0.0.1"} if nodes else set()
    scheme = "http" if config.tls is None else "https"
    return tuple(
        f"{scheme}://{f'[{node}]' if ':' in node else node}:{config.port}/v1"
        for node in sorted(nodes)
    )


def _last_line(message: str) -> str:
    """The last line of a traceback, which names the error."""
    lines = [line for line in message.splitlines() if line.strip()]
    return printable(lines[-1]).strip() if lines else ""


POLL_S = 0.5
DEFAULT_TIMEOUT_S = 1800.0
"""Loading a large model takes many minutes."""

_TOKEN_HINT = "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the token of the cluster"


@click.command()
@address_option(
    "http://127.0.0.1:8265",
    "RAY_DASHBOARD_ADDRESS",
    "Ray's dashboard on the head of the cluster.",
)
@click.option("--config", "path", type=CONFIG_FILE, required=True, help="YAML configuration.")
@click.option("--name", help="Name of the application; default: the file's `name`.")
@click.option("--wait/--no-wait", default=True, help="Wait until it runs, or only submit it.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    help="Longest wait, seconds.",
)
@json_option
def deploy(
    address: str,
    path: Path,
    name: str | None,
    wait: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Start or update an application on a running Ray cluster.

    The file is checked here first. Sluice must be installed on the nodes of the cluster, in the
    same version, and Ray must run there with the settings that `deploy/ray/` has. The cluster's
    token is taken from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, as by Ray's own
    tools.

    While it waits, queries that the dashboard does not answer are retried.

    Deploying again updates: another number of replicas is reached by starting or draining some;
    for any other change the replicas are replaced a few at a time, each after it has finished what
    it had. Other applications on the cluster stay as they are; each needs a router.port of its own.

    \b
    Examples:
      sluice deploy --config sluice.yaml
      sluice deploy --address http://head:8265 --config sluice.yaml --no-wait
      sluice deploy --config chat.yaml --name chat
    """
    config = load(path, {} if name is None else {"name": name})
    faults = engine_faults(config, here=False)
    if faults:
        raise Failure(Exit.FAILED, "\n".join(faults))
    err = Console(stderr=True)
    try:
        application = application_of(read_mapping(path), config.name)
        with talking("Ray's dashboard", address, _TOKEN_HINT):
            server = JsonServer(address, ray_token())
            before_s = submit(server, application)
    except ValueError as error:
        raise Failure(Exit.FAILED, str(error)) from error
    err.print(f"handed {config.name!r} to {server.address}", highlight=False, markup=False)
    if not wait:
        return

    def look() -> ApplicationState | None:
        with talking("Ray's dashboard", address, _TOKEN_HINT):
            return state_of(server, config.name)

    state = _wait(look, address, config.name, needs_of(config), before_s, timeout_s, err)
    if is_loopback(config.router.host):
        err.print("only the nodes themselves reach it, unless router.host is 0.0.0.0", markup=False)
    if as_json:
        shown = {
            "name": config.name,
            "status": state.status,
            "addresses": list(state.addresses),
            "deployments": {name: part._asdict() for name, part in state.parts.items()},
        }
        click.echo(json.dumps(shown, indent=2))
        return
    click.echo(f"{config.name} runs: {state.progress}")
    for each in state.addresses:
        click.echo(each)


def _wait(
    look: Callable[[], ApplicationState | None],
    address: str,
    name: str,
    needs: Mapping[str, str],
    before_s: float,
    timeout_s: float,
    err: Console,
) -> ApplicationState:
    """The state once it runs, with progress on ``err`` meanwhile. ``before_s``: as ``submit``
    returns. Raises Failure: it failed to start or took too long, or a query failed permanently."""
    started_s = time.monotonic()
    last, message = "", ""
    while True:
        try:
            state = look()
        except Failure as failure:
            if not failure.passing:
                raise
            line = "no answer for now"
            message = f"the last query failed: {failure.message}"
        else:
            # Until Serve reports a new deployment time, the state is that of the previous one.
            current = state is not None and state.deployed_s != before_s
            if state is not None and current and state.status == RUNNING:
                return state
            if state is not None and current and state.status == FAILED:
                raise Failure(
                    Exit.FAILED,
                    f"{name!r} failed to start: {state.message or 'Serve does not say why'} "
                    f"(`serve status --address {address}` has the whole text)",
                )
            line = state.progress if state is not None else "waiting for Serve"
            message = state.message if state is not None else ""
            missing = [
                f"a replica of {part} needs {needs[part]}"
                for part, count in (state.parts if state is not None else {}).items()
                if count.running < count.wanted and part in needs
            ]
            message = "; ".join(filter(None, (*missing, message)))
        waited_s = time.monotonic() - started_s
        if line != last:
            err.print(f"{line} ({waited_s:.0f} s)", highlight=False, markup=False)
            last = line
        if waited_s > timeout_s:
            raise Failure(
                Exit.TIMED_OUT,
                f"{name!r} does not run after {timeout_s:g} s: {line}"
                f"{'; ' + message if message else ''}; it may still start: "
                f"check with `serve status --address {address}`, or give a longer --timeout",
            )
        time.sleep(POLL_S)
