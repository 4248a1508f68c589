"""Placement of a request: the query, the job on each replica, and the decision."""

from __future__ import annotations

import enum
from typing import Annotated, Final, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sluice.scheduling.request.deadline import paced
from sluice.scheduling.request.kernels import Floats, Ints
from sluice.scheduling.request.objective import SLO, Times
from sluice.scheduling.roles import Role

MAX_TEXT: Final = 256
"""Longest id or name, characters."""

MAX_KEY: Final = (1 << 63) - 1
MAX_TOKENS: Final = 1 << 31
MAX_NUMBER: Final = 1e15
"""Largest absolute value of a time or other number."""

MAX_CHUNKS: Final = 64
"""Chunk hashes of one prompt."""

MAX_MESSAGE_ENDS: Final = 16
"""Hashes of one prompt up to the ends of its last messages."""

MAX_AVOIDED: Final = 64
"""Replicas that have failed one request."""

MAX_ONLY: Final = 4_096
"""Replicas that one request is restricted to."""

MAX_WEIGHT: Final = 1_000.0
"""Largest weight of a tenant, and the inverse of the smallest."""

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Id = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Key = Annotated[int, Meta(ge=0, le=MAX_KEY)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Age = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]

PLACED = "placed"
UNATTAINABLE = "unattainable"
STAYS = "stays"
DECLINED = "declined"
NO_REPLICA = "no_replica"
INVALID_QUERY = "invalid_query"
"""Reasons of a :class:`RouteDecision`."""


class Tier(enum.StrEnum):
    """Its objective is promised, or it runs on the capacity that promised requests leave."""

    GUARANTEED = "guaranteed"
    BEST_EFFORT = "best-effort"


class RouteQuery(NamedTuple):
    """A request to place. Keys and hashes have 63 bits; 0: none or unknown.

    Attributes:
        prompt_tokens: an estimate: the edge does not tokenise.
        tiers: the tiers that it may be served in. With both, it is promised if possible.
        output_tokens: maximum output length; 0 if unknown.
        session: of the requests that it goes together with, such as those of its conversation.
        prefix: hashes of the prompt's first chunks, each of all before it (``fleet.prefix``).
        message_ends: the same up to the ends of its last messages, if it is long.
        request_id, client_request_id: for tracing by people; no policy reads them.
        prefill_key: of its prefill, if another replica may compute it; 0: one replica serves it
            whole.
        avoid: replicas that have failed this request; left out if there are others.
        moves_from: the replica that has this promised request and is predicted to miss its first
            token: it moves if another can promise the rest. Empty for any other request.
        brings_kv: a stream that runs at ``moves_from``, which transfers its KV.
        elsewhere: another cell can be asked: an impossible promise is declined, and nothing is
            counted.
        only: Serve's replicas, one of which must serve it; empty: any.
        expected_tokens: of output, as the client expects; 0: it does not say.
        takes: of the quote or the offer that it takes up (``placement.quotes``).
        fetches_kv: its replica may fetch this much of what another one has cached of its prompt."""

    key: Key
    slo: SLO
    prompt_tokens: Tokens
    waited_s: Age = 0.0
    tiers: Annotated[frozenset[Tier], Meta(min_length=1)] = frozenset(Tier)
    output_tokens: Tokens = 0
    session: Key = 0
    prefix: Annotated[tuple[Key, ...], Meta(max_length=MAX_CHUNKS)] = ()
    request_id: Text = ""
    prefill_key: Key = 0
    avoid: Annotated[tuple[Id, ...], Meta(max_length=MAX_AVOIDED)] = ()
    tenant: Key = 0
    weight: Annotated[float, Meta(ge=1 / MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0
    client_request_id: Text = ""
    moves_from: Text = ""
    brings_kv: bool = False
    elsewhere: bool = False
    only: Annotated[tuple[Id, ...], Meta(max_length=MAX_ONLY)] = ()
    expected_tokens: Tokens = 0
    takes: Key = 0
    message_ends: Annotated[tuple[Key, ...], Meta(max_length=MAX_MESSAGE_ENDS)] = ()
    fetches_kv: Tokens = 0


def first_due_s(query: RouteQuery, now_s: float, output_tokens: float) -> float:
    """By its TTFT, and early enough that the expected output ends by its end-to-end objective."""
    ttft_s, tpot_s, e2e_s, _ = query.slo.columns
    return now_s - query.waited_s + paced(ttft_s, tpot_s, e2e_s, output_tokens)[0]


Numbers = tuple[
    Ints, Floats, Floats, Floats, NDArray[np.bool_],
    float, float, float, float, float, float, float, bool, float, float,
]  # fmt: skip
"""A ``Job`` for compiled loops: ``job[1:]``, all its fields after the query."""

NO_LATER: Floats = np.empty((0, 2))
"""The later stages (:attr:`Job.later`) of a request that states none."""


class Job(NamedTuple):
    """A query, with its work on each replica that may serve or prefill it. One that may be split
    has the mixed and the prefill replicas; a second job (``moved``) has the decode phase on the
    decode ones.

    Attributes:
        rows: ``int64[n]``, rows of the fleet, ascending; never empty where a policy sees it.
        cached_tokens: ``float64[n]``, prompt tokens that each has in its KV cache or loads.
        work_s: ``float64[n]``, predicted prefill time of the uncached tokens on each.
        lead_s: ``float64[n]``, predicted time from the end of its prefill to its first token on the
            decode replica; of the transfer of a stream that moves; of loading KV from the host, or
            from another replica.
        splits: ``bool[n]``, whether each would compute only its prompt.
        due_s: when its first token is due, so that the output also ends in time; infinite for none.
        tpot_s: at which the output also meets its end-to-end objective; infinite for none.
        reserve_tokens: a promise must leave capacity for one more prompt of this length.
        overtaking_s: work on each replica that is expected later, due sooner and worth more."""

    query: RouteQuery
    rows: Ints
    cached_tokens: Floats
    work_s: Floats
    lead_s: Floats
    splits: NDArray[np.bool_]
    now_s: float
    due_s: float
    waited_s: float
    tpot_s: float
    priority: float
    prompt_tokens: float
    output_tokens: float
    moved: bool = False
    reserve_tokens: float = 0.0
    overtaking_s: float = 0.0

    @property
    def later(self) -> Floats:
        """``float64[n, 2]``: prompt tokens that enter before each later stage with any, and its
        TTFT."""
        stages = self.query.slo.stages
        if not stages:
            return NO_LATER
        found = [(s.prompt_tokens, s.paced()[0]) for s in stages[1:] if s.prompt_tokens]
        return np.array(found, np.float64).reshape(len(found), 2)

    def of(self, places: NDArray[np.bool_] | Ints) -> Job:
        """The same job for some of the replicas only."""
        return self._replace(
            rows=self.rows[places],
            cached_tokens=self.cached_tokens[places],
            work_s=self.work_s[places],
            lead_s=self.lead_s[places],
            splits=self.splits[places],
        )


class RouteDecision(NamedTuple):
    """The decision on a query.

    Attributes:
        replica_id: where the request goes; None: nowhere, and ``reason`` says why.
        reason: ``placed``; ``unattainable``: no replica can promise its objective, and it may not
            be best effort; ``declined``: another cell can be asked; ``stays``: no other replica can
            promise the rest; ``no_replica``: none has reported recently; ``invalid_query``.
        tier: None if admission is off: nothing is promised.
        predicted_ttft_s: from the decision to its first token, if promised or with ``starts_in_s``.
        retry_after_s: if ``unattainable``; None if there will never be capacity.
        prefill_id: the replica that computes its prompt and transfers the KV; None: none.
        kv_transfer_s: predicted time from the end of the prefill to the first token; the prefill is
            due earlier by it. For a stream that moves, of its transfer; with ``kv_from``, until the
            KV is there.
        over_share: it could have been promised, but its tenant is over its share.
        planned: if promised: the times by which the replica schedules (``placement.calibration``).
        room_s: if ``unattainable``: predicted time until there is capacity, without new arrivals. A
            request that waits at the edge asks again by it.
        starts_in_s: predicted time until the model's first replica serves
            (``placement.cold_start``).
        level: if promised: the share of such promises that is to be kept.
        own_s: if promised: the predicted time of its own prefill.
        kv_from: another replica, of which it is to fetch what that has cached of the prompt,
            ``kv_tokens`` as far as is known."""

    replica_id: str | None
    reason: str
    tier: Tier | None = None
    predicted_ttft_s: float | None = None
    retry_after_s: float | None = None
    role: Role = "mixed"
    prefill_id: str | None = None
    kv_transfer_s: float = 0.0
    over_share: bool = False
    planned: Times | None = None
    room_s: float | None = None
    starts_in_s: float | None = None
    level: float | None = None
    own_s: float = 0.0
    kv_from: str | None = None
    kv_tokens: int = 0
