"""Reading the documents, and running what stands in them as a newcomer would.

A comment above a fenced block says how it is tested:

- ``run: cli``: every line is a command, which must succeed and print something;
- ``run: activate``, ``run: curl``, ``run: python``, ``run: bench``, ``run: policy`` and others of a
  document's own: its test runs them, in the surroundings that they need;
- ``check: config``: a configuration that Sluice accepts, whole or in part;
- ``check: entry point``: what a package's ``pyproject.toml`` says, from which one is installed;
- ``check: serve-config``: one for ``serve deploy``;
- ``check: ray-config``: one of Ray Serve LLM, which ``sluice config from-ray`` reads;
- ``check: command``: needs what a test machine has not, such as a GPU. Its name and its options are
  checked, as those of every command in a document are.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from sluice.replica.private_dir import SOCKETS_VARIABLE

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"(?:<!-- ([^>]+) -->\n)?^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Fenced text. ``marker`` is the comment above it, which says how it is tested."""

    marker: str
    text: str


def blocks(path: Path) -> list[Block]:
    return [Block(*found) for found in _FENCE.findall(path.read_text(encoding="utf-8"))]


def marked(path: Path, marker: str) -> list[str]:
    found = [block.text for block in blocks(path) if block.marker == marker]
    assert found, f"{path.name} has no block marked {marker!r}"
    return found


def section(path: Path, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    text = path.read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"{path.name} has no heading {heading!r}"
    return found[1]


def rows(text: str) -> dict[str, list[str]]:
    """The rows of a table whose first cell is a name in backticks: the other cells by that name."""
    lines = re.findall(r"^\| \[?`([\w.]+)`[^|]*\|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in lines}


def newcomer() -> dict[str, str]:
    """The environment without what the tests set for their own Ray."""
    ours = ("RAY_", SOCKETS_VARIABLE)
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def shell(command: str, timeout_s: float = 300) -> str:
    """The output of ``command`` in the README's environment, which must succeed."""
    (activate,) = marked(README, "run: activate")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{activate}\n{command}"],
        cwd=ROOT,
        env=newcomer(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
