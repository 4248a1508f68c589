"""KV of waiting prompts that an engine need not compute, from another engine, host memory or an
operator's connector. A plan without it would spend tokens that the batch cannot use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import vllm
from vllm.v1.request import RequestStatus

from sluice.replica.scheduler.local_scheduler import LocalScheduler
from sluice.replica.transfer import block_bytes
from sluice.replica.vllm.contract import WITH_HOST_MEMORY, age


class HostBlocks:
    """What vLLM's ``OffloadingConnector`` has in host memory, and how long loading takes, from
    admission to the end that vLLM sees. Empty with another connector or several groups of layers.
    Sluice has it make events of what it stores and evicts, and reads them on their way."""

    def __init__(
        self, connector: Any, block_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._block_tokens = block_tokens
        self._clock = clock
        self._held: set[bytes] = set()
        self._begun: dict[str, tuple[float, int]] = {}
        self._started: list[str] = []
        self._seconds = self._tokens = 0.0
        self.on_removed: Callable[[bytes], None] = lambda block_hash: None
        manager = _manager(connector, block_tokens)
        self.known = manager is not None
        """Whether it is known what the connector holds."""
        if manager is not None:
            self._follow(connector, manager)

    def load_s(self, block_hash: bytes) -> float:
        """Seconds to load one token of a block; 0: it is not there, or no load has been timed."""
        if not self._tokens or block_hash not in self._held:
            return 0.0
        return self._seconds / self._tokens

    def beyond(self, request: Any, tokens: int) -> int:
        """How many tokens of a waiting request after its first ``tokens``, which are whole blocks,
        are loaded when it is admitted. The last one is always computed, for its logits."""
        if not self._held:
            return 0
        first = last = tokens // self._block_tokens
        most = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        while last < most and request.block_hashes[last] in self._held:
            last += 1
        return (last - first) * self._block_tokens

    @property
    def under_way(self) -> bool:
        """Whether any KV is being loaded."""
        return bool(self._begun)

    def take_started(self) -> list[str]:
        """The requests whose load has begun since the last call."""
        started, self._started = self._started, []
        return started

    def _follow(self, connector: Any, manager: Any) -> None:
        """Hook the calls of vLLM's scheduler and of its connector."""
        published = manager.events is not None
        if not published:
            manager.events = []
        take, clear = manager.take_events, manager.reset_cache
        begin, end = connector.update_state_after_alloc, connector.update_connector_output

        def take_events() -> Iterator[Any]:
            for event in take():
                self._note(event)
                if published:
                    yield event

        def reset_cache() -> Any:
            manager.events.clear()
            self._held.clear()
            return clear()

        def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> Any:
            if tokens:
                self._begun[request.request_id] = self._clock(), tokens
                self._started.append(request.request_id)
            return begin(request, blocks, tokens)

        def update_connector_output(output: Any) -> Any:
            for request_id in output.finished_recving or ():
                self._loaded(request_id)
            return end(output)

        manager.take_events, manager.reset_cache = take_events, reset_cache
        connector.update_state_after_alloc = update_state_after_alloc
        connector.update_connector_output = update_connector_output

    def _note(self, event: Any) -> None:
        if getattr(event.medium, "value", event.medium) != "CPU":
            return
        # A block is named by its hash and the number of its group of layers, 4 bytes.
        hashes = [bytes(key[:-4]) for key in event.keys]
        if not event.removed:
            self._held.update(hashes)
            return
        self._held.difference_update(hashes)
        for block_hash in hashes:
            self.on_removed(block_hash)

    def _loaded(self, request_id: str) -> None:
        begun = self._begun.pop(request_id, None)
        if begun is not None:
            self._seconds = _KEPT * self._seconds + self._clock() - begun[0]
            self._tokens = _KEPT * self._tokens + begun[1]


def _manager(connector: Any, block_tokens: int) -> Any:
    """The connector's manager, which makes the events; ``None``: another one, or older vLLM."""
    if age(vllm.__version__, WITH_HOST_MEMORY) == "older":
        return None
    scheduler = getattr(connector, "connector_scheduler", None)
    groups = getattr(getattr(scheduler, "config", None), "kv_group_configs", ())
    names = ("tokens_per_chunk", "sliding_window_size_in_chunks")
    shapes = [tuple(getattr(each, name, None) for name in names) for each in groups]
    manager = getattr(scheduler, "manager", None)
    return manager if shapes == [(block_tokens, None)] and hasattr(manager, "events") else None


_FLAGS = frozenset(("do_remote_prefill", "do_remote_decode"))


@dataclass(slots=True)
class _Incoming:
    """A request's KV transfer: ``began_s`` is the start of its load, monotonic; ``upto``: how many
    of its prompt's tokens it has then, ``tokens``: how many of these are loaded."""

    upto: int
    began_s: float | None = None
    tokens: int = 0


class IncomingKv:
    """Requests whose KV comes from another engine, from their arrival until they run.

    vLLM's connector fills the blocks of an admitted request while others run. So a plan sees it as
    a prompt of which all but the last token is computed: planning it starts the KV transfer. It
    appears in plans again when the KV has arrived, with what is left to compute."""

    def __init__(self, scheduler: Any, local: LocalScheduler) -> None:
        self._scheduler = scheduler
        self._connector = scheduler.connector
        self._local = local
        self._requests: dict[str, _Incoming] = {}
        self._block_bytes = block_bytes(scheduler.kv_cache_config)
        self._block_tokens = scheduler.block_size

    def begin(self, request: Any) -> bool:
        """A request arrived; returns whether KV for it will come."""
        params = request.kv_transfer_params
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return False
        tokens = None
        if not params.keys() - _FLAGS:
            # The prefill engine could not keep the KV. Not every connector can handle such an
            # offer.
            params["do_remote_prefill"] = False
        elif self._connector is not None:
            tokens, _ = self._connector.get_num_new_matched_tokens(request, 0)
        if not tokens:
            self._local.kv_failed()
            return False
        upto = min(tokens, request.num_prompt_tokens - 1)
        self._requests[request.request_id] = _Incoming(upto, tokens=tokens)
        return True

    def upto(self, request_id: str) -> int:
        """How many tokens of a request's prompt are there when its KV is."""
        return self._requests[request_id].upto

    def forget(self, request_id: str) -> None:
        """The request has left the engine; unknown ids are ignored."""
        self._requests.pop(request_id, None)

    @property
    def under_way(self) -> bool:
        """Whether any KV is being loaded."""
        return any(each.began_s is not None for each in self._requests.values())

    def awaits(self, request: Any, cached_tokens: int) -> bool:
        """Whether KV will come for a waiting request, once it is admitted."""
        incoming = self._requests.get(request.request_id)
        if incoming is None or incoming.began_s is not None:
            return False
        incoming.tokens = max(0, incoming.upto - cached_tokens)
        return incoming.tokens > 0

    def arrived(self, request: Any) -> bool:
        """Whether KV of a waiting request has arrived; false after a failed transfer."""
        request_id = request.request_id
        return (
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and request_id in self._scheduler.finished_recving_kv_req_ids
            and request.num_computed_tokens > 0
        )

    def note_started(self, now_s: float) -> list[str]:
        """Called after a batch was made: the requests whose KV is requested from now on."""
        started = []
        for request_id, incoming in list(self._requests.items()):
            if incoming.began_s is not None:
                continue
            request = self._scheduler.requests[request_id]
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                incoming.began_s = now_s
                started.append(request_id)
            elif request.num_computed_tokens > 0:
                # The engine had all of it cached, or vLLM computes it for its own reasons.
                del self._requests[request_id]
        return started

    def note_ended(self, now_s: float) -> list[str]:
        """Called after a batch: the requests whose load has ended, with or without success."""
        ended = []
        for request_id, incoming in list(self._requests.items()):
            if (
                incoming.began_s is None
                or request_id not in self._scheduler.finished_recving_kv_req_ids
            ):
                continue
            del self._requests[request_id]
            ended.append(request_id)
            if request_id in self._scheduler.failed_recving_kv_req_ids:
                self._local.kv_failed()
            else:
                blocks = -(-incoming.tokens // self._block_tokens)
                nbytes = blocks * self._block_bytes
                began_s = incoming.began_s
                self._local.kv_arrived(request_id, began_s, now_s, incoming.tokens, nbytes)
        return ended


def wants_cached(request: Any) -> bool:
    """Whether a request asks for what is cached of its prompt alone."""
    return kv_of_request(request) and bool(request.kv_transfer_params.get("cached_only"))


def cut_to_cached(request: Any, cached_tokens: int, hash_tokens: int) -> None:
    """Have a request end with the first token that is not cached."""
    tokens = cached_tokens + 1
    del request._all_token_ids[tokens:]
    del request.block_hashes[tokens // hash_tokens :]
    request.prompt_token_ids = request.prompt_token_ids[:tokens]
    request.num_prompt_tokens = tokens


def kv_of_request(request: Any) -> bool:
    """Whether a request is prefill only: another engine decodes."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


_KEPT: Final = 0.9  # Weight of the earlier waits in the mean, after another one


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
    """What an operator's KV connector, such as LMCache's, holds of waiting prompts.

    vLLM asks the connector at admission, and some answer later. Sluice asks at arrival, leaves the
    request out of plans until the answer, and plans what is not held. vLLM gets the same answer:
    the connector locks the KV for the request, and LMCache counts a second answer as more KV.
    ``needed``: what it holds is not known otherwise; ``answer_s``: mean seconds until an answer."""

    def __init__(
        self, connector: Any, needed: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._needed = needed
        self._unanswered: dict[str, tuple[Any, float | None]] = {}
        self._held: dict[str, Held] = {}
        self._loading: dict[str, Any] = {}
        self._later = False
        self.answer_s = 0.0
        if connector is not None:
            self._ask = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = self._answer_vllm

    def begin(self, request: Any) -> None:
        """A request arrived."""
        if self._needed:
            self._unanswered[request.request_id] = request, None

    def forget(self, request_id: str) -> None:
        """The request has left the engine; unknown ids are ignored."""
        for each in (self._unanswered, self._held, self._loading):
            each.pop(request_id, None)

    def take_answers(self, computed_of: Callable[[Any], int]) -> list[str]:
        """Called before a plan. Returns the requests about which the connector has answered since.
        ``computed_of``: the tokens of a request that the engine itself has."""
        answered = []
        for request_id, (request, since_s) in list(self._unanswered.items()):
            computed = computed_of(request)
            now_s = self._clock()
            tokens, beside = self._ask(request, computed)
            if tokens is None:
                self._later = True
                self._unanswered[request_id] = request, now_s if since_s is None else since_s
                continue
            del self._unanswered[request_id]
            self._held[request_id] = Held(computed, tokens, beside)
            waited_s = 0.0 if since_s is None else now_s - since_s
            kept = _KEPT if self.answer_s else 0.0
            self.answer_s = kept * self.answer_s + (1.0 - kept) * waited_s
            answered.append(request_id)
        return answered

    def is_awaited(self, request_id: str) -> bool:
        """Whether the connector has not answered about a request."""
        return request_id in self._unanswered

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
            if loads or request_id in self._unanswered:
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
        if request_id in self._unanswered:
            return None, False
        held = self._held.get(request_id)
        if self._later and held is not None and held.computed == computed:
            return held.tokens, held.beside
        tokens, beside = self._ask(request, computed)
        if tokens is None:
            self._later = True
            self._unanswered[request_id] = request, self._clock()
        return tokens, beside
