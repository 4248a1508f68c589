"""Processes that tests look for among others, any of which may end meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def title_of(process: psutil.Process) -> str:
    """Its command line; empty where it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def the_one(family: Iterable[psutil.Process], name: str) -> psutil.Process:
    """The one process of ``family`` that has this name and runs."""
    (found,) = (each for each in family if name_of(each) == name)
    return found


def name_of(process: psutil.Process) -> str:
    """Its name; empty where it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""
