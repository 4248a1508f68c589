"""docs/cli.md has every command and exit code, and every command explains itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from sluice.deploy.cli import main
from sluice.deploy.commands.options import Exit
from tests.documents import ROOT, rows, section

CLI = ROOT / "docs" / "cli.md"


def paths(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command below ``command``, by its words."""
    if not isinstance(command, click.Group):
        yield words
        return
    for name, each in children(command).items():
        yield from paths(each, (*words, name))


def children(group: click.Group) -> dict[str, click.Command]:
    """The commands of a group, also those that it imports where they are asked for."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


COMMANDS = list(paths(main))


def test_every_command_is_in_the_table() -> None:
    assert set(rows(section(CLI, "The command line"))) == set(children(main))


def test_every_exit_code_is_in_the_table() -> None:
    table = section(CLI, "For scripts")
    listed = [
        (int(code), name) for code, name in re.findall(r"(?m)^\| (\d+) \| ([\w ]+) \|", table)
    ]
    assert listed == [(code.value, code.name.lower().replace("_", " ")) for code in Exit]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_examples_of_the_command(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"])
    assert shown.exit_code == Exit.OK
    assert "Example" in shown.output
    assert f"sluice {' '.join(words)}" in shown.output.partition("Example")[2]


@pytest.mark.parametrize("words", [(), *COMMANDS], ids=" ".join)
def test_an_unknown_option_is_a_matter_of_usage(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(main, [*words, "--no-such-option"]).exit_code == Exit.USAGE
