"""The README for package indexes: its links lead to the files of this version in the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

PROJECT = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]


def absolute(link: re.Match[str]) -> str:
    """The address of a linked file of the repository, or of a picture's bytes."""
    view = "raw" if link[0].endswith((".png", ".svg")) else "blob"
    return f"{PROJECT['urls']['Repository']}/{view}/v{PROJECT['version']}/{link[0]}"


setup(
    long_description=re.sub(
        r"(?<=\]\()(?![a-z]+:|#)[^)\s]+", absolute, Path("README.md").read_text("utf-8")
    ),
    long_description_content_type="text/markdown",
)
