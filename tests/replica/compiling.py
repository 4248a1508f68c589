"""A worker of vLLM that counts what is compiled in the engine's process."""

# mypy: disable-error-code="misc"

from __future__ import annotations

import torch
from numba.core import event
from vllm.v1.sample import sampler

from sluice.replica.vllm.cpu_worker import PatchedCpuWorker, token_ranks


class CompilingWorker(PatchedCpuWorker):
    """Compiles the ranks of log probabilities at their first use, as vLLM does on a GPU, but with a
    backend that needs no compiler. vLLM loads it by its argument ``worker_cls``."""

    def init_device(self) -> None:
        """Make the model runner, and count from now on."""
        super().init_device()
        sampler.batched_count_greater_than = torch.compile(token_ranks, backend="eager")
        self._compiled_loops = event.RecordingListener()
        event.register("numba:compile", self._compiled_loops)

    def compilations(self) -> list[int]:
        """Graphs that torch has compiled, and loops that numba has."""
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return [graphs, len(self._compiled_loops.buffer)]
