"""The command line: ``sluice`` and its commands: files in :mod:`sluice.deploy.commands`, and what
packages above register."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the working folder first: a file there must not stand in for our modules.
    del sys.path[0]

from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

import click

from sluice.deploy.commands.admin import drain, status, top
from sluice.deploy.commands.deploy import deploy
from sluice.deploy.commands.offline import config, env, keys, policies
from sluice.deploy.commands.options import CONTEXT
from sluice.deploy.commands.profile import profile
from sluice.deploy.commands.serve import serve

_REGISTERED = "sluice.commands"
"""The group of entry points that name commands."""


class _Commands(click.Group):
    """Imports a registered command where it is asked for: what measures takes as long as all the
    rest."""

    @cached_property
    def _registered(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=_REGISTERED)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._registered])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in self._registered:
            return own
        command: click.Command = self._registered[cmd_name].load()
        return command


@click.group(cls=_Commands, context_settings=CONTEXT)
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
    env,
    keys,
    policies,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
