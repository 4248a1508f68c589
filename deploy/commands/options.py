"""What several commands share: reading a configuration file, and the form of their help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from deploy.commands.exits import Exit, Failure
from deploy.config import SluiceConfig, load_config

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""Settings of every group; commands inherit them."""

CONFIG_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
"""A YAML configuration that exists."""

as_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def load(path: Path | None, overrides: dict[str, Any] | None = None) -> SluiceConfig:
    """The configuration in ``path`` with ``overrides`` over it.

    Raises:
        Failure: it cannot be read or is not valid; in one line.
    """
    try:
        return load_config(path, overrides)
    except (ValueError, OSError) as error:
        raise Failure(Exit.FAILED, str(error)) from error
