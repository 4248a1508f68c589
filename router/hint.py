"""What travels with a call to tell the request router where it should go."""

from __future__ import annotations

from typing import NamedTuple

_AVOID = "!"
_SEPARATOR = ","


class NoReplicaError(RuntimeError):
    """The deployment has no running replica."""


class Hint(NamedTuple):
    """Where a request should go. Replicas are named by Serve's unique id.

    Attributes:
        target: the replica that the controller chose, or ``None``.
        avoid: replicas that have just failed this request; used where there is no target.
    """

    target: str | None = None
    avoid: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: object) -> Hint:
        """From the keyword that travels with the call. Anything odd is no hint."""
        if not isinstance(text, str) or not text:
            return cls()
        if text.startswith(_AVOID):
            return cls(avoid=tuple(text[len(_AVOID) :].split(_SEPARATOR)))
        return cls(target=text)

    def encode(self) -> str | None:
        """One string, because the replica's method takes one: the target's id, or ``!`` and the
        ids to avoid, or ``None``."""
        if self.target is not None:
            return self.target
        return _AVOID + _SEPARATOR.join(self.avoid) if self.avoid else None
