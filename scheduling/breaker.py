"""When a replica that fails its requests gets no more of them, and when it is tried again."""

from __future__ import annotations

import enum


class Trouble(enum.StrEnum):
    """What a router saw of a replica.

    ``FAILED``: a request failed there in a way that may not happen elsewhere. ``HUNG``: a stream
    from there made no progress for too long.
    """

    FAILED = "failed"
    HUNG = "hung"
