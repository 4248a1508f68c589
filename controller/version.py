"""Which version of Sluice this is."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed one; ``source`` for a source tree that is not installed, however it is
    edited."""
    try:
        return metadata.version("sluice")
    except metadata.PackageNotFoundError:
        return "source"
