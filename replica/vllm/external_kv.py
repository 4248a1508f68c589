"""What an operator's KV connector, such as LMCache's, holds of waiting prompts.

vLLM asks the connector when it is about to admit a request. Some answer later, and vLLM skips the
request meanwhile, or they load the KV beside steps. A plan that knew nothing of it would spend
tokens that the batch cannot use. Sluice asks when a request arrives, leaves it out of plans until
there is an answer, and plans what is not held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from vllm.v1.request import RequestStatus

_KEPT: Final = 0.9
"""Weight of the earlier waits in the mean, after another one."""


_ADMITTED: Final = (
    RequestStatus.RUNNING,
    RequestStatus.PREEMPTED,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
)


class Held(NamedTuple):
    """An answer: ``tokens`` are held beyond the first ``computed``, and loaded ``beside`` steps."""

    computed: int
    tokens: int
    beside: bool


class ExternalKv:
    """See the module.

    vLLM gets the same answer, if the connector answers later: what that holds is locked for the
    request, and to LMCache's connector a second answer counts as more stored KV.

    Args:
        connector: vLLM's KV connector, in the scheduler; ``None``: it has none.
        asks: whether it is not known otherwise what the connector holds.
        clock: monotonic seconds.

    Attributes:
        answer_s: mean time until an answer, seconds.
    """

    def __init__(
        self, connector: Any, asks: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._asks = asks
        self._asked: dict[str, tuple[Any, float | None]] = {}
        self._held: dict[str, Held] = {}
        self._loading: dict[str, Any] = {}
        self._later = False
        self.answer_s = 0.0
        if connector is not None:
            self._ask = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = self._answer_vllm

    def begin(self, request: Any) -> None:
        """A request arrived."""
        if self._asks:
            self._asked[request.request_id] = request, None

    def forget(self, request_id: str) -> None:
        """The request has left the engine; unknown ids are ignored."""
        for each in (self._asked, self._held, self._loading):
            each.pop(request_id, None)

    def take_answers(self, computed_of: Callable[[Any], int]) -> list[str]:
        """Called before a plan. Returns the requests about which the connector has answered since.

        Args:
            computed_of: the tokens of a request that the engine itself has.
        """
        answered = []
        for request_id, (request, asked_s) in list(self._asked.items()):
            computed = computed_of(request)
            now_s = self._clock()
            tokens, beside = self._ask(request, computed)
            if tokens is None:
                self._later = True
                self._asked[request_id] = request, now_s if asked_s is None else asked_s
                continue
            del self._asked[request_id]
            self._held[request_id] = Held(computed, tokens, beside)
            waited_s = 0.0 if asked_s is None else now_s - asked_s
            kept = _KEPT if self.answer_s else 0.0
            self.answer_s = kept * self.answer_s + (1.0 - kept) * waited_s
            answered.append(request_id)
        return answered

    def is_awaited(self, request_id: str) -> bool:
        """Whether the connector has not answered about a request."""
        return request_id in self._asked

    def of(self, request_id: str) -> Held | None:
        """The answer about a request that vLLM has not admitted since; ``None``: there is none."""
        return self._held.get(request_id)

    def left_out(
        self, requests: Mapping[str, Any], planned: Iterable[str], ran: Mapping[str, int]
    ) -> list[str]:
        """Called after a batch was made: the ``planned`` requests that are not in it, as their KV
        is loaded, or looked for, from now on."""
        for request_id in list(self._held):
            if requests[request_id].status in _ADMITTED:
                del self._held[request_id]
        found = []
        for request_id in planned:
            if request_id in ran:
                continue
            request = requests[request_id]
            loads = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            if loads:
                self._loading[request_id] = request
            if loads or request_id in self._asked:
                found.append(request_id)
        return found

    @property
    def under_way(self) -> bool:
        """Whether any KV is being loaded."""
        for request_id, request in list(self._loading.items()):
            if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                del self._loading[request_id]
        return bool(self._loading)

    def _answer_vllm(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """vLLM asks, in place of the connector's method."""
        request_id = request.request_id
        if request_id in self._asked:
            return None, False
        held = self._held.get(request_id)
        if self._later and held is not None and held.computed == computed:
            return held.tokens, held.beside
        tokens, beside = self._ask(request, computed)
        if tokens is None:
            self._later = True
            self._asked[request_id] = request, self._clock()
        return tokens, beside
