"""What the source of a module says, and of all modules of Sluice that it imports."""

from __future__ import annotations

import re
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path

_IMPORT = re.compile(r"^from (sluice[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def digest_of(name: str) -> str:
    """Digest of the source of a module and of all that it imports at its top from Sluice, directly
    or not; its imports have run. ``O(source)``, once per module."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        own = waiting.pop()
        if own not in found:
            found.add(own)
            waiting += _read(own)[1]
    together = blake2b()
    for own in sorted(found):
        together.update(_read(own)[0])
    return together.hexdigest()


@cache
def _read(name: str) -> tuple[bytes, tuple[str, ...]]:
    """The digest of a module's source, and the modules that it imports."""
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None:
        return b"", ()
    source = Path(path).read_bytes()
    names = []
    for package, listed, line in _IMPORT.findall(source.decode()):
        names.append(package)
        # What is imported may itself be a module.
        parts = [f"{package}.{each}" for each in re.findall(r"\w+", listed or line)]
        names += [each for each in parts if each in sys.modules]
    return blake2b(name.encode() + source).digest(), tuple(names)
