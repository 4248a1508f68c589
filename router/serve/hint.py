"""What travels with a call to tell the request router where it should go."""

from __future__ import annotations

from typing import NamedTuple

NO_REPLICA_WAIT_S = 5.0
"""How long after the last replica has gone requests wait for a first one to appear, seconds. Later
ones are refused at once: what is not replaced by then is not replaced soon."""

_AVOID = "!"
_CLOSED = "~"
_QUARANTINED = "?"
_SEPARATOR = ","


class NoReplicaError(RuntimeError):
    """The deployment has no running replica for the request."""


class DrainedError(NoReplicaError):
    """The deployment has replicas, and an operator has closed all of them to new requests."""


class Hint(NamedTuple):
    """Where a request should go. Replicas are named by Serve's unique id.

    Attributes:
        target: the replica that the controller chose, or ``None``.
        avoid: replicas that have just failed this request; used where there is no target.
        closed: replicas that an operator has closed to new requests. Only the controller, which
            may have decided a moment earlier, still sends there.
        quarantined: replicas that have failed or hang. Only the controller sends there as long as
            there are others.
    """

    target: str | None = None
    avoid: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: object) -> Hint:
        """From the keyword that travels with the call. Anything odd is no hint."""
        if not isinstance(text, str) or not text:
            return cls()
        text, _, last = text.partition(_QUARANTINED)
        where, _, middle = text.partition(_CLOSED)
        if where.startswith(_AVOID):
            return cls(None, _ids(where[len(_AVOID) :]), _ids(middle), _ids(last))
        return cls(where or None, (), _ids(middle), _ids(last))

    def encode(self) -> str | None:
        """One string, because the replica's method takes one: the target's id, or ``!`` and the
        ids to avoid; then ``~`` and the closed ids, and ``?`` and the quarantined ones. ``None``
        where there is nothing of it."""
        where = self.target or ""
        if self.target is None and self.avoid:
            where = _AVOID + _SEPARATOR.join(self.avoid)
        closed = _CLOSED + _SEPARATOR.join(self.closed) if self.closed else ""
        quarantined = _QUARANTINED + _SEPARATOR.join(self.quarantined) if self.quarantined else ""
        return where + closed + quarantined or None


def _ids(text: str) -> tuple[str, ...]:
    return tuple(text.split(_SEPARATOR)) if text else ()
