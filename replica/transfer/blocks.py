"""Blocks of vLLM's KV cache as plain bytes, layer by layer, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from sluice.replica.transfer.wire import LAYOUT_BYTES


class UnsupportedLayoutError(RuntimeError):
    """The KV of this model cannot be transferred block by block."""


class BlockLayers:
    """The layers of a KV cache, and the dimension of each layer that counts blocks.

    Args:
        caches: the tensor of each layer, of any shape, by the layer's name. A tensor that layers
            share is counted once.
        blocks: number of blocks of the cache.

    Raises:
        UnsupportedLayoutError: a layer has no such dimension, or several; the message names it.
    """

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
        """Digest of what two engines must agree on: the ``model``, and the layers' shapes and
        types."""
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
        """Fill these blocks with bytes from another engine's :meth:`read`. Returns when they are
        filled.

        A thread other than the computing one may call it: on a GPU the copies run on a separate
        stream.
        """
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
