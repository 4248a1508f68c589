"""A model runner for every depth of the stack of suspended prefills.

A runner's input buffers, batch and attention metadata belong to one forward pass. A suspended pass
still needs them, so the task that preempts it must not use the same runner. All lanes share the
model, the KV cache and the requests, so a request can be computed in one lane now and in another
later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

SHARED_NAMES = ("model", "kv_caches", "requests", "num_prompt_logprobs", "encoder_cache")
"""Attributes that lanes share with vLLM's own runner."""


class Lanes:
    """vLLM's own runner for work without checks, and private ones for tasks with them.

    Args:
        worker: vLLM's worker, complete with its KV cache.
        depth: how many tasks can be suspended. One more computes.
    """

    def __init__(self, worker: Any, depth: int) -> None:
        self.stock: Any = worker.model_runner
        self._connector = _kv_connector()
        self._adapters = _Adapters(self.stock) if hasattr(self.stock, "lora_manager") else None
        self.private = [_private_lane(worker, self._connector) for _ in range(depth + 1)]

    @contextmanager
    def nested(self) -> Iterator[None]:
        """In this context other tasks run inside the one that computes. The KV connector has one
        task's commands at a time, and the model one task's LoRA adapters: nested tasks have their
        own, and the suspended one gets its own back."""
        with ExitStack() as kept:
            if self._connector is not None:
                kept.enter_context(self._connector.step_suspended())
            if self._adapters is not None:
                kept.enter_context(self._adapters.kept())
            yield

    def enter(self, lane: Any, batch: Any) -> None:
        """Called before ``lane`` computes ``batch``: removes old state of its requests from all
        other lanes.

        A lane's batch survives a step, and holds tokens and blocks of each request as it last saw
        them. Private lanes are emptied at once. vLLM's own keeps its batch, so requests that
        another lane computes or ends are removed from it.
        """
        if lane is self.stock:
            return
        ids = (*batch.finished_req_ids, *batch.num_scheduled_tokens)
        _remove(self.stock.input_batch, ids)

    def leave(self, lane: Any) -> None:
        """Called after a task in ``lane``, however it ended."""
        lane.execute_model_state = None
        if lane is self.stock:
            return
        _remove(lane.input_batch, tuple(lane.input_batch.req_id_to_index))


class _Adapters:
    """The LoRA adapter of each token, which vLLM sets in the model before each batch. ``runner`` is
    any lane: all share what manages the adapters."""

    def __init__(self, runner: Any) -> None:
        self._set = runner.lora_manager.set_active_adapters
        self._latest: tuple[Any, Any] = (set(), None)
        runner.lora_manager.set_active_adapters = self._activate

    def _activate(self, requests: Any, mapping: Any) -> None:
        self._latest = requests, mapping
        self._set(requests, mapping)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """After this context the adapters are those of before, also where others took their
        place in memory."""
        latest = self._latest
        try:
            yield
        finally:
            self._activate(*latest)


def _remove(batch: Any, request_ids: Iterable[str]) -> None:
    """Remove requests from the batch that a lane last saw."""
    for request_id in request_ids:
        batch.remove_request(request_id)
    batch.condense()
    batch.refresh_metadata()


def new_runner(worker: Any) -> Any:
    """One more model runner for ``worker``, without a model and a KV cache."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        return type(worker.model_runner)(worker.vllm_config, worker.device)


def _kv_connector() -> Any:
    """The worker's KV connector, if there is one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


def _private_lane(worker: Any, connector: Any) -> Any:
    from vllm.config import set_current_vllm_config

    stock = worker.model_runner
    lane = new_runner(worker)
    with set_current_vllm_config(worker.vllm_config):
        for name in SHARED_NAMES:
            setattr(lane, name, getattr(stock, name))
        if hasattr(stock, "lora_manager"):
            lane.lora_manager = stock.lora_manager
        # Everything but the cache itself, which exists and is bound to the model's layers.
        lane.initialize_kv_cache_tensors = lambda *args, **kwargs: {}
        lane.initialize_kv_cache(stock.kv_cache_config)
        del lane.initialize_kv_cache_tensors
        lane.kv_caches = stock.kv_caches
        share_workspace(stock, lane)
    # Its batches are not replayed from CUDA graphs, either.
    lane.cudagraph_dispatcher.keys_initialized = False
    lane._model_forward = without_compiled_code(lane._model_forward)
    if connector is not None:
        lane._model_forward = saving_complete_kv(lane._model_forward, connector)
    return lane


def share_workspace(stock: Any, lane: Any) -> None:
    """FlashInfer's attention has a workspace of hundreds of megabytes that is empty between two
    operators. One is enough, as operators come one after the other; vLLM shares it likewise."""
    shared = None
    for builder in _builders(stock):
        if shared is None and hasattr(builder, "_get_workspace_buffer"):
            shared = builder._get_workspace_buffer()
    for builder in _builders(lane):
        if shared is not None and hasattr(builder, "set_workspace_buffer"):
            builder.set_workspace_buffer(shared)


def _builders(runner: Any) -> list[Any]:
    """The builders of a runner's attention metadata."""
    return [
        builder
        for groups in runner.attn_groups
        for group in groups
        for builder in group.metadata_builders
    ]


def saving_complete_kv(forward: Callable[..., Any], connector: Any) -> Callable[..., Any]:
    """``forward``, of which ``connector`` saves KV only if it ends: vLLM has it save in any case,
    also when a pass is discarded or fails."""

    def saved(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except BaseException:
            connector.drop_saves()
            raise

    return saved


def without_compiled_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The original, uncompiled ``forward``: there are no checks in compiled code."""
    from vllm.forward_context import get_forward_context

    def eager(*args: Any, **kwargs: Any) -> Any:
        get_forward_context().skip_compiled = True
        return forward(*args, **kwargs)

    return eager
