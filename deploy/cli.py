"""The command line: ``sluice`` and its commands, each from a file in :mod:`deploy.commands`."""

from __future__ import annotations

import click

from benchmarks.cli import bench, simulate
from deploy.commands.config import config
from deploy.commands.deploy import deploy
from deploy.commands.drain import drain
from deploy.commands.keys import keys
from deploy.commands.options import CONTEXT
from deploy.commands.policies import policies
from deploy.commands.profile import profile
from deploy.commands.serve import serve
from deploy.commands.status import status
from deploy.commands.top import top


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="sluice")
def main() -> None:
    """Sluice: an SLO-aware serving control plane for large language models on Ray."""


for _command in (
    serve,
    deploy,
    status,
    top,
    drain,
    profile,
    config,
    keys,
    policies,
    bench,
    simulate,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
