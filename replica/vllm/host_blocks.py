"""What vLLM's ``OffloadingConnector`` has in the memory of the host, and how long loading takes.

The connector's manager makes an event of what it stores and evicts, for vLLM's KV events. Sluice
has it do so in any case, reads them on their way to the connector, and times each load from its
request's admission to its end as vLLM sees it. That includes waiting for other loads and for the
end of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import vllm

from sluice.replica.vllm.versions import WITH_HOST_MEMORY, age

_KEPT: Final = 0.9
"""Weight of the earlier loads in the time of a token, after another load."""

_CPU: Final = "CPU"
_GROUP_BYTES: Final = 4
"""An offloaded block is named by its hash and the number of its group of layers."""


class HostBlocks:
    """See the module. Empty with another connector, or none; and if a block of the host is not one
    of the engine, as with several groups of layers.

    Args:
        connector: vLLM's KV connector, in the scheduler.
        block_tokens: tokens of a block, for which there is one hash.
        clock: monotonic seconds.
    """

    def __init__(
        self, connector: Any, block_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._block_tokens = block_tokens
        self._clock = clock
        self._held: set[bytes] = set()
        self._begun: dict[str, tuple[float, int]] = {}
        self._started: list[str] = []
        self._seconds = self._tokens = 0.0
        self._removed: Callable[[bytes], None] = lambda block_hash: None
        manager = _manager(connector, block_tokens)
        self.known = manager is not None
        """Whether it is known what the connector holds."""
        if manager is not None:
            self._follow(connector, manager)

    def tell_removed(self, listener: Callable[[bytes], None]) -> None:
        """Call ``listener`` with the hash of each removed block."""
        self._removed = listener

    def load_s(self, block_hash: bytes) -> float:
        """The time to load one token of a block, seconds; 0: it is not there, or no load has been
        timed."""
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
        """Follow an event of the memory of the host."""
        if getattr(event.medium, "value", event.medium) != _CPU:
            return
        hashes = [bytes(key[:-_GROUP_BYTES]) for key in event.keys]
        if not event.removed:
            self._held.update(hashes)
            return
        self._held.difference_update(hashes)
        for block_hash in hashes:
            self._removed(block_hash)

    def _loaded(self, request_id: str) -> None:
        """A load has ended."""
        begun = self._begun.pop(request_id, None)
        if begun is not None:
            self._seconds = _KEPT * self._seconds + self._clock() - begun[0]
            self._tokens = _KEPT * self._tokens + begun[1]


def _manager(connector: Any, block_tokens: int) -> Any:
    """What makes the events; ``None``: not of this connector, not of the engine's blocks, or of an
    older vLLM."""
    if age(vllm.__version__, WITH_HOST_MEMORY) == "older":
        return None
    scheduler = getattr(connector, "connector_scheduler", None)
    groups = getattr(getattr(scheduler, "config", None), "kv_group_configs", ())
    names = ("tokens_per_chunk", "sliding_window_size_in_chunks")
    shapes = [tuple(getattr(each, name, None) for name in names) for each in groups]
    manager = getattr(scheduler, "manager", None)
    return manager if shapes == [(block_tokens, None)] and hasattr(manager, "events") else None
