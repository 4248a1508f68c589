"""How a command ends: its exit code, and one line that says what to do."""

from __future__ import annotations

import enum

import click


class Exit(enum.IntEnum):
    """Exit codes, the same for every command; docs/cli.md explains them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    """click's own, for wrong options and arguments."""
    UNREACHABLE = 3
    REFUSED = 4
    TIMED_OUT = 5


class Failure(click.ClickException):
    """Ends the command with an exit code of its own and one line on standard error.

    Args:
        exit_code: exit code of the process.
        message: what was wrong and what to do. Line breaks become semicolons.
        passing: the failure may be temporary, so commands that wait continue to wait.
    """

    def __init__(self, exit_code: Exit, message: str, passing: bool = False) -> None:
        lines = (" ".join(line.split()) for line in message.splitlines())
        super().__init__("; ".join(line for line in lines if line).replace(":;", ":"))
        # click declares it for classes, and reads it from the instance.
        self.exit_code = exit_code  # type: ignore[misc]
        self.passing = passing
