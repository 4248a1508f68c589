"""The version of a process's message format on the plain connection."""

from __future__ import annotations

import hashlib
from typing import Final

from sluice.controller.messages import (
    ReplicaDelta,
    ReportReply,
    RouteDecision,
    RouteQuery,
    RouteReply,
)
from sluice.scheduling.objective import SLO
from sluice.scheduling.prefix import HELD
from sluice.scheduling.stages import Stage
from sluice.scheduling.state import ROW, SUMMARY

_ENVELOPE: Final = 2
"""To be incremented if messages change in anything but the fields of their contents."""


def _layouts() -> str:
    """A hash of the message layouts: another version may have other fields, and its rows must not
    be decoded with these."""
    messages = (RouteQuery, RouteDecision, RouteReply, ReplicaDelta, ReportReply)
    fields = [*(message._fields for message in messages), SLO.__match_args__, Stage._fields]
    tables = [table.descr for table in (ROW, SUMMARY, HELD)]
    text = repr((_ENVELOPE, fields, tables))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


FORMAT: Final = _layouts()
"""Both sides must have the same format. Processes of different versions, as in a rolling update,
use actor calls, where new fields have defaults."""
