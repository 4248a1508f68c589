"""Sluice's KV connector for vLLM: the KV of a finished prompt, over plain TCP.

The prefill engine copies the blocks to host memory in the step that ends the prompt and frees them.
The decode engine fetches those that its prefix cache lacks in an asynchronous load of vLLM. If that
fails, vLLM recomputes the prompt. vLLM loads this module in its scheduler and in each worker. Needs
``KVConnectorBase_V1`` as of vLLM 0.29."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc"

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.utils.network_utils import get_ip

from sluice.replica.config import TransferConfig
from sluice.replica.transfer import (
    LAYOUT_BYTES,
    Handle,
    KeptPrompts,
    MemoryLimit,
    Offer,
    TransferError,
    TransferServer,
    block_bytes,
    fetch,
    prompt_digest,
)
from sluice.replica.vllm.contract import WITH_TRANSFER
from sluice.replica.vllm.support import TRANSFER, check, check_overrides

# Blocks of vLLM's KV cache as plain bytes, layer by layer, and back.


class UnsupportedLayoutError(RuntimeError):
    """The KV of this model cannot be transferred block by block."""


class BlockLayers:
    """The layers of a KV cache of ``blocks`` blocks, by name; a tensor that layers share counts
    once. Raises UnsupportedLayoutError: a layer has no dimension that counts blocks, or several."""

    def __init__(self, caches: Mapping[str, Any], blocks: int) -> None:
        by_place: dict[tuple[int, tuple[int, ...]], tuple[str, torch.Tensor]] = {}
        for name, cache in sorted(caches.items()):
            if not isinstance(cache, torch.Tensor):
                raise UnsupportedLayoutError(f"the KV cache of layer {name} is no tensor")
            by_place.setdefault((cache.data_ptr(), tuple(cache.shape)), (name, cache))
        self._layers = [
            (name, cache, _block_dimension(name, cache, blocks))
            for name, cache in by_place.values()
        ]
        self.block_bytes = [
            cache.numel() // blocks * cache.element_size() for _, cache, _ in self._layers
        ]
        """Bytes of one block in each layer."""

    def digest(self, model: Mapping[str, Any]) -> bytes:
        """Digest that two engines must agree on: ``model``, and the layers' shapes and types."""
        layers = [
            (name, _block_shape(cache, dim), dim, str(cache.dtype), cache.device.type)
            for name, cache, dim in self._layers
        ]
        text = json.dumps([model, layers], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=LAYOUT_BYTES).digest()

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """A copy of these blocks' bytes in host memory."""
        layers = []
        for _, cache, dim in self._layers:
            ids = torch.tensor(block_ids, dtype=torch.long, device=cache.device)
            picked = cache.index_select(dim, ids).movedim(dim, 0).contiguous().cpu()
            layers.append(memoryview(picked.view(torch.uint8).reshape(-1).numpy()))
        return layers

    def write(self, block_ids: Sequence[int], layers: Iterable[bytearray]) -> None:
        """Fill these blocks with bytes from another engine's ``read``, and return when filled. Any
        thread may call it: on a GPU the copies run on a separate stream."""
        device = self._layers[0][1].device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for (_, cache, dim), data in zip(self._layers, layers, strict=True):
                ids = torch.tensor(block_ids, dtype=torch.long, device=cache.device)
                plain = torch.frombuffer(data, dtype=torch.uint8).view(cache.dtype)
                blocks = plain.view(len(block_ids), *_block_shape(cache, dim)).to(cache.device)
                cache.index_copy_(dim, ids, blocks.movedim(0, dim))
        if stream is not None:
            stream.synchronize()


def _block_dimension(name: str, cache: torch.Tensor, blocks: int) -> int:
    every = [dim for dim, size in enumerate(cache.shape) if size == blocks]
    # It is the first one in vLLM's layouts, or the one after keys and values; sizes of heads and
    # blocks, which may be the same number by chance, come later.
    found = [dim for dim in every if dim < 2] or every
    if len(found) != 1:
        raise UnsupportedLayoutError(
            f"the KV cache of layer {name} has the shape {tuple(cache.shape)}, in which "
            f"{'no' if not found else 'more than one'} dimension counts its {blocks} blocks"
        )
    return found[0]


def _block_shape(cache: torch.Tensor, dim: int) -> tuple[int, ...]:
    shape = tuple(cache.shape)
    return shape[:dim] + shape[dim + 1 :]


logger = logging.getLogger(__name__)

CONFIG_KEY = "sluice"

TIMEOUT_S = 5.0
"""Max time of a transfer of one prompt's KV, after which it is recomputed, seconds."""

KEEP_S = 30.0
"""How long the KV of a prompt is kept until another engine fetches it, seconds."""


@dataclass(frozen=True)
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Where one worker serves KV, and the layout of its KV."""

    host: str
    port: int
    layout: bytes


@dataclass(frozen=True)
class Load:
    """Fetch the KV of ``request_id``: the offer's blocks from ``first`` on into ``block_ids``."""

    request_id: str
    offer: Offer
    first: int
    block_ids: list[int]
    deadline_s: float


@dataclass(frozen=True)
class Save:
    """Keep the KV in ``block_ids``, which is complete after this step, under ``handle``."""

    handle: Handle
    block_ids: list[int]


@dataclass
class StepTransfers(KVConnectorMetadata):
    """Commands of the scheduler to the workers, sent with a step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class TcpConnector(KVConnectorBase_V1):
    """The connector; one object is either the scheduler's or a worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        given = vllm_config.kv_transfer_config.kv_connector_extra_config.get(CONFIG_KEY, {})
        config = TransferConfig.model_validate(given)
        check_kv_cache(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            most = config.max_bytes // block_bytes(kv_cache_config)
            self._scheduler = _SchedulerSide(vllm_config, most)
        else:
            self._worker = _WorkerSide(vllm_config, kv_cache_config, config)

    # In the scheduler.

    def read_blocks_by(self, block_ids: Callable[[str], Sequence[Sequence[int]]]) -> None:
        """Set the function that finds the blocks of a request; without it no KV is transferred."""
        self._scheduler.block_ids = block_ids

    def set_xfer_handshake_metadata(self, metadata: dict[int, WorkerAddress]) -> None:
        """Called once, with the address of each worker by rank."""
        self._scheduler.workers = [metadata[rank] for rank in sorted(metadata)]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones could be fetched."""
        tokens: int = self._scheduler.fetchable(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Called when a request is admitted; if it has external tokens, their load begins."""
        self._scheduler.admit(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepTransfers:
        """The workers' saves and loads for this step."""
        return self._scheduler.step(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the blocks (no: the KV was copied), and the offer, if any."""
        return False, self._scheduler.finish(request)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Called with the tensors once, and without any for each further model runner."""
        if kv_caches:
            self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> WorkerAddress | None:
        """Where this worker serves KV."""
        return self._worker.address

    def bind_connector_metadata(self, connector_metadata: StepTransfers) -> None:
        """Called before each step. Loads begin here: some versions of vLLM call ``start_load_kv``
        only after the computation, and nothing in the step uses the blocks that they fill."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: loads run beside the steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: no step waits for a load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: layers are saved together, after the step."""

    def wait_for_save(self) -> None:
        """Called after each step's computation."""
        self._worker.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads have ended, with or without success."""
        return None, self._worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that loads have left unfilled."""
        return self._worker.take_failed()

    # In a worker that runs a step from inside the computation of another one.

    @contextmanager
    def step_suspended(self) -> Iterator[None]:
        """Other steps run in this context; then the suspended one is bound, without new loads."""
        suspended = self._get_connector_metadata()
        self.clear_connector_metadata()
        try:
            yield
        finally:
            super().bind_connector_metadata(suspended)

    def drop_saves(self) -> None:
        """The computation of the bound step did not end, so its KV is incomplete: save none."""
        super().bind_connector_metadata(StepTransfers())

    def shutdown(self) -> None:
        """The engine ends."""
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()


class _SchedulerSide:
    """Decides which KV is kept, at most ``most`` blocks of a prompt, and which is fetched."""

    def __init__(self, vllm_config: Any, most: int) -> None:
        self._most = most
        self.block_ids: Callable[[str], Sequence[Sequence[int]]] | None = None
        self.workers: list[WorkerAddress] = []
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._block = vllm_config.cache_config.block_size
        self._fetches = vllm_config.kv_transfer_config.is_kv_consumer
        self._wanted: dict[str, Offer] = {}
        self._prefills: dict[str, Any] = {}
        self._offers: dict[str, Offer] = {}
        self._next = StepTransfers()

    def fetchable(self, request: Any, computed: int) -> int:
        offer = self._offer(request)
        if offer is None:
            return 0
        return max(0, self._upto(offer, request) - computed)

    def _upto(self, offer: Offer, request: Any) -> int:
        """How many of a prompt's tokens there are with the offered ones: of a whole prompt all but
        the last one, which is always computed here for its logits; else whole blocks."""
        tokens: int = request.num_prompt_tokens
        if offer.prompt_tokens >= tokens:
            return tokens - 1
        whole: int = offer.prompt_tokens // self._block * self._block
        return whole

    def _offer(self, request: Any) -> Offer | None:
        """The offer that came with a request, if it matches the request."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return None
        offer = self._wanted.get(request.request_id)
        if offer is None:
            try:
                offer = Offer.of(params)
            except ValueError as error:
                logger.warning("recomputing a prompt: invalid KV offer: %s", error)
            else:
                reason = self._unfit(offer, request)
                if reason:
                    logger.warning("recomputing a prompt: %s", reason)
                    offer = None
            if offer is None:
                params["do_remote_prefill"] = False
            else:
                self._wanted[request.request_id] = offer
        return offer

    def _unfit(self, offer: Offer, request: Any) -> str | None:
        if not self._fetches:
            return "this engine only sends KV"
        if not self.workers or offer.layout != self.workers[0].layout:
            return "the offered KV is of another model or layout"
        if len(offer.addresses) != self._ranks:
            return "the offered KV has another number of workers"
        more = offer.prompt_tokens > request.num_prompt_tokens
        if more or prompt_digest(request, offer.prompt_tokens) != offer.prompt:
            return "the offered KV is of other tokens"
        return None

    def admit(self, request: Any, blocks: Any, external_tokens: int) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            self._prefills[request.request_id] = request
        offer = self._wanted.pop(request.request_id, None)
        if offer is None:
            return
        # If the request is preempted later, its prompt is recomputed here.
        params["do_remote_prefill"] = False
        if external_tokens == 0:
            # All of it is cached here. The prefill engine drops its copy after a time.
            return
        tokens = self._upto(offer, request)
        first = (tokens - external_tokens) // self._block
        last = -(-tokens // self._block)
        self._next.loads.append(
            Load(
                request.request_id,
                offer,
                first,
                list(blocks.get_block_ids()[0][first:last]),
                time.monotonic() + TIMEOUT_S,
            )
        )

    def step(self, scheduler_output: Any) -> StepTransfers:
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._prefills.get(request_id)
            if request is None or request.num_computed_tokens + tokens < request.num_prompt_tokens:
                continue
            del self._prefills[request_id]
            self._offer_of(request)
        step, self._next = self._next, StepTransfers()
        return step

    def _offer_of(self, request: Any) -> None:
        """The step ends this request's prompt: have the workers keep its KV, or the beginning that
        can be kept."""
        tokens = request.num_prompt_tokens
        blocks = -(-(tokens - 1) // self._block)
        if blocks > self._most:
            blocks, tokens = self._most, self._most * self._block
        digest = prompt_digest(request, tokens)
        if digest is None or self.block_ids is None or not self.workers or not blocks:
            return
        handle = Handle.new()
        self._offers[request.request_id] = Offer(
            tuple((worker.host, worker.port) for worker in self.workers),
            self.workers[0].layout,
            handle,
            tokens,
            digest,
        )
        ids = list(self.block_ids(request.request_id)[0][:blocks])
        self._next.saves.append(Save(handle, ids))

    def finish(self, request: Any) -> dict[str, Any] | None:
        self._prefills.pop(request.request_id, None)
        self._wanted.pop(request.request_id, None)
        offer = self._offers.pop(request.request_id, None)
        return None if offer is None else offer.to_params()


class _WorkerSide:
    """Keeps KV for other engines, and fetches KV from them."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: TransferConfig) -> None:
        self.address: WorkerAddress | None = None
        self._vllm_config = vllm_config
        self._blocks = kv_cache_config.num_blocks
        self._config = config
        self._kept = KeptPrompts(config.max_bytes, KEEP_S)
        self._incoming = MemoryLimit(config.max_bytes)
        self._fetchers = ThreadPoolExecutor(8, thread_name_prefix="kv-fetch")
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._reported_failed: set[int] = set()
        self._layers: BlockLayers | None = None
        self._server: TransferServer | None = None
        self._rank = 0

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        self._rank = get_tensor_model_parallel_rank()
        self._layers = BlockLayers(kv_caches, self._blocks)
        layout = self._layers.digest(model_facts(self._vllm_config))
        host = get_ip()
        # vLLM's answer if it finds no address.
        if host == "0.0.0.0":
            host = "127.0.0.1"
        self._server = TransferServer(self._kept, layout, host, TIMEOUT_S)
        self.address = WorkerAddress(host, self._server.port, layout)
        logger.info("serving KV transfers at %s, port %d", host, self._server.port)

    def begin(self, step: StepTransfers) -> None:
        for load in step.loads:
            self._fetchers.submit(self._load, load)

    def save(self, step: StepTransfers) -> None:
        for save in step.saves:
            try:
                self._keep(save)
            except Exception:
                # The decode engine can recompute the prompt; this must not end any request's step.
                logger.exception("cannot keep the KV of a prompt")

    def _keep(self, save: Save) -> None:
        assert self._layers is not None
        blocks = len(save.block_ids)
        # Do not copy KV that cannot be kept.
        fits = self._kept.has_room(blocks * sum(self._layers.block_bytes))
        if not (fits and self._kept.keep(save.handle, self._layers.read(save.block_ids), blocks)):
            logger.warning(
                "cannot keep the KV of a prompt: transfer.max_bytes is %d", self._config.max_bytes
            )

    def _load(self, load: Load) -> None:
        assert self._layers is not None
        ids, sizes = load.block_ids, self._layers.block_bytes
        failed: set[int] = set()
        try:
            with self._incoming.taken(len(ids) * sum(sizes), load.deadline_s):
                source = load.offer.source(self._rank)
                layers = fetch(source, load.first, len(ids), sizes, load.deadline_s)
                self._layers.write(ids, layers)
        except Exception as error:
            failed.update(ids)
            # Whatever the error, the prompt can be recomputed.
            logger.warning(
                "KV transfer failed, recomputing the prompt: %s",
                error,
                exc_info=not isinstance(error, TransferError),
            )
        with self._lock:
            # Update both under the lock: blocks without their request would be taken for valid.
            self._failed |= failed
            self._finished.add(load.request_id)

    def take_finished(self) -> set[str] | None:
        with self._lock:
            self._reported_failed, self._failed = self._failed, set()
            finished, self._finished = self._finished, set()
        return finished or None

    def take_failed(self) -> set[int]:
        """Failed blocks of what ``take_finished`` has just returned: a load may end in between."""
        return self._reported_failed

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._fetchers.shutdown(wait=False, cancel_futures=True)


def check_model(vllm_config: Any) -> None:
    """Check, before an engine starts, that its model's KV can be transferred if that is configured.
    Raises UnsupportedLayoutError, or UnsupportedVllmError: this version lacks something."""
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    if transfer is None or transfer.kv_connector != TcpConnector.__name__:
        return
    check("engine.transfer", WITH_TRANSFER, TRANSFER)
    check_overrides("engine.transfer", TcpConnector)
    rules = (
        (model.runner_type == "generate", "a model that generates no text"),
        (not model.use_mla, "a model with multi-head latent attention"),
        (not model.is_hybrid, "a model with layers other than attention"),
        (not model.is_attention_free, "a model without attention"),
        (not model.is_encoder_decoder, "an encoder-decoder model"),
    )
    for kept, kind in rules:
        if not kept:
            raise UnsupportedLayoutError(f"engine.transfer: the KV of {kind} cannot be transferred")


def check_kv_cache(kv_cache_config: Any) -> None:
    """Check that KV of this cache can be transferred. Raises UnsupportedLayoutError: it cannot."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedLayoutError(
            f"the KV of a model with {len(groups)} groups of layers cannot be transferred"
        )
    kind = type(groups[0].kv_cache_spec).__name__
    if kind != "FullAttentionSpec":
        raise UnsupportedLayoutError(
            f"only the KV of plain attention can be transferred, not {kind}"
        )


def model_facts(vllm_config: Any) -> dict[str, Any]:
    """Facts that KV depends on, besides the tokens and the shapes of the layers."""
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    # On CPUs keys may be packed as the processor's instructions want them.
    processor = None
    if current_platform.is_cpu():
        able = torch.cpu.get_capabilities()
        processor = sorted(name for name, value in able.items() if value is True)
    return {
        "vllm": vllm.__version__,
        "model": model.model,
        "revision": model.revision,
        "quantization": model.quantization,
        "config": model.hf_config.to_dict(),
        "dtype": model.dtype,
        # Several kinds of 8 bits are stored as the same type.
        "kv": vllm_config.cache_config.cache_dtype,
        "block": vllm_config.cache_config.block_size,
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
        "processor": processor,
    }
