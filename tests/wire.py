"""Networks that can be cut: a namespace of this machine, joined to it by cables of which each can
lose every packet both ways, with no word to either end, as between machines. Needs root."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_NOBODY = "02:00:00:00:00:01"
"""An address that no interface has."""


@dataclass(frozen=True)
class Wire:
    """A cable.

    Attributes:
        here, there: the addresses of its ends, on this machine and in the namespace.
    """

    number: int
    namespace: str
    here: str
    there: str

    def cut(self) -> None:
        nobody = ("lladdr", _NOBODY, "nud", "permanent")
        _ip("neigh", "replace", self.there, "dev", self._near, *nobody)
        _ip("-n", self.namespace, "neigh", "replace", self.here, "dev", self._far, *nobody)

    def mend(self) -> None:
        with suppress(subprocess.CalledProcessError):
            _ip("neigh", "del", self.there, "dev", self._near)
            _ip("-n", self.namespace, "neigh", "del", self.here, "dev", self._far)

    @property
    def _near(self) -> str:
        return f"sluice{self.number}"

    @property
    def _far(self) -> str:
        return f"far{self.number}"

    def lay(self) -> None:
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far)
        _ip("link", "set", self._far, "netns", self.namespace)
        _ip("addr", "add", f"{self.here}/30", "dev", self._near)
        _ip("link", "set", self._near, "up")
        # To other namespaces. Of this interface alone, not of the machine.
        Path(f"/proc/sys/net/ipv4/conf/{self._near}/forwarding").write_text("1")
        _ip("-n", self.namespace, "addr", "add", f"{self.there}/30", "dev", self._far)
        _ip("-n", self.namespace, "link", "set", self._far, "up")


@dataclass(frozen=True)
class Network:
    """A namespace with the cables to it; what it has no other way to goes over the first."""

    name: str
    wires: tuple[Wire, ...]

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


@contextmanager
def network(wires: int = 1) -> Iterator[Network]:
    """A namespace with so many cables, until the block ends."""
    name = f"sluice-{os.getpid()}-{random.randrange(10_000)}"
    with ExitStack() as undo:
        _ip("netns", "add", name)
        undo.callback(_ip, "netns", "del", name)
        _ip("-n", name, "link", "set", "lo", "up")
        laid = []
        for number in random.sample(range(1 << 14), wires):
            addresses = [f"10.77.{number >> 6}.{(number & 63) * 4 + end}" for end in (1, 2)]
            laid.append(Wire(number, name, *addresses))
            laid[-1].lay()
        _ip("-n", name, "route", "add", "default", "via", laid[0].here)
        yield Network(name, tuple(laid))


@cache
def can_cut() -> bool:
    """Whether networks can be made here: by root, with the command ``ip``, where the system lets
    it."""
    try:
        with network():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
