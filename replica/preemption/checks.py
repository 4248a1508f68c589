"""Checks in a model's forward pass: the places where a prefill can stop."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal

from replica.preemption.words import ANY_TASK, REACHED, ControlWords, slot

Granularity = Literal["layer", "operator"]

_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_LAYER = re.compile(r"(^|\.)layers\.\d+$")


class NoChecksError(ValueError):
    """The model has no place for a check."""


class Checks:
    """Wraps the ``forward`` of operators, or of whole layers, in a check.

    The checks cost one comparison while no preemptible task runs, and a few more while one does.
    They belong to one thread, the one that runs the model.

    Args:
        words: say which task is to stop, and are told how far the running one is.
        suspend: called at a check whose task is to stop; the task goes on when it returns.
    """

    def __init__(self, words: ControlWords, suspend: Callable[[], None]) -> None:
        self._cells = words.cells
        self._suspend = suspend
        self._task = 0
        self._slot = slot(0)
        self._passed = 0
        self._wrapped: list[Any] = []

    def install(self, model: Any, granularity: Granularity) -> int:
        """Put a check before every operator, or layer, of ``model``; how many there are.

        Operators are linear layers and attention. They are found by class, in modules named as
        vLLM's models name their layers.

        Raises:
            NoChecksError: there are none.
        """
        pattern = _LAYER if granularity == "layer" else _IN_LAYER
        kinds = _operators() if granularity == "operator" else None
        module: Any
        for name, module in model.named_modules():
            if pattern.search(name) and (kinds is None or isinstance(module, kinds)):
                module.forward = self._wrap(module.forward)
                self._wrapped.append(module)
        if not self._wrapped:
            raise NoChecksError(
                f"preemption by {granularity} found no place for a check in "
                f"{type(model).__name__}: it knows models whose layers are named layers.N"
            )
        return len(self._wrapped)

    def remove(self) -> None:
        """Take all checks out."""
        for module in self._wrapped:
            del module.forward
        self._wrapped.clear()

    @contextmanager
    def running(self, task: int) -> Iterator[None]:
        """Inside, the checks are those of ``task``; 0 for a task that cannot be preempted."""
        outer = self._task, self._slot, self._passed
        self._task, self._slot, self._passed = task, slot(task), 0
        self._cells[REACHED] = 0
        try:
            yield
        finally:
            self._task, self._slot, self._passed = outer
            self._cells[REACHED] = self._passed

    @property
    def task(self) -> int:
        """The running task, 0 where it has no checks."""
        return self._task

    @property
    def passed(self) -> int:
        """Checks that the running task has passed."""
        return self._passed

    def check(self) -> None:
        """Stop here if the running task is to stop."""
        self._passed += 1
        cells = self._cells
        cells[REACHED] = self._passed
        stop = cells[self._slot]
        if stop == self._task or stop == ANY_TASK:
            cells[self._slot] = 0
            self._suspend()

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if self._task:
                self.check()
            return forward(*args, **kwargs)

        return checked


def _operators() -> tuple[type, ...]:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import LinearBase

    return (LinearBase, AttentionLayerBase)
