"""A KV connector of vLLM to memory of the host, without the copies: whatever prompts it has seen
computed, it has. vLLM's own needs a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class Loads(KVConnectorMetadata):
    """Requests whose KV is loaded from now on, and the tokens that are there then."""

    def __init__(self, tokens: dict[str, int]) -> None:
        self.tokens = tokens


class HostTier(KVConnectorBase_V1):  # type: ignore[misc]
    """Holds ``kv_connector_extra_config["held"]`` tokens of every prompt, as far as it has them,
    and loads them before the next step, or with ``in_background`` beside further steps. Its first
    ``later`` answers about a request are that it does not know yet."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._kv_transfer_config
        self._held: int = config.get_from_extra_config("held", 0)
        self._in_background: bool = config.get_from_extra_config("in_background", False)
        self._block: int = vllm_config.cache_config.block_size
        self._begun: dict[str, int] = {}
        self._later: int = config.get_from_extra_config("later", 0)
        self.asked: Counter[str] = Counter()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self.asked[request.request_id] += 1
        if self.asked[request.request_id] <= self._later:
            return None, False
        # Whole blocks; the last token is computed, for its logits.
        held = min(self._held, request.num_prompt_tokens - 1) // self._block * self._block
        more = max(0, held - computed)
        return more, self._in_background and more > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            self._begun[request.request_id] = request.num_computed_tokens + tokens

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        begun, self._begun = self._begun, {}
        return Loads(begun)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...
