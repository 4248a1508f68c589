"""Checks in a model's forward pass: the points where a prefill can stop.

On a GPU a whole pass may be queued after a few milliseconds. So a bound on how far launches run
ahead makes a check show the device's progress."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from sluice.replica.preemption.messages import (
    ANY_TASK,
    MAX_CHECKS,
    REACHED,
    ControlWords,
    agreed_word,
    mark,
    stop_word,
)


class Immediate:
    """A device that has computed an operator when its call returns: a CPU."""

    ahead = 0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def start(self) -> None:
        """Nothing to do."""

    def pace(self) -> None:
        """Nothing to wait for."""

    def stop(self) -> Callable[[], float]:
        """The present time."""
        now_s = self._clock()
        return lambda: now_s


class Paced:
    """A device with a queue, in which events mark positions.

    Each check waits for the event recorded ``ahead`` checks before. Nested tasks use the same ring
    of events, as what the suspended task has queued is in front of them. The time of a stop is its
    event's distance to the start of the bottom task, when nothing was queued."""

    def __init__(
        self, ahead: int, event: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ahead = ahead
        self._event = event
        self._clock = clock
        self._ring = [event() for _ in range(ahead + 1)]
        self._recorded = 0
        self._start = event()
        self._start_s = 0.0

    def start(self) -> None:
        """Read the host's clock while the device is idle."""
        self._start.record()
        self._start.synchronize()
        self._start_s = self._clock()

    def pace(self) -> None:
        """Wait until the device has reached the check that was ``ahead`` before this one."""
        ring, here = self._ring, self._recorded
        ring[here % len(ring)].record()
        self._recorded = here + 1
        if here >= self.ahead:
            ring[(here + 1) % len(ring)].synchronize()  # the oldest

    def stop(self) -> Callable[[], float]:
        """A function that returns when the device reached this stop; it waits for that."""
        start, start_s, stopped = self._start, self._start_s, self._event()
        stopped.record()

        def stopped_s() -> float:
            stopped.synchronize()
            return start_s + float(start.elapsed_time(stopped)) / 1e3

        return stopped_s


Pacer = Immediate | Paced
"""The device operations of a check; ``ahead``: max checks by which launches are ahead of it."""

LAUNCH_AHEAD = 2
"""Max checks by which launches run ahead of a GPU: a prefill stops up to this many operators later,
but the device has work while the next ones are launched."""


def pacer_for(device: Any) -> Pacer:
    """The pacer of a ``torch.device``."""
    if device.type == "cpu":
        return Immediate()
    from torch.cuda import Event

    return Paced(LAUNCH_AHEAD, lambda: Event(enable_timing=True))


_LAYER = re.compile(r"(?:^|\.)(layers\.\d+)\.(.*)$")
_BESIDE = "shared_expert"
"""Shared experts, used by all tokens, may run on a separate stream beside the others."""


class NoChecksError(ValueError):
    """The model has no point for a check."""


class Checks:
    """Checks before each operator of a model: one comparison while no preemptible task runs.

    With several workers the first one chooses a check that no worker has reached yet: each waits
    for the others at every reduction, which bounds a worker's lead. ``suspend`` is called at a
    check whose task must stop; the task resumes when it returns."""

    def __init__(
        self, words: ControlWords, suspend: Callable[[], None], rank: int = 0, ranks: int = 1
    ) -> None:
        self.ahead = 0
        self.pacer: Pacer = Immediate()
        self._cells = words.cells
        self._suspend = suspend
        self._leads = rank == 0
        self._ranks = ranks
        self._task = 0
        self._here = 0
        self._stop = stop_word(0)
        self._agreed = agreed_word(0)
        self._wrapped: list[tuple[Any, str]] = []

    def install(self, model: Any) -> int:
        """Put a check before every operator (linear layer, attention, experts) of ``model``;
        returns their number. Raises NoChecksError: none, or several workers could not agree on
        one."""
        checks: Counter[str] = Counter()
        reductions: Counter[str] = Counter()
        for module, layer, methods, reduces in _places(model):
            checks[layer] += 1
            reductions[layer] += reduces
            for method in methods:
                setattr(module, method, self._wrap(getattr(module, method)))
                self._wrapped.append((module, method))
        if not checks:
            raise NoChecksError(
                f"preemption found no point for a check in {type(model).__name__}: it knows models "
                "whose layers are named layers.N"
            )
        if self._ranks > 1:
            self.ahead = distance(checks, reductions) + self.pacer.ahead
        return sum(checks.values())

    def remove(self) -> None:
        """Take all checks out."""
        for module, method in self._wrapped:
            delattr(module, method)
        self._wrapped.clear()

    @contextmanager
    def running(self, task: int) -> Iterator[None]:
        """In this context the checks belong to ``task``; 0 for a task that cannot be preempted."""
        outer = self._task, self._here
        self._enter(task, mark(task, 0))
        try:
            yield
        finally:
            self._enter(*outer)

    def _enter(self, task: int, here: int) -> None:
        self._task, self._here = task, here
        self._stop, self._agreed = stop_word(task), agreed_word(task)
        if self._leads:
            self._cells[REACHED] = here

    @property
    def task(self) -> int:
        """The running task, 0 where it has no checks."""
        return self._task

    @property
    def passed(self) -> int:
        """Checks that the running task has passed."""
        return self._here % MAX_CHECKS

    def check(self) -> None:
        """Stop here if the running task must stop."""
        self._here += 1
        self.pacer.pace()
        cells = self._cells
        if self._leads:
            cells[REACHED] = self._here
            stop = cells[self._stop]
            if stop == self._task or stop == ANY_TASK:
                cells[self._stop] = 0
                if not 0 <= cells[self._agreed] - self._here <= self.ahead:  # as agreed before
                    cells[self._agreed] = self._here + self.ahead
        if cells[self._agreed] == self._here:
            self._suspend()

    def _wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if self._task:
                self.check()
            return method(*args, **kwargs)

        return checked


def distance(checks: Counter[str], reductions: Counter[str]) -> int:
    """A number of checks by which no worker can be ahead: a layer of ``n`` checks with ``r``
    reductions has at most ``n - r`` without one in a row. Raises NoChecksError: a layer without a
    reduction."""
    without = [layer for layer in checks if not reductions[layer]]
    if without:
        raise NoChecksError(
            f"{without[0]} has no reduction among its operators, so workers cannot agree where to "
            "stop: preemption with tensor parallelism needs one in every layer"
        )
    return max(checks[layer] - reductions[layer] + 1 for layer in checks)


_Place = tuple[Any, str, tuple[str, ...], bool]
"""A module, its layer, the methods that compute it, and whether workers wait for each other."""


def _places(model: Any) -> Iterator[_Place]:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

    module: Any
    for name, module in model.named_modules():
        found = _LAYER.search(name)
        if found is None:
            continue
        layer, inside = found.groups()
        if _BESIDE in inside:
            continue
        if isinstance(module, RoutedExperts):
            yield module, layer, ("forward_modular", "forward_monolithic"), True
        elif isinstance(module, LinearBase | AttentionLayerBase):
            reduces = isinstance(module, RowParallelLinear) and module.reduce_results
            # With LoRA the model calls what stands around the layer.
            called = model.get_submodule(name.removesuffix(".base_layer"))
            yield called, layer, ("forward",), reduces
