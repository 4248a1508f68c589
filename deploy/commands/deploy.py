"""``sluice deploy``: an application on a Ray cluster that runs already."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
from rich.console import Console

from sluice.deploy.commands.exits import Exit, Failure
from sluice.deploy.commands.options import CONFIG_FILE, address_option, load, talking
from sluice.deploy.commands.options import as_json as json_option
from sluice.deploy.config import read_mapping
from sluice.deploy.json_http import JsonServer
from sluice.deploy.model_check import engine_faults
from sluice.deploy.submission import (
    FAILED,
    RUNNING,
    ApplicationState,
    application_of,
    needs_of,
    ray_token,
    state_of,
    submit,
)
from sluice.router.loopback import is_loopback

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
        click.echo(json.dumps({"name": config.name, **_plain(state)}, indent=2))
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
    """The state once it runs, with progress on ``err`` meanwhile.

    Args:
        look: queries the application's current state from Serve.
        address: address of the dashboard, for the messages.
        name: name of the application.
        needs: what a replica of each deployment needs, for the messages.
        before_s: time of its previous deployment, as :func:`submit` returns.
        timeout_s: longest wait, seconds.
        err: standard error.

    Raises:
        Failure: it failed to start, or did not run in time, or a query failed permanently.
    """
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


def _plain(state: ApplicationState) -> dict[str, object]:
    return {
        "status": state.status,
        "addresses": list(state.addresses),
        "deployments": {name: part._asdict() for name, part in state.parts.items()},
    }
