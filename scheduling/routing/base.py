"""The contract of a routing policy: which replica serves a request."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from scheduling.objective import SLO
from scheduling.policy import PolicyOptions


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
    """

    key: int
    slo: SLO
    prompt_tokens: int
    waited_s: float = 0.0
    tiers: frozenset[Tier] = frozenset(Tier)
    output_tokens: int = 0
    session: int = 0
    prefix: tuple[int, ...] = ()


class ReplicaView(NamedTuple):
    """What a routing policy may know of one replica, its own unreported decisions included.

    Attributes:
        replica_id: Serve's name of the replica.
        waiting, running: requests, as reported; ``reserved`` more are on their way to it.
        prefill_tokens: tokens still to prefill, reserved ones included.
        context_tokens: KV tokens of the requests in decode.
        free_kv_blocks: as reported.
        pab_tokens: prefill admission budget, tokens, reserved ones subtracted; may be negative.
    """

    replica_id: str
    waiting: int
    running: int
    reserved: int
    prefill_tokens: int
    context_tokens: int
    free_kv_blocks: int
    pab_tokens: float

    @property
    def requests(self) -> int:
        """Requests at the replica or on their way to it."""
        return self.waiting + self.running + self.reserved


class RoutingPolicy(ABC):
    """Picks a replica for each request. One file, one subclass, one registry line."""

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self.options = options if options is not None else self.Options()

    @abstractmethod
    def choose(self, query: RouteQuery, replicas: Sequence[ReplicaView]) -> int:
        """Index into ``replicas`` (never empty) of the one that should serve ``query``."""
