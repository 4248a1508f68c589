"""The contract of a routing policy: which replica serves a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from scheduling.objective import SLO
from scheduling.policy import PolicyOptions


class RouteQuery(NamedTuple):
    """A request to place. ``prompt_tokens`` is an estimate: the edge does not tokenise.

    ``waited_s`` is its age at the edge when the query was made.
    """

    key: int
    slo: SLO
    prompt_tokens: int
    waited_s: float = 0.0


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
