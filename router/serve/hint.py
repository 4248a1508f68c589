"""The routing hint that a call carries for Serve's request router."""

from __future__ import annotations

from typing import NamedTuple

START_WAIT_S = 600.0
"""Maximum wait of a request for the first replica of a model that may have none, seconds."""

NO_REPLICA_WAIT_S = 5.0
"""How long after the last replica has left requests wait for a new one, seconds. Later requests are
refused at once: a replica that is not replaced by then is not replaced soon."""

_AVOID = "!"
_CLOSED = "~"
_QUARANTINED = "?"
_SEPARATOR = ","


class NoReplicaError(RuntimeError):
    """The deployment has no running replica for the request."""


class DrainedError(NoReplicaError):
    """The deployment has replicas, and an operator has closed all of them to new requests."""


class Hint(NamedTuple):
    """Where a request should go, by Serve's replica ids. ``avoid``: used without a target.
    ``closed``: only a target selects them; so for ``quarantined`` as long as there are others."""

    target: str | None = None
    avoid: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: object) -> Hint:
        """Parse the keyword argument of the call. An invalid value is an empty hint."""
        if not isinstance(text, str) or not text:
            return cls()
        text, _, last = text.partition(_QUARANTINED)
        where, _, middle = text.partition(_CLOSED)
        if where.startswith(_AVOID):
            return cls(None, _ids(where[len(_AVOID) :]), _ids(middle), _ids(last))
        return cls(where or None, (), _ids(middle), _ids(last))

    def encode(self) -> str | None:
        """One string, as the replica's method takes: the target, or ``!`` and ids to avoid; ``~``
        closed; ``?`` quarantined. ``None`` if all are empty."""
        where = self.target or ""
        if self.target is None and self.avoid:
            where = _AVOID + _SEPARATOR.join(self.avoid)
        closed = _CLOSED + _SEPARATOR.join(self.closed) if self.closed else ""
        quarantined = _QUARANTINED + _SEPARATOR.join(self.quarantined) if self.quarantined else ""
        return where + closed + quarantined or None


def _ids(text: str) -> tuple[str, ...]:
    return tuple(text.split(_SEPARATOR)) if text else ()
