"""Whether a call whose attempt failed gets another one, and when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from msgspec import structs

from sluice.protocol.requests import EngineRequest
from sluice.router.dispatch.attempt import Answer
from sluice.router.request.call import Call
from sluice.router.request.prompt import PromptSize
from sluice.router.serve.contract import ReplicaFailedError
from sluice.router.serve.hint import NO_REPLICA_WAIT_S
from sluice.scheduling.fleet.transfer import prompt_ttft_s
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role

# Which calls more than one replica may serve: as a P/D pair, or by resuming after a failure.
#
# Conditions that only the engine knows are not checked here: if its output cannot be resumed, it
# does not report the tokens (:attr:`~sluice.protocol.requests.EngineRequest.resumable`).

_WHOLE = ("echo", "prompt_logprobs", "prompt_embeds")
_TEXT = ("text", "input_text", "output_text", "refusal")

NOT_RESUMABLE = (
    "No other replica can resume this stream: several choices, log probabilities, structured "
    "output, penalties or the like depend on more than the tokens that were sent."
)
"""Error message for a stream that cannot be resumed after its replica failed."""


def may_split(call: Call) -> bool:
    """Whether a P/D pair may serve the call: no prefill results in the answer, no media."""
    body = call.body
    given = [body.get(name) for name in _WHOLE]
    # With 0 the answer still holds the log probability of the token itself.
    whole = any(value is not None and value is not False for value in given)
    return _is_single(call) and not whole and _is_text(body)


def may_resume(call: Call) -> bool:
    """Whether another replica may resume its stream. ``O(1)``."""
    return bool(call.body.get("stream")) and not call.body.get("echo") and _is_single(call)


def may_migrate(call: Call) -> bool:
    """Whether its stream may leave a working replica. Not with media, whose features do not move,
    nor with a seed: the state of the random numbers does not move."""
    body = call.body
    drawn = body.get("seed") is not None and body.get("temperature") != 0
    return may_resume(call) and not drawn and _is_text(body)


def prefill_id_of(request_id: str) -> str:
    """The id of the prefill of a request that a P/D pair serves."""
    return f"{request_id}.prefill"


def prefill_of(
    whole: EngineRequest, kv_transfer_s: float, trace: Mapping[str, str]
) -> EngineRequest:
    """A request's prefill, whose first token comes ``kv_transfer_s`` after it."""
    slo = whole.slo
    if slo.ttft_s is not None:
        ttft_s = prompt_ttft_s(slo.ttft_s, kv_transfer_s)
        slo = structs.replace(slo, ttft_s=ttft_s, stages=())
    return replace(
        whole,
        request_id=prefill_id_of(whole.request_id),
        slo=slo,
        trace=trace,
        prefill_only=True,
        resumable=False,
        direct_patience_s=None,
    )


def rest_of(call: Call, tokens: int, slo: SLO) -> Call:
    """The rest of a call: the client's ``tokens`` join the prompt. ``slo``: of the rest."""
    prompt = call.prompt
    left = max(1, call.output_tokens - tokens) if call.output_tokens else 0
    size = PromptSize(prompt.characters, prompt.tokens + tokens)
    return replace(call, slo=slo, prompt=size, output_tokens=left)


def _is_single(call: Call) -> bool:
    """One output of one prompt."""
    body = call.body
    if call.endpoint not in ("chat", "completions") or (body.get("n") or 1) > 1:
        return False
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return call.endpoint == "chat" or not several


def _is_text(body: dict[str, object]) -> bool:
    messages = body.get("messages")
    contents = [m.get("content") for m in messages] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(
        isinstance(p, str) or (isinstance(p, dict) and p.get("type") in _TEXT) for p in parts
    )


# The pools of replicas that may serve a whole call, and how long empty ones are waited for.

EMPTY_POOLS_PAUSE_S = 0.25  # pause before pools that were all found empty are asked again, seconds


@dataclass
class Pools:
    """One per router process and model. ``roles``: in the order in which they serve whole calls.
    All pools were first and last found empty at these times, with no answer in between."""

    roles: Sequence[Role]
    single: bool
    clock: Callable[[], float]
    pause: Callable[[float], Awaitable[object]]
    empty_since_s: float = -inf
    last_empty_s: float = -inf

    def __post_init__(self) -> None:
        self.may_split = {"prefill", "decode"} <= set(self.roles)
        """Whether there are pools for P/D pairs."""

    def role_for(self, answer: Answer, wanted: Role | None) -> Role:
        """The pool that a call goes to: the ``wanted`` one, unless it was empty."""
        left = (answer.empty and self._left(answer)) or self.roles
        return wanted if wanted is not None and wanted in left else left[0]

    def answered(self) -> None:
        """A replica has answered."""
        self.last_empty_s = -inf

    async def wait(self, answer: Answer, failure: ReplicaFailedError) -> None:
        """After an empty pool, return when the next may be asked. All pools together get one pool's
        wait, from when all were first empty. Raises ReplicaFailedError: ``failure``, after that."""
        if self._left(answer):
            return
        now_s = self.clock()
        if now_s - self.last_empty_s > NO_REPLICA_WAIT_S:
            self.empty_since_s = now_s
        self.last_empty_s = now_s
        if self.single or now_s - self.empty_since_s >= NO_REPLICA_WAIT_S:
            raise failure
        await self.pause(EMPTY_POOLS_PAUSE_S)
        answer.empty.clear()

    def _left(self, answer: Answer) -> list[Role]:
        return [role for role in self.roles if role not in answer.empty]


# Retry budget of a router: retries are limited to a share of its requests, so that they do not
# multiply failures which hit every replica.

WINDOW_S: Final = 60.0  # sliding window of the retry budget, seconds
REQUESTS_PER_RETRY: Final = 5  # requests in a window that allow one more retry
_SLOTS: Final = 20  # parts of the sliding window: counts expire one part at a time


class RetryBudget:
    """One per router process. ``O(1)``, in time and in memory. ``floor``: retries in a window that
    are allowed whatever the traffic."""

    def __init__(self, floor: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._floor = floor
        self._clock = clock
        # Slot number, requests, retries; ascending.
        self._slots: deque[list[int]] = deque()
        self._requests = 0
        self._retries = 0

    def count_request(self) -> None:
        """A request makes its first attempt."""
        self._slot()[1] += 1
        self._requests += 1

    def take(self) -> bool:
        """Whether one more attempt may be made now. If so, it is counted."""
        slot = self._slot()
        if self._retries >= self._floor + self._requests // REQUESTS_PER_RETRY:
            return False
        slot[2] += 1
        self._retries += 1
        return True

    def _slot(self) -> list[int]:
        """The current slot. Slots that have left the window are dropped."""
        number = int(self._clock() / WINDOW_S * _SLOTS)
        while self._slots and self._slots[0][0] <= number - _SLOTS:
            _, requests, retries = self._slots.popleft()
            self._requests -= requests
            self._retries -= retries
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append([number, 0, 0])
        return self._slots[-1]


RETRY_PAUSE_S: Final = 0.02
"""Before the second attempt, then doubled, seconds: reports of dead replicas need time."""
