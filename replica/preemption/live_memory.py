"""How much memory of a device the tensors that a pass of a model has made take."""

# PyTorch's class is untyped here, so its subclass is, too.
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the memory of a device that was allocated in this context and is still in use."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._taken: dict[StorageWeakRef, int] = {}

    def bytes(self) -> int:
        """How much it is now."""
        self._taken = {
            storage: size for storage, size in self._taken.items() if not storage.expired()
        }
        return sum(self._taken.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {StorageWeakRef(each) for each in self._storages((args, kwargs))}
        for storage in self._storages(result):
            weak = StorageWeakRef(storage)
            if weak not in given:  # a view, or computed in place
                self._taken[weak] = storage.nbytes()
        return result

    def _storages(self, tree: Any) -> list[Any]:
        return [
            leaf.untyped_storage()
            for leaf in tree_leaves(tree)
            if isinstance(leaf, torch.Tensor) and leaf.device == self._device
        ]
