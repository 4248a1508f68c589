"""How long a prefill's forward pass takes, and at which moments of it the pass can be left."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Literal, NamedTuple

import numpy as np

from sluice.scheduling.latency.model import LatencyModel, StepSample
from sluice.scheduling.request.kernels import PREFILL_CONTEXT, PREFILL_CROSS, PREFILL_SQUARE

Granularity = Literal["off", "layer", "operator"]
"""Where a pass can be left: not at all, before a layer, or before an operator."""

CHECKS: dict[Granularity, int] = {"off": 0, "layer": 1, "operator": 5}
"""How many places a layer has where it can be left."""


class Model(NamedTuple):
    """The operators of a decoder, FlowPrefill §5.1: per layer, ``qkv_proj``, attention, ``o_proj``,
    ``gate_up_proj`` and ``down_proj``.

    Attributes:
        layers: how many there are.
        qkv, o, gate_up, down: weights of each linear operator, in any one unit.
    """

    layers: int
    qkv: float
    o: float
    gate_up: float
    down: float

    @classmethod
    def of_sizes(cls, layers: int, hidden: int, key_value: int, inner: int) -> Model:
        """From a model's ``hidden`` size, its width of keys (``key_value``) and of the MLP."""
        return cls(
            layers,
            hidden * (hidden + 2 * key_value),
            hidden * hidden,
            2 * hidden * inner,
            hidden * inner,
        )


LLAMA3_8B = Model.of_sizes(32, 4_096, 1_024, 14_336)
LLAMA3_70B = Model.of_sizes(80, 8_192, 1_024, 28_672)
QWEN3_30B_A3B = Model(48, 2_048 * 5_120, 4_096 * 2_048, 2_048 * 128, 8 * 3 * 2_048 * 768)
"""With the router's gate and the 8 experts of a token in place of ``gate_up_proj`` and
``down_proj`` (§6.5)."""


class Pass:
    """One forward pass.

    Every layer takes the same time. Within one, the part of a step's time that depends on the
    context is attention's, and the rest is the linear operators', by their weights.

    Args:
        model: its operators.
        latency: its time by step.
        step: the batch.
        factor: on that time, such as noise.
        granularity: where it can be left.
        check_s: time of a check, of which one stands before each place where it can be left.

    Attributes:
        seconds: how long it takes.
        checks: how many checks it has.
    """

    __slots__ = ("_layer_s", "_layers", "_starts", "checks", "seconds")

    def __init__(
        self,
        model: Model,
        latency: LatencyModel,
        step: StepSample,
        factor: float = 1.0,
        granularity: Granularity = "operator",
        check_s: float = 0.0,
    ) -> None:
        sums = np.array((1.0, *step[:7]))
        piece = latency.pieces[int((latency.pieces @ sums).argmax())]
        parts = piece * sums
        whole_s = float(parts.sum()) * factor
        self._layers = model.layers
        shares = [0.0]
        if granularity == "operator":
            context = parts[PREFILL_SQUARE] + parts[PREFILL_CROSS] + parts[PREFILL_CONTEXT]
            attention = float(context / parts.sum())
            weights = model.qkv + model.o + model.gate_up + model.down
            linear = (1.0 - attention) / weights
            shares.append(shares[-1] + linear * model.qkv)
            shares.append(shares[-1] + attention)
            shares.append(shares[-1] + linear * model.o)
            shares.append(shares[-1] + linear * model.gate_up)
        self.checks = model.layers * CHECKS[granularity]
        self.seconds = whole_s + self.checks * check_s
        self._layer_s = self.seconds / model.layers
        self._starts = [share * self._layer_s for share in shares]

    def next_check_s(self, done_s: float) -> float:
        """When the next check is reached, of a pass that is ``done_s`` into its work: the time of
        the check, also from the start, or ``seconds`` where none is left."""
        if not self.checks:
            return self.seconds
        layer = min(int(done_s / self._layer_s), self._layers - 1)
        place = bisect_left(self._starts, done_s - layer * self._layer_s)
        if place < len(self._starts):
            return max(done_s, layer * self._layer_s + self._starts[place])
        if layer + 1 == self._layers:
            return self.seconds
        return max(done_s, (layer + 1) * self._layer_s)

    def passed(self, done_s: float) -> float:
        """The share of its checks that it has passed, as an engine sees how far it is."""
        if not self.checks:
            return 0.0
        layer = min(int(done_s / self._layer_s), self._layers - 1)
        within = bisect_right(self._starts, done_s - layer * self._layer_s)
        return (layer * len(self._starts) + within) / self.checks
