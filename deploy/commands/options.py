"""Code shared by several commands: options, reading a configuration, and errors of servers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from sluice.deploy.config import SluiceConfig, load_config
from sluice.deploy.json_http import AnswerError, UnreachableError, checked_address

# How a command ends: its exit code, and one line that says what to do.


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
    """Ends the command with an exit code of its own and one line on standard error. ``passing``:
    it may be temporary, so commands that wait continue to wait."""

    def __init__(self, exit_code: Exit, message: str, passing: bool = False) -> None:
        lines = (" ".join(line.split()) for line in message.splitlines())
        super().__init__("; ".join(line for line in lines if line).replace(":;", ":"))
        # click declares it for classes, and reads it from the instance.
        self.exit_code = exit_code  # type: ignore[misc]
        self.passing = passing


CONFIG_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
"""A YAML configuration that exists."""

as_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def load(path: Path | None, overrides: dict[str, Any] | None = None) -> SluiceConfig:
    """The configuration in ``path`` with ``overrides`` over it. Raises Failure."""
    try:
        return load_config(path, overrides)
    except (ValueError, OSError) as error:
        raise Failure(Exit.FAILED, str(error)) from error


def address_option(
    default: str, variable: str, what: str, find: Callable[[], str] | None = None
) -> Callable[[Any], Any]:
    """``--address``, checked: the option, else the environment's ``variable``, else ``find`` or
    ``default``."""

    def check(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
        try:
            return checked_address(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return click.option(
        "--address",
        default=find or default,
        envvar=variable,
        show_default=default if find else True,
        show_envvar=True,
        callback=check,
        help=what,
    )


@contextmanager
def talking(to: str, address: str, key_hint: str) -> Iterator[None]:
    """Converts errors of a conversation with a server into the command's failure."""
    try:
        yield
    except UnreachableError as error:
        raise Failure(
            Exit.UNREACHABLE,
            f"{to} does not answer at {address} ({error}); is it running, and is --address right?",
            passing=True,
        ) from None
    except AnswerError as error:
        if error.status in (401, 403):
            raise Failure(Exit.REFUSED, f"{to} refuses: {error}; {key_hint}") from None
        raise Failure(
            Exit.FAILED, f"{to} at {address} answered {error.status}: {error}", error.passing
        ) from None
    except OSError as error:
        raise Failure(Exit.FAILED, str(error)) from None
