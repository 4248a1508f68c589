"""Messages between the controller and its clients (routers and replicas).

Times are ages, or times of the sender's monotonic clock with the sender's ``now_s``, so clocks
of different hosts are never compared. The types have the bounds by which ``checks`` decodes."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.msgpack import Ext

from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.fleet.local_orders import LOCAL_ORDERS, SLIDE
from sluice.scheduling.fleet.prefix import HELD, NO_HELD, NO_HELD_SLOTS
from sluice.scheduling.fleet.state import ROW, SUMMARY
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.request.job import (
    MAX_NUMBER,
    MAX_TOKENS,
    Age,
    Id,
    Key,
    RouteDecision,
    RouteQuery,
    Text,
    Tokens,
)
from sluice.scheduling.request.lateness import Cause
from sluice.scheduling.request.objective import OBJECTIVES, SLO
from sluice.scheduling.request.stages import Stage
from sluice.scheduling.roles import Role

MAX_CAPACITY: Final = 1 << 18
"""Most request slots of one replica."""

MAX_FINISHED: Final = 1 << 18
"""Most finished requests in one delta."""

MAX_KEYS: Final = 1 << 16
"""Most keys or replica ids in one call."""

Size = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""Finite, like the two below."""
Rate = Annotated[float, Meta(gt=0, le=MAX_NUMBER)]
Ages = tuple[Age | None, Age | None, Age | None]
"""TTFT, TPOT and end-to-end time, seconds; ``None`` where there is none."""

_Objective = Annotated[str, Meta(pattern=rf"\A({'|'.join(OBJECTIVES)})\Z")]

MAX_HOLD_S: Final = 5.0
"""Longest time for which a quote is held, seconds."""

Hold = Annotated[float, Meta(ge=0, le=MAX_HOLD_S)]

MAX_USES = 1_024
"""Most entries of one call about rate limits."""


class RouteReply(NamedTuple):
    """Decisions in the order of the queries. ``epoch`` changes when the controller restarts.

    Routers must not send requests to ``closed`` (by an operator) replicas by other means either;
    ``None``: not known yet, as just after a restart. They should avoid ``quarantined`` ones
    while there are others. ``slack_s``: with several cells, this cell's ``Fleet.slack_s``."""

    epoch: int
    decisions: tuple[RouteDecision, ...]
    closed: tuple[str, ...] | None = None
    quarantined: tuple[str, ...] = ()
    slack_s: float | None = None


class ReplicaHello(NamedTuple):
    """Registration of a replica: its static properties and its full state; shared fields as in
    ``ReplicaDelta``.

    The next delta carries ``seq + 1``. ``capacity``: live requests that its table holds.
    ``closed`` carries the operator's setting to a restarted controller. ``role``: the phases
    that it serves; ``elastic``: it follows another one while it runs. ``preempts``: its engine
    suspends a running prefill for a more urgent one. ``local_order``: in which its policy takes
    prefills."""

    replica_id: Id
    node_id: Text
    model: Text
    policy: Text
    role: Role
    max_batch_tokens: Size
    max_sequences: Size
    block_tokens: Size
    capacity: Annotated[int, Meta(ge=1, le=MAX_CAPACITY)]
    profile: LatencyProfile
    seq: Key
    now_s: Number
    slots: np.ndarray
    rows: np.ndarray
    summary: np.void
    draining: bool = False
    held_slots: np.ndarray = NO_HELD_SLOTS
    held: np.ndarray = NO_HELD
    closed: bool = False
    preempts: bool = False
    hung: bool = False
    elastic: bool = False
    local_order: Annotated[int, Meta(ge=0, lt=len(LOCAL_ORDERS))] = SLIDE


class ReplicaDelta(NamedTuple):
    """What changed in a replica since report ``seq - 1``.

    ``slots``/``rows`` are the changed slots of its table (phase 0 is a freed slot),
    ``held_slots``/``held`` those of its held chunks (hash 0 is a freed slot); ``finished`` the
    keys of ended requests, whose reservations are released. ``epoch`` is the controller's as the
    replica knows it. ``hung``: its watchdog reports that its engine makes no progress."""

    replica_id: Id
    epoch: Key
    seq: Key
    now_s: Number
    slots: np.ndarray
    rows: np.ndarray
    summary: np.void
    finished: Annotated[tuple[Key, ...], Meta(max_length=MAX_FINISHED)]
    draining: bool
    held_slots: np.ndarray = NO_HELD_SLOTS
    held: np.ndarray = NO_HELD
    hung: bool = False


class ReportReply(NamedTuple):
    """Answer to a report. ``resync``: send a ``ReplicaHello`` (unknown epoch or replica, or a
    lost report). ``closed``: by an operator. ``role``: to follow from now on, if ``elastic``."""

    epoch: int
    resync: bool
    closed: bool = False
    role: Role | None = None


_Label = Annotated[str, Meta(pattern=r"\A[a-z_][a-z0-9_]{0,63}\Z")]
_LabelValue = Annotated[str, Meta(max_length=256)]


class MetricSample(NamedTuple):
    """One cumulative Prometheus sample of a process: its family is ``family`` of type ``kind``."""

    family: Annotated[str, Meta(pattern=r"\A(sluice|gen_ai)_[a-z0-9_]{1,120}\Z")]
    kind: Annotated[str, Meta(pattern=r"\A(counter|gauge|histogram|summary)\Z")]
    documentation: Annotated[str, Meta(max_length=1_000)]
    name: str
    labels: Annotated[tuple[tuple[_Label, _LabelValue], ...], Meta(max_length=16)]
    value: float


class MetricsPush(NamedTuple):
    """Every sample of one process, cumulative: a lost push loses nothing. ``incarnation``: Unix
    nanoseconds of the process's start; ``number`` of the push in it, from 1."""

    source: str
    incarnation: int
    number: int
    samples: tuple[MetricSample, ...]


class SyncReply(NamedTuple):
    """Answer to a router's sync, for ``closed`` and ``quarantined`` see ``RouteReply``.
    ``late``: keys of waits predicted to miss their TTFT where they are. ``leaving``: replicas
    that are drained or about to stop: running streams may move from them."""

    closed: tuple[str, ...] | None
    quarantined: tuple[str, ...]
    late: tuple[int, ...] = ()
    slack_s: float | None = None
    leaving: tuple[str, ...] = ()


MAX_ENDINGS = 256
"""Most request endings in one call, and most late notices."""


class RequestEnding(NamedTuple):
    """How a request ended, as its router saw it; ``request_id`` and ``tenant`` as in its
    ``RouteQuery``.

    ``outcome`` is ``ok``, ``client_error``, ``refused``, ``failed`` or ``cancelled``; ``missed``
    the stated objectives that an ``ok`` response missed; ``tokens`` the output of the first
    choice. ``ttft_s`` and ``e2e_s`` count from its arrival; ``tpot_s`` is per token after the
    first, by the objective's ``TPOTAnchor``. ``most_tokens`` is the limit of this choice, 0 if
    unknown. ``replica_id`` is the first one of a resumed stream. ``kept`` is ``None`` without a
    promise, an answer or an outcome that can be judged. ``judged_s`` replaces the times for a
    request with stages (``StageClock.judged_s``). ``expected_tokens`` as in its query. ``late``: of
    a promise, the lateness of the first of ``missed``, seconds by cause, the largest part first.
    """

    request_id: Id
    outcome: Id
    missed: Annotated[tuple[_Objective, ...], Meta(max_length=len(OBJECTIVES))]
    tokens: Key
    ttft_s: Age | None
    tpot_s: Age | None
    e2e_s: Age | None
    error: Text = ""
    service_class: Text = ""
    tenant: Key = 0
    most_tokens: Key = 0
    replica_id: Text = ""
    kept: bool | None = None
    judged_s: Ages | None = None
    expected_tokens: Tokens = 0
    late: Annotated[tuple[tuple[Cause, Age], ...], Meta(max_length=len(Cause))] = ()


class LateNotice(NamedTuple):
    """A promised response in progress misses an objective. ``ttft_s``, ``tpot_s`` (until now, by
    its anchor) if late, both of the worst stage for a request with stages."""

    request_id: Id
    ttft_s: Age | None
    tpot_s: Age | None


MAX_WAITS = 256
"""Most requests in one call that wait for their first tokens."""


class FirstTokenWait(NamedTuple):
    """A promised request that waits for its first token; ``ttft_s`` is its objective."""

    key: Key
    replica_id: Id
    ttft_s: Age
    waited_s: Age


MAX_TURN_ENDS = 1_024
"""Most ended turns of tool loops in one call."""


class FaultNotice(NamedTuple):
    """One failure of a replica that a router observed."""

    replica_id: Id
    fault: ReplicaFault


class QuotaUse(NamedTuple):
    """One router's use of one bucket, named by ``account``. ``used``: added since the last
    answered message, negative if more was refunded; ``level``: the router's fill level with
    ``used``, for a controller that does not know the bucket; ``per_s``: drained each second."""

    account: Id
    used: Number
    level: Age
    per_s: Rate


# The messages as bytes. An array travels as its bytes in memory, and the number of its type: the
# types are little-endian on every host.

MAX_BYTES: Final = 512 << 10
"""Bytes of arrays in one message on the connection."""

MAX_SENT_FINISHED: Final = 8_192
"""Finished keys in one message on the connection."""

_ARRAYS: Final = (np.dtype("<i4"), ROW, HELD, np.dtype("<i8"))
_RECORD: Final = len(_ARRAYS)
"""Number of one record of the summary type; before it, those of the arrays."""


def fits(delta: ReplicaDelta) -> bool:
    """Whether a report is small enough for one message."""
    arrays = (delta.slots, delta.rows, delta.held_slots, delta.held)
    return (
        sum(array.nbytes for array in arrays) <= MAX_BYTES
        and len(delta.finished) <= MAX_SENT_FINISHED
    )


def of_extension(code: int, data: memoryview) -> Any:
    """The array or the record of an extension. Raises ValueError: no such type, or a wrong size."""
    if code == _RECORD:
        (record,) = np.frombuffer(data, SUMMARY)
        return record
    if not 0 <= code < _RECORD:
        raise ValueError(f"there is no array type {code}")
    # A copy of the bytes, for compiled loops: numpy copies records field by field.
    return np.frombuffer(bytearray(data), _ARRAYS[code])


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        for code, dtype in enumerate(_ARRAYS):
            if value.dtype == dtype and value.ndim == 1:
                return Ext(code, value.tobytes())
        raise TypeError(f"no message has an array of {value.dtype!s:.60} and shape {value.shape}")
    if isinstance(value, np.void) and value.dtype == SUMMARY:
        return Ext(_RECORD, value.tobytes())
    if isinstance(value, np.integer | np.floating):
        return value.item()
    raise TypeError(f"no message has a {type(value).__name__}")


encode: Final = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
"""The bytes of a message; raises ``TypeError`` for values that no message has."""

_decode_report: Final = msgspec.msgpack.Decoder(ReplicaDelta, ext_hook=of_extension).decode


def decode_report(data: bytes | msgspec.Raw) -> ReplicaDelta:
    """The report in the bytes. Raises ValueError: malformed, or a field is out of range."""
    try:
        return _decode_report(data)
    except msgspec.ValidationError as error:
        place = re.search(r"\$\[(\d+)\]", str(error))
        field = ReplicaDelta._fields[int(place[1])] if place else "all of it"
        raise ValueError(f"a report is malformed in {field}: {error}") from None


_decode_query: Final = msgspec.msgpack.Decoder(RouteQuery).decode


def decode_query(data: bytes | msgspec.Raw) -> RouteQuery:
    """The query in the bytes. Raises ValueError: malformed, or a field is out of range."""
    query = _decode_query(data)
    if query.prefill_key and query.prefill_key == query.key:
        raise ValueError("prefill_key must differ from key")
    if query.brings_kv and not query.moves_from:
        raise ValueError("brings_kv needs the replica that has the KV, moves_from")
    return query


MAX_FRAME: Final = 1 << 20
"""Longest message, bytes."""

MAX_QUERIES: Final = 1024
"""Most queries in one call."""

_Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Fields of both questions; ``sent_s`` is by the client's monotonic clock."""

    number: Key
    sent_s: _Seconds
    left_s: _Seconds


class Route(Question, frozen=True, array_like=True, tag=1):
    """Asks for decisions. Each query is decoded by itself: a malformed one spoils no other."""

    queries: Annotated[list[msgspec.Raw], Meta(max_length=MAX_QUERIES)]


class Report(Question, frozen=True, array_like=True, tag=2):
    """A replica's report."""

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


decode_question: Final = msgspec.msgpack.Decoder(Route | Report).decode
decode_answer: Final = msgspec.msgpack.Decoder(Routed | Reported | Refused).decode


def _layouts() -> str:
    """A hash of the message layouts: another version may have other fields, and its rows must not
    be decoded with these."""
    tuples = (RouteQuery, Stage, RouteReply, RouteDecision, ReplicaDelta, ReportReply)
    structs = (SLO, Route, Report, Routed, Reported, Refused)
    fields = [each._fields for each in tuples], [each.__struct_fields__ for each in structs]
    tables = [table.descr for table in (ROW, SUMMARY, HELD)]
    return hashlib.blake2b(repr((fields, tables)).encode(), digest_size=8).hexdigest()


FORMAT: Final = _layouts()
"""Both sides must have the same format. Processes of different versions, as in a rolling update,
use actor calls, where new fields have defaults."""
