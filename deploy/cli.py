"""The command line ``sluice``: the commands of :mod:`sluice.deploy.commands` and of entry
points."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the working folder first: a file there must not stand in for our modules.
    del sys.path[0]

from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

import click

_GROUP = "sluice.commands"
"""The group of entry points that name commands."""

_MODULES = {
    "serve": ("serve",),
    "deploy": ("deploy",),
    "admin": ("status", "top", "drain"),
    "profile": ("profile",),
    "offline": ("config", "env", "keys", "policies"),
}


class _Commands(click.Group):
    """Imports a command where it is asked for: all of them take a second."""

    @cached_property
    def _entries(self) -> dict[str, EntryPoint]:
        own = {
            name: EntryPoint(name, f"sluice.deploy.commands.{module}:{name}", _GROUP)
            for module, names in _MODULES.items()
            for name in names
        }
        return {entry.name: entry for entry in entry_points(group=_GROUP)} | own

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = entry.load()
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice-serve")
def main() -> None:
    """Sluice: an SLO-aware serving control plane for large language models on Ray."""


if __name__ == "__main__":
    main()
