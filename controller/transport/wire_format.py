"""The messages on the controller's plain connection, and the version of their format.

A connection carries frames (:mod:`sluice.protocol.connection`). The client begins with the
token (:mod:`sluice.protocol.connection`); then each frame is one message of the types
below as MessagePack. ``number`` is the client's number of the message; its answer carries the same
one.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sluice.controller.transport.query_wire import ObjectiveRow, QueryRow
from sluice.protocol.messages import Key, ReplicaDelta, ReportReply, RouteReply
from sluice.scheduling.fleet.prefix import HELD
from sluice.scheduling.fleet.state import ROW, SUMMARY
from sluice.scheduling.request.job import RouteDecision
from sluice.scheduling.request.stages import Stage

MAX_FRAME: Final = 1 << 20
"""Longest message, bytes."""

MAX_QUERIES: Final = 1024
"""Most queries in one call."""

_Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Fields of both questions.

    Attributes:
        sent_s: when it was sent, by the client's monotonic clock.
        left_s: how long the client waits for the answer.
    """

    number: Key
    sent_s: _Seconds
    left_s: _Seconds


class Route(Question, frozen=True, array_like=True, tag=1):
    """Asks for decisions. Each query (:mod:`sluice.controller.transport.query_wire`) is decoded by
    itself: a malformed one spoils no other."""

    queries: Annotated[list[msgspec.Raw], Meta(max_length=MAX_QUERIES)]


class Report(Question, frozen=True, array_like=True, tag=2):
    """A replica's report (:mod:`sluice.controller.transport.report_wire`)."""

    report: msgspec.Raw


class Routed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answers :class:`Route`."""

    number: Key
    reply: RouteReply


class Reported(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answers :class:`Report`."""

    number: Key
    reply: ReportReply


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Answers either. ``why``: what was wrong; ``None``: the question came too late."""

    number: Key
    why: str | None


encode: Final = msgspec.msgpack.Encoder().encode
decode_question: Final = msgspec.msgpack.Decoder(Route | Report).decode
decode_answer: Final = msgspec.msgpack.Decoder(Routed | Reported | Refused).decode


def _layouts() -> str:
    """A hash of the message layouts: another version may have other fields, and its rows must not
    be decoded with these."""
    tuples = (QueryRow, ObjectiveRow, Stage, RouteReply, RouteDecision, ReplicaDelta, ReportReply)
    structs = (Route, Report, Routed, Reported, Refused)
    fields = [each._fields for each in tuples], [each.__struct_fields__ for each in structs]
    tables = [table.descr for table in (ROW, SUMMARY, HELD)]
    return hashlib.blake2b(repr((fields, tables)).encode(), digest_size=8).hexdigest()


FORMAT: Final = _layouts()
"""Both sides must have the same format. Processes of different versions, as in a rolling update,
use actor calls, where new fields have defaults."""
