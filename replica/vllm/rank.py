"""A further rank of a vLLM engine with data parallelism.

vLLM runs a process with a scheduler for each rank behind one client. Here each rank is an engine of
its own, whose requests name it to the client, so that vLLM's balancing between ranks is not used.
"""

from __future__ import annotations

from sluice.protocol.requests import EngineDeadError
from sluice.replica.engine import EngineInfo
from sluice.replica.profiling.warm_up import warm_up
from sluice.replica.vllm.engine import VllmEngine
from sluice.scheduling.fleet.ranks import rank_name


class VllmRank(VllmEngine):
    """Rank ``rank``, at least 1, of the engine ``first``, which has rank 0.

    ``first`` must be started before it and stopped after it: it launches vLLM for all ranks.
    """

    def __init__(self, first: VllmEngine, rank: int) -> None:
        super().__init__(
            first._config,
            rank_name(first._replica_id, rank),
            first._max_live_requests,
            traced=first._traced,
            role=first._role,
        )
        self._rank = rank
        self._first = first
        first._others.append(self)

    async def start(self) -> EngineInfo:
        """Use every feature once on this rank, and be ready.

        Raises:
            EngineDeadError: the first rank is not running, or the engine died.
        """
        first, config = self._first, self._config
        if first._llm is None or first._info is None:
            raise EngineDeadError("the first rank of the vLLM engine is not running")
        self._llm, self._info = first._llm, first._info
        self._servings, self._models = first._servings, first._models
        self._reasoning_ends = first._reasoning_ends
        await warm_up(self, config.served_name, config.adapters)
        self._table.clear_samples()
        self._table.set_model(self._info.profile.model.with_headroom(config.headroom))
        return self._info

    async def stop(self) -> None:
        """Serve no more requests; the first rank ends those that are live. Idempotent."""
        self._llm = None
