"""The offer that an engine forwards with a computed prompt: where its KV is, and of which
prompt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, NamedTuple

from sluice.replica.transfer.client import Source
from sluice.replica.transfer.wire import LAYOUT_BYTES, Handle

DIGEST_BYTES = 16
_MOST_RANKS = 1024


class Offer(NamedTuple):
    """KV that is kept for another engine.

    Attributes:
        addresses: IP address and port of each worker, by tensor-parallel rank.
        layout: digest of the model and of how its KV lies in memory.
        handle: handle of the KV, the same for all workers.
        prompt_tokens: tokens of the prompt. prompt: digest of its tokens, see
            :func:`prompt_digest`.
    """

    addresses: tuple[tuple[str, int], ...]
    layout: bytes
    handle: Handle
    prompt_tokens: int
    prompt: bytes

    def to_params(self) -> dict[str, Any]:
        """As vLLM's ``kv_transfer_params``: plain data."""
        return {
            "do_remote_prefill": True,
            "addresses": [list(address) for address in self.addresses],
            "layout": self.layout.hex(),
            "handle": bytes(self.handle).hex(),
            "prompt_tokens": self.prompt_tokens,
            "prompt": self.prompt.hex(),
        }

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Offer:
        """Read it back.

        Raises:
            ValueError: ``params`` is no output of :meth:`to_params`.
        """
        addresses = params.get("addresses")
        if not isinstance(addresses, list) or not 0 < len(addresses) <= _MOST_RANKS:
            raise ValueError("addresses must be a list with an address for each worker")
        tokens = params.get("prompt_tokens")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"prompt_tokens must be at least 1, got {tokens!r}")
        return cls(
            tuple(map(_address, addresses)),
            _bytes(params, "layout", LAYOUT_BYTES),
            Handle.of(_bytes(params, "handle")),
            tokens,
            _bytes(params, "prompt", DIGEST_BYTES),
        )

    def source(self, rank: int) -> Source:
        """Where the worker of this rank fetches its part."""
        host, port = self.addresses[rank]
        return Source(host, port, self.layout, self.handle)


def prompt_digest(request: Any) -> bytes | None:
    """Digest of the facts, besides the model, that the KV of a vLLM request's prompt depends on:
    its tokens, the adapter, and the cache salt. ``None``: it depends on more (images, embeddings),
    and is not transferred."""
    if request.prompt_token_ids is None or getattr(request, "mm_features", None):
        return None
    if getattr(request, "prompt_embeds", None) is not None:
        return None
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    lora = request.lora_request
    for part in (request.cache_salt, None if lora is None else lora.lora_name):
        digest.update(repr(part).encode())
    digest.update(array("q", request.prompt_token_ids).tobytes())
    return digest.digest()


def _address(given: Any) -> tuple[str, int]:
    match given:
        case [str(host), int(port)] if not isinstance(port, bool) and 0 < port < 65_536:
            # Names would need a lookup, which no time-out covers.
            return str(ip_address(host)), port
    raise ValueError("an address must be an IP address and a port")


def _bytes(params: Mapping[str, Any], name: str, length: int | None = None) -> bytes:
    text = params.get(name)
    if not isinstance(text, str):
        raise ValueError(f"{name} must be hexadecimal digits")
    data = bytes.fromhex(text)
    if length is not None and len(data) != length:
        raise ValueError(f"{name} must be {length} bytes, got {len(data)}")
    return data
