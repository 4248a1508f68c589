"""A request to place, what it would be on each replica, and what became of it."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.expected import paced
from scheduling.kernels import Floats, Ints
from scheduling.objective import SLO, Times
from scheduling.roles import Role

PLACED = "placed"
UNATTAINABLE = "unattainable"
STAYS = "stays"
NO_REPLICA = "no_replica"
INVALID_QUERY = "invalid_query"
"""Reasons of a :class:`RouteDecision`."""


class Tier(enum.StrEnum):
    """How a request is served.

    ``GUARANTEED``: its objective is promised. ``BEST_EFFORT``: nothing is; it runs on what the
    promised ones leave.
    """

    GUARANTEED = "guaranteed"
    BEST_EFFORT = "best-effort"


class RouteQuery(NamedTuple):
    """A request to place.

    Attributes:
        key: its 63-bit key.
        slo: its objective. Where it states none there is nothing to promise.
        prompt_tokens: an estimate: the edge does not tokenise.
        waited_s: its age at the edge when the query was made.
        tiers: those that it may be served in. With both, it is promised where it can be.
        output_tokens: the most that it may generate; 0 if that is not known.
        session: names what it belongs to (a conversation, say), a 63-bit hash; 0 for nothing.
        prefix: 63-bit hashes of its prompt's first chunks, each covering all chunks before it, see
            :mod:`scheduling.prefix`.
        request_id: what its client knows it by, for people who ask where it went; no policy reads
            it.
        prefill_key: 63-bit key of the computation of its prompt, where that may be done by one
            replica and the rest by another; 0: one replica must serve it whole.
        avoid: replicas that have failed this request. They are left out where there are others.
        tenant: whose it is, a 63-bit hash; 0: none in particular, and all of these are one tenant.
        weight: of the tenant's share, > 0.
        client_request_id: the client's own id of it, for the same people.
        moves_from: the replica that has this promised request already and is predicted to miss its
            first token (:mod:`controller.moves`): it moves to another one that can promise what is
            left of its objective, or stays. Empty for any other request.
    """

    key: int
    slo: SLO
    prompt_tokens: int
    waited_s: float = 0.0
    tiers: frozenset[Tier] = frozenset(Tier)
    output_tokens: int = 0
    session: int = 0
    prefix: tuple[int, ...] = ()
    request_id: str = ""
    prefill_key: int = 0
    avoid: tuple[str, ...] = ()
    tenant: int = 0
    weight: float = 1.0
    client_request_id: str = ""
    moves_from: str = ""


_NO_STAGES: Floats = np.empty((0, 2))


class Job(NamedTuple):
    """A query, and what it would be on each of the replicas that may serve it, or begin with it.

    Where a replica may compute its prompt for another one to continue, the replicas of the job are
    those where it may begin: such as serve it whole, and such as compute its prompt only. A job of
    its own tells what the rest would be on each replica that may continue (``moved``).

    Attributes:
        query: the request.
        now_s: the time of the decision, on the fleet's clock.
        rows: ``int64[n]``, rows of the fleet, ascending; never empty where a policy sees it.
        cached_tokens: ``float64[n]``, prompt tokens that each replica has in its KV cache.
        work_s: ``float64[n]``, predicted time of the prefill of the others on each.
        due_s: when its first token is due; infinite if no time is stated.
        output_tokens: expected length of its output.
        lead_s: ``float64[n]``, predicted time from the end of its prefill there to its first token,
            where that is another replica's; 0 where it is served whole.
        splits: ``bool[n]``, whether each would compute its prompt only.
        moved: whether the KV of its prompt is another replica's work, and comes along.
        reserve_tokens: a promise to it must leave room for one more request, with a prompt of
            this many tokens, see :mod:`scheduling.fair_shares`.
    """

    query: RouteQuery
    now_s: float
    rows: Ints
    cached_tokens: Floats
    work_s: Floats
    due_s: float
    output_tokens: float
    lead_s: Floats
    splits: NDArray[np.bool_]
    moved: bool = False
    reserve_tokens: float = 0.0

    @property
    def tpot_s(self) -> float:
        """The pace at which its output holds its end-to-end objective, too; infinite for none."""
        ttft_s, tpot_s, e2e_s, _ = self.query.slo.columns
        return paced(ttft_s, tpot_s, e2e_s, self.output_tokens)[1]

    @property
    def later(self) -> Floats:
        """``float64[n, 2]``, of each later stage before which tokens of prompt enter, how many, and
        its TTFT, seconds; infinite for none."""
        stages = self.query.slo.stages
        if not stages:
            return _NO_STAGES
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
    """What became of a query.

    Attributes:
        replica_id: where the request goes; ``None``: nowhere, and ``reason`` says why.
        reason: ``placed``; ``unattainable``: no replica can promise its objective, and it may not
            be served without; ``stays``: no other one can promise what is left of it, so it is not
            moved; ``no_replica``: none is known and was heard of lately; ``invalid_query``.
        tier: how it is served where it goes; ``None`` where no tier was decided, because admission
            is off: it is served like a promised request, and nothing is promised.
        predicted_ttft_s: from the decision to its first token, where that was promised. It is what
            admission predicts; who has observed how such predictions turn out may tell the median
            of that, see :mod:`scheduling.reliability`.
        retry_after_s: where it is ``unattainable``: after how long it should retry, see
            :mod:`scheduling.retry_after`; ``None`` where there never is capacity.
        role: of the replica ``replica_id``.
        prefill_id: the replica that computes its prompt first and hands the KV over to
            ``replica_id``; ``None``: ``replica_id`` serves it whole.
        handover_s: predicted time from the end of that to the first token: by so much earlier than
            the request's own is the prefill's deadline.
        over_share: its objective could have been promised, but for what its tenant, who has its
            share, must leave free for others.
        planned: where something was promised: the TTFT, TPOT and end-to-end time for which it is
            planned, seconds; ``None`` where one was not stated. The replica works by them, see
            :mod:`scheduling.calibration`; instead of an end-to-end time by its shares, see
            :mod:`scheduling.pacing`.
        room_s: as ``retry_after_s``: the predicted time until there is room, if no other request
            comes. Who waits at the edge asks by that.
    """

    replica_id: str | None
    reason: str
    tier: Tier | None = None
    predicted_ttft_s: float | None = None
    retry_after_s: float | None = None
    role: Role = "mixed"
    prefill_id: str | None = None
    handover_s: float = 0.0
    over_share: bool = False
    planned: Times | None = None
    room_s: float | None = None
