"""vLLM's worker on CPUs, with seven faults of 0.29 to 0.32 fixed. In vLLM:

- A request with a seed whose prompt continues draws a token that is dropped; its generator is then
  moved back, but a CPU generator has no offset, so the call ends the engine.
- Temperatures under speculation are spread into a copy of the result, so a batch with sampling
  requests is divided by random memory. One without drafts and with a ``top_k`` ends the engine.
- Functions of speculation: 0.30 replaces Triton's where nothing looks for them any more, so the
  first check of a draft ends the engine.
- Ranks of log probabilities are compiled at the first request, for 20 to 40 s.
- LoRA: index -1 of tokens without an adapter selects the last one in memory, so requests to the
  model have the adapter's text.
- Later pipeline stages make room for tensors in a trial run, which eager execution with a KV cache
  of a given size leaves out: the first batch ends the engine."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from sluice.replica.vllm.support import UnsupportedVllmError

_CONSTRAIN = getattr(rejection_sampler, "apply_sampling_constraints", None)


class PatchedCpuWorker(CPUWorker):
    """Draws from a request's own generator only if the token is kept; vLLM's ``worker_cls``."""

    def init_device(self) -> None:
        """Make the model runner. Raises UnsupportedVllmError: vLLM lacks a name."""
        mend_rejection_sampler()
        mend_token_ranks()
        mend_adapters()
        super().init_device()
        mend_sampling_kernels()
        runner = self.model_runner
        if not self.use_v2_model_runner and not (
            hasattr(runner, "discard_request_mask") and hasattr(runner.input_batch, "generators")
        ):
            raise UnsupportedVllmError("vLLM's model runner lacks discard_request_mask, generators")

    def compile_or_warm_up_model(self) -> Any:
        """The last step of the start. Afterwards every stage has room for its input."""
        done = super().compile_or_warm_up_model()
        runner = self.model_runner
        if not (
            self.use_v2_model_runner
            or get_pp_group().is_first_rank
            or runner.intermediate_tensors is not None
        ):
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
        return done

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; requests whose token will be dropped have no generator meanwhile."""
        if self.use_v2_model_runner:  # its random numbers depend on seed and position alone
            return super().sample_tokens(grammar_output)
        generators = self.model_runner.input_batch.generators
        dropped = self.model_runner.discard_request_mask.np
        unused = {row: generators.pop(row) for row in list(generators) if dropped[row]}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(unused)


def mend_rejection_sampler() -> None:
    """Mend vLLM's check of drafted tokens. Raises UnsupportedVllmError: vLLM does not have it."""
    if _CONSTRAIN is None or not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        raise UnsupportedVllmError(
            "vLLM's rejection sampler lacks expand_batch_to_tokens or apply_sampling_constraints"
        )
    rejection_sampler.expand_batch_to_tokens = spread
    rejection_sampler.apply_sampling_constraints = _constrained


def mend_sampling_kernels() -> None:
    """Have vLLM check drafted tokens by its functions for CPUs, once they are in its module."""
    for name in ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens"):
        caller: Any = getattr(rejection_sampler, f"_{name}", None)
        if hasattr(caller, "kernel"):
            caller.kernel = getattr(rejection_sampler, f"{name}_kernel")


def mend_token_ranks() -> None:
    """Rank log probabilities without a compiler; a version that does it elsewhere is left alone."""
    if hasattr(sampler, "batched_count_greater_than"):
        sampler.batched_count_greater_than = token_ranks


def token_ranks(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How many of a row of ``[n, vocabulary]`` are at least its value of ``[n, 1]``:
    ``int64[n]``."""
    # Ones and zeros are summed as floats, which takes a tenth of the time that booleans take.
    at_least = torch.empty(logprobs.shape, dtype=torch.float32)
    return torch.ge(logprobs, values, out=at_least).sum(-1).to(torch.int64)


def mend_adapters() -> None:
    """Have vLLM leave tokens without a LoRA adapter as they are, in this process."""
    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        mended = without_adapter_as_is(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, mended)


def without_adapter_as_is(multiply: Callable[..., None]) -> Callable[..., None]:
    """``multiply`` by each token's adapter, with 0 as the input of tokens that have none."""

    @wraps(multiply)
    def mended(
        inputs: Any, weights: Any, output: Any, adapters: Any, *more: Any, **named: Any
    ) -> None:
        inputs = torch.where(adapters[:, None] < 0, 0, inputs)
        multiply(inputs, weights, output, adapters, *more, **named)

    return mended


def _constrained(logits: torch.Tensor, *others: Any) -> torch.Tensor:
    if not len(logits) or _CONSTRAIN is None:
        return logits
    constrained: torch.Tensor = _CONSTRAIN(logits, *others)
    return constrained


def spread(
    values: torch.Tensor,
    ends: torch.Tensor,
    tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Each request's value for each of its ``tokens`` to check, ``[tokens]``: ``values`` ``[n]``,
    and ``ends`` ``[n]``, ascending. ``replace_from`` becomes ``replace_to``."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    values = torch.where(values == replace_from, replace_to, values)
    return torch.repeat_interleave(values, counts, output_size=tokens)
