"""Names of the ranks of a replica with data parallelism. Each is an engine with its own queue, so
the controller and routers see replicas ``abc:0``, ``abc:1``, ...; Serve knows ``abc``."""

from __future__ import annotations

import re
from typing import Final

_SEPARATOR: Final = ":"
_RANK: Final = re.compile(rf"[\w.-]+{_SEPARATOR}(\d{{1,5}})")


def rank_name(replica_id: str, rank: int | None) -> str:
    """The name of a rank of Serve's replica ``replica_id``; without a rank its own name."""
    return replica_id if rank is None else f"{replica_id}{_SEPARATOR}{rank}"


def replica_of(name: str) -> str:
    """Serve's replica of a rank; of a replica without ranks its own name."""
    return name.partition(_SEPARATOR)[0]


def rank_of(name: str) -> int | None:
    """The number of the rank with which ``name`` begins; ``None`` for a replica without ranks."""
    found = _RANK.match(name)
    return None if found is None else int(found[1])
