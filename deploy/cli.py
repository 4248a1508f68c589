"""The command line ``sluice``: the commands of :mod:`sluice.deploy.commands` and of entry
points."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the working folder first: a file there must not stand in for our modules.
    del sys.path[0]

from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_GROUP = "sluice.commands"
"""The group of entry points that name commands."""

_MODULES = {
    "serve": ("serve",),
    "deploy": ("deploy",),
    "admin": ("status", "drain"),
    "profile": ("profile",),
    "offline": ("config", "env", "keys", "policies"),
    "completion": ("completion",),
    "usage": ("usage",),
}

_PURPOSES = {
    "bench": "Measure this machine and other systems, and run experiments.",
    "completion": "Print the script that completes commands in a shell.",
    "config": "Check a configuration, or print one.",
    "deploy": "Start or update an application on a running Ray cluster.",
    "drain": "Send a replica no new requests, and wait until it is empty.",
    "env": "Print the environment that Ray needs on each cluster node.",
    "keys": "Make API keys and their digests, and check a file of them.",
    "policies": "List every policy with its source and its options.",
    "profile": "Measure an engine's step times here, and keep the fitted model.",
    "serve": "Serve a model on this machine until Ctrl-C or SIGTERM.",
    "simulate": "Find how many replicas recorded traffic needs.",
    "status": "Say whether a running application serves as it should.",
    "usage": "Say who has used the engines, and what a promise kept costs.",
}
"""The first sentence of each command's help. Lists and completions show it without an import."""


class _Commands(click.Group):
    """Imports a command where it is asked for: all of them take a second."""

    @cached_property
    def _entries(self) -> dict[str, EntryPoint]:
        own = {
            name: EntryPoint(name, f"sluice.deploy.commands.{module}:{name}", _GROUP)
            for module, names in _MODULES.items()
            for name in names
        }
        found = {entry.name: entry for entry in entry_points(group=_GROUP)} | own
        return dict(sorted(found.items()))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._purpose(ctx, name)) for name in self._entries])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [name for name in self._entries if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self._purpose(ctx, name)) for name in found]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def _purpose(self, ctx: click.Context, name: str) -> str:
        if name in _PURPOSES:
            return _PURPOSES[name]
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(64)

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
