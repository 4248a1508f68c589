"""vLLM's worker on CPUs, with random numbers that a prompt's chunks do not use up.

vLLM samples for every request of a batch, also for one whose prompt goes on in the next batch, and
drops that token. Where such a request has a seed, its generator is then moved back by the offset of
one draw. A generator on the CPU has no offset: in 0.29 to 0.32 the call raises, which ends the
engine. Preempted requests, whose tokens are computed again in chunks, end it likewise.
"""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from replica.vllm_support import UnsupportedVllmError


class SeededCpuWorker(CPUWorker):
    """Draws from a request's own generator only where the token counts.

    vLLM loads it in every process that computes, by its argument ``worker_cls``.
    """

    def init_device(self) -> None:
        """Make the model runner.

        Raises:
            UnsupportedVllmError: it lacks what is used here.
        """
        super().init_device()
        runner = self.model_runner
        if not self.use_v2_model_runner and not (
            hasattr(runner, "discard_request_mask") and hasattr(runner.input_batch, "generators")
        ):
            raise UnsupportedVllmError("vLLM's model runner lacks discard_request_mask, generators")

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample for the batch. Requests whose token will be dropped have no generator meanwhile:
        nothing is drawn from it, and nothing is to be taken back."""
        if self.use_v2_model_runner:  # its random numbers depend on seed and position alone
            return super().sample_tokens(grammar_output)
        generators = self.model_runner.input_batch.generators
        dropped = self.model_runner.discard_request_mask.np
        unused = {row: generators.pop(row) for row in list(generators) if dropped[row]}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(unused)
