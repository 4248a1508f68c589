"""Requests of a vLLM engine whose KV comes from another one, from their arrival until they run.

vLLM admits such a request like any other, with blocks for its whole prompt, and has its connector
fill them while other requests run. So a plan sees it as a prompt of which all but the last token is
computed: planning it starts the KV transfer. It appears in plans again when the KV has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from sluice.replica.transfer.counts import TransferCounts

_FLAGS = frozenset(("do_remote_prefill", "do_remote_decode"))


@dataclass(slots=True)
class _Incoming:
    """The KV transfer of a request: ``asked_s`` is when its load began, monotonic; ``tokens`` is
    the number of tokens to transfer."""

    asked_s: float | None = None
    tokens: int = 0


class IncomingKv:
    """See the module.

    Args:
        scheduler: vLLM's.
        counts: counters of transfers.
    """

    def __init__(self, scheduler: Any, counts: TransferCounts) -> None:
        self._scheduler = scheduler
        self._connector = scheduler.connector
        self._counts = counts
        self._requests: dict[str, _Incoming] = {}
        self._block_bytes = _block_bytes(scheduler.kv_cache_config)
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
            self._counts.failed()
            return False
        self._requests[request.request_id] = _Incoming(tokens=tokens)
        return True

    def forget(self, request_id: str) -> None:
        """The request has left the engine; unknown ids are ignored."""
        self._requests.pop(request_id, None)

    @property
    def under_way(self) -> bool:
        """Whether any KV is being loaded."""
        return any(each.asked_s is not None for each in self._requests.values())

    def awaits(self, request: Any, cached_tokens: int) -> bool:
        """Whether KV will come for a waiting request without computed tokens, once it is admitted.

        Args:
            cached_tokens: tokens of its prompt in the engine's prefix cache.
        """
        incoming = self._requests.get(request.request_id)
        if incoming is None or incoming.asked_s is not None:
            return False
        incoming.tokens = max(0, request.num_prompt_tokens - 1 - cached_tokens)
        return True

    def arrived(self, request: Any) -> bool:
        """Whether the KV of a waiting request has arrived, so that it could run. False if the
        transfer failed altogether: vLLM first frees its blocks, when it next checks the request."""
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
            if incoming.asked_s is not None:
                continue
            request = self._scheduler.requests[request_id]
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                incoming.asked_s = now_s
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
                incoming.asked_s is None
                or request_id not in self._scheduler.finished_recving_kv_req_ids
            ):
                continue
            del self._requests[request_id]
            ended.append(request_id)
            if request_id in self._scheduler.failed_recving_kv_req_ids:
                self._counts.failed()
            else:
                blocks = -(-incoming.tokens // self._block_tokens)
                nbytes = blocks * self._block_bytes
                self._counts.arrived(now_s - incoming.asked_s, incoming.tokens, nbytes)
        return ended


def kv_of_request(request: Any) -> bool:
    """Whether a request is prefill only: another engine decodes."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def _block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block in all layers, on one worker."""
    return sum(
        group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    )
