"""A call's answer: the attempts at it, and what the client has of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from sluice.protocol.requests import ResponseHead, ResponseTail
from sluice.router.dispatch.attempt import Attempt
from sluice.router.dispatch.suspicion import Case
from sluice.router.dispatch.transcript import Transcript
from sluice.router.metrics.instruments import MoveReason
from sluice.router.request.call import Call
from sluice.router.serve.contract import ReplicaFailedError
from sluice.scheduling.request.job import RouteDecision, Tier
from sluice.scheduling.request.objective import TokenClock
from sluice.scheduling.roles import Role


@dataclass(slots=True, eq=False)
class Answer:
    """The state of a call over its attempts. It is open once an attempt is.

    Attributes:
        case: the call's part in lost replicas.
        clock: when its tokens reached the client, as far as is known.
        transcript: what its client has received of the stream; ``None`` if the stream cannot be
            resumed.
        max_attempts: at most, of those that count.
        fetched: its client's Envoy may fetch the stream from the replica, and does so once an
            attempt is open; then it cannot be resumed.
        opened: the attempts whose response has begun, in order. The client has the head of the
            first; each later one resumes the stream of the one before.
        attempts: made so far, the current one included.
        failed: replicas that have failed the call.
        alive_s: when there was a sign of life of the call last. Its time in queues does not count.
        empty: pools that had no replica for the call when they were last asked.
        in_vain: attempts that found a pool empty or were moved: neither counts as a failed one.
        promises: attempts whose SLO was guaranteed at the replica that they were sent to.
        granted: the current attempt is abandoned for another one, which the retry budget allows.
        verdict: the failure that ends the call, if it is blamed for lost replicas.
        moved: the call has left a replica that was going to miss its TTFT; it does so at most once.
        moves_to: the decision for the next attempt after such a move, or after its stream has moved
            (:mod:`sluice.router.dispatch.migrations`).
        move_reason: why its stream moves.
        left: the replicas that its running stream has left. left_s: when it left the last one.
    """

    call: Call
    case: Case
    clock: TokenClock
    transcript: Transcript | None = None
    max_attempts: int = 1
    fetched: bool = False
    opened: list[Attempt] = field(default_factory=list)
    attempts: int = 0
    failed: list[str] = field(default_factory=list)
    alive_s: float = -inf
    empty: set[Role] = field(default_factory=set)
    in_vain: int = 0
    promises: int = 0
    granted: bool = False
    verdict: ReplicaFailedError | None = None
    moved: bool = False
    moves_to: RouteDecision | None = None
    move_reason: MoveReason | None = None
    left: list[str] = field(default_factory=list)
    left_s: float = -inf

    @property
    def made(self) -> int:
        """The attempts that reached a replica and were not moved."""
        return self.attempts - self.in_vain

    @property
    def spent(self) -> bool:
        """Whether the call has used all of its attempts."""
        return self.made >= self.max_attempts

    @property
    def moved_id(self) -> str:
        """The id of the attempt at the replica that the call moves to."""
        number = f"-{len(self.opened)}" if self.opened else ""
        return f"{self.call.request_id}-moved{number}"

    @property
    def next_id(self) -> str:
        """The id of the attempt that is about to be made."""
        if self.moves_to is not None:
            return self.moved_id
        number = f"-{self.attempts}" if self.attempts > 1 else ""
        return self.call.request_id + number

    @property
    def promised(self) -> bool:
        """Whether the SLO was guaranteed when the call was sent to a replica, even if that
        replica failed."""
        return self.promises > 0

    @property
    def decision(self) -> RouteDecision:
        """The decision that the response headers name."""
        return self.opened[0].decision

    @property
    def tier(self) -> Tier:
        """The tier that the response headers name. Without admission control there is no guarantee,
        so it is best effort, too."""
        return Tier.GUARANTEED if self.opened[0].guaranteed else Tier.BEST_EFFORT

    @property
    def head(self) -> ResponseHead:
        """The head that the client was sent."""
        return self.opened[0].head

    @property
    def waited_s(self) -> float:
        """The call's age when it was sent to the replica that answered it."""
        return self.opened[0].request.waited_s

    @property
    def tail(self) -> ResponseTail | None:
        """Set once the response has ended by itself."""
        return self.opened[-1].tail

    @property
    def resumes(self) -> int:
        """How often another replica has resumed it, its moves included."""
        return len(self.opened) - 1

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in a prefix cache, once the response has ended by itself."""
        attempt = self.opened[-1]
        tail = (attempt.prefill or attempt).tail
        return 0 if tail is None else tail.cached_tokens

    @property
    def queued_s(self) -> float | None:
        """From the call's arrival to the first batch that it was in, once the response has ended by
        itself; ``None`` if the engine does not report it, or another replica has resumed it."""
        attempt = self.opened[-1].prefill or self.opened[-1]
        if self.resumes or attempt.tail is None or attempt.tail.queued_s is None:
            return None
        return attempt.request.waited_s + attempt.tail.queued_s
