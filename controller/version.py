"""The version of Sluice."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The installed version; ``source`` for a source tree that is not installed, edited or not."""
    try:
        return metadata.version("sluice")
    except metadata.PackageNotFoundError:
        return "source"
