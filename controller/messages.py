"""What crosses the wire between the controller and its clients (routers and replicas).

All of it is plain data. Times are ages or the sender's monotonic clock together with the sender's
``now_s``, so clocks of different hosts are never compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduling.breaker import Trouble
from scheduling.job import RouteDecision, RouteQuery, Tier
from scheduling.latency_profile import LatencyProfile
from scheduling.objective import OBJECTIVES, Times
from scheduling.prefix import NO_HELD, NO_HELD_SLOTS
from scheduling.roles import Role

__all__ = [
    "MAX_ENDINGS",
    "MAX_USES",
    "MAX_WAITS",
    "OBJECTIVES",
    "FirstTokenWait",
    "MetricSample",
    "MetricsPush",
    "PushReply",
    "QuotaUse",
    "ReplicaDelta",
    "ReplicaHello",
    "ReportReply",
    "RequestEnding",
    "RouteDecision",
    "RouteQuery",
    "RouteReply",
    "Tier",
    "Trouble",
    "TroubleNotice",
]


MAX_USES = 1_024
"""Most entries of one call about rate limits."""


class RouteReply(NamedTuple):
    """Decisions in the order of the queries. ``epoch`` changes when the controller restarts.

    ``closed`` are the replicas that an operator has closed to new requests: nothing else may send
    them any either. ``None`` where the controller cannot know yet, as just after its restart.
    ``quarantined`` are those that have failed or hang: nothing else should send them any as long as
    there are others.
    """

    epoch: int
    decisions: tuple[RouteDecision, ...]
    closed: tuple[str, ...] | None = None
    quarantined: tuple[str, ...] = ()


class ReplicaHello(NamedTuple):
    """Registration of a replica: all that is static, and its full state.

    ``seq`` numbers the replica's reports; the next delta carries ``seq + 1``.
    ``capacity`` is the most live requests that its table holds. ``draining`` as in a delta: a
    controller that restarted must not send to a replica that is on its way out. ``held_slots`` and
    ``held`` are as in a delta, of all chunks that it holds. ``closed`` is what the last
    :class:`ReportReply` said: a replica carries the operator's word to a controller that restarted.
    ``role``: what it does of requests. ``preempts``: its engine suspends a running prefill for a
    more urgent one. ``hung`` as in a delta.
    """

    replica_id: str
    node_id: str
    model: str
    policy: str
    role: Role
    max_batch_tokens: int
    max_sequences: int
    block_tokens: int
    capacity: int
    profile: LatencyProfile
    seq: int
    now_s: float
    slots: np.ndarray
    rows: np.ndarray
    summary: np.void
    draining: bool = False
    held_slots: np.ndarray = NO_HELD_SLOTS
    held: np.ndarray = NO_HELD
    closed: bool = False
    preempts: bool = False
    hung: bool = False


class ReplicaDelta(NamedTuple):
    """What changed in a replica since report ``seq - 1``.

    ``slots``/``rows`` hold the changed slots of its table (a row with phase 0 is a freed slot);
    ``finished`` the keys of requests that ended since, so that their reservations can go.
    ``held_slots``/``held`` are the changed slots of its table of held chunks
    (:data:`scheduling.prefix.HELD`; hash 0 is a freed slot). ``epoch`` is the controller's as the
    replica knows it. ``hung``: its own watchdog says that its engine makes no progress.
    """

    replica_id: str
    epoch: int
    seq: int
    now_s: float
    slots: np.ndarray
    rows: np.ndarray
    summary: np.void
    finished: tuple[int, ...]
    draining: bool
    held_slots: np.ndarray = NO_HELD_SLOTS
    held: np.ndarray = NO_HELD
    hung: bool = False


class ReportReply(NamedTuple):
    """Answer to a report. ``resync`` asks for a :class:`ReplicaHello`: the epoch is unknown, the
    replica is not registered, or a report was lost. ``closed``: an operator has closed the replica
    to new requests."""

    epoch: int
    resync: bool
    closed: bool = False


class MetricSample(NamedTuple):
    """One cumulative Prometheus sample of a process: its family is ``family`` of type ``kind``."""

    family: str
    kind: str
    documentation: str
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class MetricsPush(NamedTuple):
    """Every sample of one process, cumulative: a lost push loses nothing.

    Attributes:
        source: name of the process.
        incarnation: of one start of the process, greater with every start: the Unix time of that
            start in nanoseconds.
        number: of this push, greater with every push of the incarnation; from 1 on.
    """

    source: str
    incarnation: int
    number: int
    samples: tuple[MetricSample, ...]


class PushReply(NamedTuple):
    """Answer to a push of metrics: a router to which no request comes hears of closed and
    quarantined replicas, too; see :class:`RouteReply`. ``late``: keys of those requests of the
    push's :class:`FirstTokenWait` that are predicted to miss their first token where they are."""

    closed: tuple[str, ...] | None
    quarantined: tuple[str, ...]
    late: tuple[int, ...] = ()


MAX_ENDINGS = 256
"""Most endings of requests in one call, and most notices of late ones."""


class RequestEnding(NamedTuple):
    """How a request ended, as its router saw it.

    Attributes:
        request_id: as in its :class:`RouteQuery`.
        outcome: ``ok``, ``client_error``, ``refused``, ``failed`` or ``cancelled``.
        missed: the stated objectives that a response with the outcome ``ok`` missed.
        tokens: output tokens of its first choice.
        ttft_s: from its arrival to its first token; ``None`` where there was none.
        tpot_s: time per token after the first, by the anchor of its objective
            (:class:`~scheduling.tpot.TPOTAnchor`); ``None`` with fewer than two.
        e2e_s: from its arrival to its end.
        error: code of the error that its client got; empty for none.
        service_class: that it was served as; empty where that is not known.
        tenant: whose it was, as in its :class:`RouteQuery`.
        most_tokens: the most that this choice might have had; 0 if that is not known.
        replica_id: the replica that answered; of a stream that went on elsewhere, the first one.
            Empty for none.
        kept: whether what was promised to it was kept, as the metrics count it; ``None`` where
            nothing was, it does not show, or no answer began.
        judged_s: of a request with stages, TTFT, TPOT and end-to-end time as its worst stages have
            them, see :meth:`scheduling.stage_clock.StageClock.judged_s`; ``None``: those above.
    """

    request_id: str
    outcome: str
    missed: tuple[str, ...]
    tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    error: str = ""
    service_class: str = ""
    tenant: int = 0
    most_tokens: int = 0
    replica_id: str = ""
    kept: bool | None = None
    judged_s: Times | None = None


class LateNotice(NamedTuple):
    """What a router sees a promised response miss while it goes on.

    Attributes:
        request_id: as in its :class:`RouteQuery`.
        ttft_s: from its arrival to its first token, where that was late.
        tpot_s: time per token until now, by the anchor of its objective, where that is behind.

    Of a request with stages both are as its worst stage has them.
    """

    request_id: str
    ttft_s: float | None
    tpot_s: float | None


MAX_WAITS = 256
"""Most requests in one call that wait for their first tokens."""


class FirstTokenWait(NamedTuple):
    """A promised request of which nothing has come yet, as its router sees it.

    Attributes:
        key: of its attempt, as in its :class:`RouteQuery`.
        replica_id: where it was placed.
        ttft_s: what it states, from its arrival to its first token.
        waited_s: its age.
    """

    key: int
    replica_id: str
    ttft_s: float
    waited_s: float


class TroubleNotice(NamedTuple):
    """What a router saw of a replica, once."""

    replica_id: str
    trouble: Trouble


class QuotaUse(NamedTuple):
    """What one router says of one bucket.

    Attributes:
        account: names the bucket.
        used: what it has put in since the last message that was answered; negative where more was
            taken out again.
        level: how full the bucket is as far as it knows, ``used`` included. It counts where nothing
            is known of the bucket, as after a restart of the controller.
        per_s: what drains from it each second.
    """

    account: str
    used: float
    level: float
    per_s: float
