"""One simulated engine that can suspend a prefill for another, or for a step of decodes, by
production's policies (``scheduling.preemption``). Tasks are a stack; the last one computes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, nan
from typing import Literal, NamedTuple

import numpy as np

from sluice.scheduling.latency.model import UNBOUNDED_TOKENS, LatencyModel, StepSample
from sluice.scheduling.preemption import (
    DECODE_GAP_S,
    Batch,
    DecodeTurns,
    InFlight,
    Prefill,
    TaskBounds,
    decide,
    decode_step_due_s,
)
from sluice.scheduling.request.kernels import (
    PREFILL_CONTEXT,
    PREFILL_CROSS,
    PREFILL_SQUARE,
    TPOT,
    TTFT,
)
from sluice.simulation.engine import Noise, Truth
from sluice.simulation.requests import Requests
from sluice.simulation.run import HEADROOM
from sluice.simulation.workload import Arrival, Workload

Granularity = Literal["off", "layer", "operator"]
"""Where a pass can be left: not at all, before a layer, or before an operator."""

CHECKS: dict[Granularity, int] = {"off": 0, "layer": 1, "operator": 5}
"""How many places a layer has where it can be left."""


class Model(NamedTuple):
    """A decoder's layers, and the weights of their linear operators (FlowPrefill §5.1: QKV, O, gate
    and up, down) in any unit."""

    layers: int
    weights: tuple[float, float, float, float]

    @classmethod
    def of_sizes(cls, layers: int, hidden: int, key_value: int, inner: int) -> Model:
        """From a model's ``hidden`` size, its width of keys (``key_value``) and of the MLP."""
        qkv, up = hidden * (hidden + 2 * key_value), 2 * hidden * inner
        return cls(layers, (qkv, hidden * hidden, up, hidden * inner))


LLAMA3_8B = Model.of_sizes(32, 4_096, 1_024, 14_336)
LLAMA3_70B = Model.of_sizes(80, 8_192, 1_024, 28_672)
QWEN3_30B_A3B = Model(48, (2_048 * 5_120, 4_096 * 2_048, 2_048 * 128, 8 * 3 * 2_048 * 768))
"""With the router's gate and 8 experts a token for ``gate_up_proj``, ``down_proj`` (§6.5)."""


class Pass:
    """One forward pass of ``seconds``. Layers take the same time; in one, attention has the part
    that depends on the context, and the linear operators the rest, by their weights. A check of
    ``check_s`` stands before each place where the pass can be left."""

    __slots__ = ("_places_s", "seconds")

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
        shares = [] if granularity == "off" else [0.0]
        if granularity == "operator":
            context = parts[PREFILL_SQUARE] + parts[PREFILL_CROSS] + parts[PREFILL_CONTEXT]
            attention = float(context / parts.sum())
            linear = (1.0 - attention) / sum(model.weights)
            qkv, o, gate_up, _ = (linear * weight for weight in model.weights)
            shares = list(accumulate((0.0, qkv, attention, o, gate_up)))
        self.seconds = float(parts.sum()) * factor + model.layers * len(shares) * check_s
        layer_s = self.seconds / model.layers
        self._places_s = [
            layer * layer_s + share * layer_s for layer in range(model.layers) for share in shares
        ]

    @property
    def checks(self) -> int:
        """How many it has."""
        return len(self._places_s)

    def next_check_s(self, done_s: float) -> float:
        """When the next check is reached from ``done_s`` of its work, or ``seconds``."""
        place = bisect_left(self._places_s, done_s)
        return self._places_s[place] if place < self.checks else self.seconds

    def passed(self, done_s: float) -> float:
        """The share of its checks that it has passed, as an engine sees how far it is."""
        return bisect_right(self._places_s, done_s) / max(1, self.checks)


WHOLE = UNBOUNDED_TOKENS
"""A chunk that no prompt fills, and a stack that is never full."""

Foresight = Literal["slack", "deadline", "none"]
"""Late by deadline less predicted time (S-EDF), by deadline (D-EDF), never (EDF); §6.3."""


@dataclass(frozen=True, slots=True)
class SuspensionConfig(TaskBounds):
    """Where prefills stop, and at which cost (measured on a CPU). ``switch_s``: idle time of a
    suspension and resumption."""

    granularity: Granularity = "operator"
    foresight: Foresight = "slack"
    switch_s: float = 0.0013
    check_s: float = 3.2e-7


@dataclass(slots=True)
class Counts:
    """What a run did. ``blocked_s``: per stop request, time until the task stopped or ended.
    ``deepest``, ``suspended_tokens``: most at a time. ``busy_s``: computing."""

    tasks: int = 0
    rounds: int = 0
    suspensions: int = 0
    blocked_s: list[float] = field(default_factory=list)
    deepest: int = 0
    suspended_tokens: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0


@dataclass(slots=True)
class _Task:
    """A batch in flight; ``done_s`` of its pass are computed, and it runs again from ``runs_s``."""

    batch: Batch
    forward: Pass
    preemptible: bool
    predicted_s: float
    runs_s: float
    done_s: float = 0.0
    suspended: bool = False

    def progress_s(self, now_s: float) -> float:
        """How much of its pass is computed."""
        return self.done_s if self.suspended else self.done_s + max(0.0, now_s - self.runs_s)

    @property
    def ends_s(self) -> float:
        """When it will have ended, if nothing suspends it."""
        return self.runs_s + self.forward.seconds - self.done_s


@dataclass(slots=True)
class _Request:
    """A live request: ``pending`` tokens of its prompt, ``left`` ones to emit, and when it emitted
    the first and the last one. Infinite times: no objective."""

    due_s: float
    ttft_s: float
    tpot_s: float
    pending: int
    left: int
    computed: int = 0
    emitted: int = 0
    first_s: float = nan
    last_s: float = -inf


class PreemptiveEngine:
    """Runs prefills and steps of decodes, one task at a time, on the caller's clock: ``round`` once
    after all that happens at a moment. A stopped task continues to its next check. Progress is
    estimated by checks passed. KV memory is unlimited."""

    def __init__(
        self,
        config: SuspensionConfig,
        model: Model,
        truth: Truth,
        believed: LatencyModel,
        rng: np.random.Generator,
    ) -> None:
        self.counts = Counts()
        self._config = config
        self._model = model
        self._truth = truth.model
        self._believed = believed
        self._noise = Noise(truth.noise, rng)
        self._live: dict[str, _Request] = {}
        self._waiting: dict[str, Prefill] = {}
        self._stack: list[_Task] = []
        self._turns = DecodeTurns(model.layers * CHECKS[config.granularity])
        self._stepped = False

    @property
    def next_s(self) -> float:
        """When the next round is, unless a request arrives before; infinite for an idle engine."""
        if not self._stack:
            return inf
        top = self._stack[-1]
        return min(top.ends_s, self._decodes_due_s(top) if self._can_nest(top) else inf)

    def submit(self, key: str, arrival: Arrival, ttft_s: float, tpot_s: float) -> None:
        """Queue a request."""
        due_s, tokens = arrival.arrival_s + ttft_s, arrival.prompt_tokens
        self._live[key] = _Request(due_s, ttft_s, tpot_s, tokens, arrival.output_tokens)
        self._queue(key)

    def _queue(self, key: str) -> None:
        each = self._live[key]
        alone_s = self._believed.step_s(StepSample.of([(each.pending, each.computed)]))
        self._waiting[key] = Prefill(
            key, each.due_s, each.pending, self._foreseen(alone_s), ttft_s=each.ttft_s
        )

    def _foreseen(self, seconds: float) -> float:
        """What lateness is judged by, of a predicted time."""
        if self._config.foresight == "slack":
            return seconds
        return 0.0 if self._config.foresight == "deadline" else -inf

    def round(self, now_s: float) -> list[tuple[str, float]]:
        """Take a task's end, and decide; returns the emitted tokens: their requests and times."""
        emitted: list[tuple[str, float]] = []
        top = self._stack[-1] if self._stack else None
        if top is not None and top.ends_s <= now_s:
            emitted += self._end()
            top = self._stack[-1] if self._stack else None
        if top is not None and not self._can_nest(top):
            return emitted
        self.counts.rounds += 1
        due_s = self._decodes_due_s(top)
        decodes = now_s >= due_s
        batch = None if decodes else self._prefills(top, now_s)
        if batch is not None and not self._stepped and not self._stops(batch):
            # It cannot be stopped for a step that comes due in it.
            decodes = now_s + self._believed.step_s(self._sample(batch)) > due_s
        if decodes:
            batch = Batch(tuple((key, 1) for key in self._decodes()), now_s, False)
        if batch is None:
            if top is not None and top.suspended:
                top.suspended, top.runs_s = False, now_s
            return emitted
        start_s = now_s
        if top is not None and not top.suspended:
            start_s, ended = self._stop(top, now_s)
            emitted += ended
        self._start(batch, start_s, decodes)
        return emitted

    def _prefills(self, top: _Task | None, now_s: float) -> Batch | None:
        """The next task of prefills, inside ``top`` if there is one."""
        in_flight = None
        if top is not None:
            left = 1.0 - top.forward.passed(top.progress_s(now_s))
            in_flight = InFlight(top.batch.due_s, self._foreseen(top.predicted_s * left))
        tpots_s = [each.tpot_s for each in self._live.values() if each.left + each.emitted > 1]
        max_tokens = self._turns.max_tokens(
            np.array(tpots_s),
            max(self._step_s(self._decodes()), self._believed.fixed_s),
            self._believed,
            max((self._live[key].computed for key in self._waiting), default=0),
            self._config.min_tokens,
            now_s,
            DECODE_GAP_S if tpots_s else inf,
        )
        full = len(self._stack) >= self._config.depth
        waiting = self._waiting.values()
        return decide(waiting, in_flight, now_s, self._together_s, self._config, max_tokens, full)

    def _stops(self, batch: Batch) -> bool:
        """Whether a task can be suspended."""
        return (
            self._config.granularity != "off"
            and sum(tokens for _, tokens in batch.members) >= self._config.min_tokens
            and len(self._stack) < self._config.depth
        )

    def _sample(self, batch: Batch) -> StepSample:
        return StepSample.of((tokens, self._live[key].computed) for key, tokens in batch.members)

    def _together_s(self, members: Sequence[Prefill]) -> float:
        sequences = ((each.tokens, self._live[each.request_id].computed) for each in members)
        return self._believed.step_s(StepSample.of(sequences))

    def _decodes(self) -> dict[str, _Request]:
        """The requests that have emitted a token."""
        return {key: each for key, each in self._live.items() if not each.pending}

    def _step_s(self, decodes: dict[str, _Request]) -> float:
        """Predicted time of a step of ``decodes``; 0 without any."""
        if not decodes:
            return 0.0
        return self._believed.step_s(StepSample.of((1, d.computed) for d in decodes.values()))

    def _decodes_due_s(self, top: _Task | None) -> float:
        """When a step of all decodes is due, inside ``top`` if there is one; infinite for none."""
        decodes = self._decodes()
        if not decodes:
            return inf
        if top is None and not self._waiting:
            return -inf
        due_s = decode_step_due_s(
            np.array([each.first_s for each in decodes.values()]),
            np.array([float(each.emitted) for each in decodes.values()]),
            np.array([each.last_s for each in decodes.values()]),
            np.array([each.tpot_s for each in decodes.values()]),
            self._step_s(decodes),
            DECODE_GAP_S,
            self._turns.stop_s(top.predicted_s) if top is not None else 0.0,
        )
        return inf if due_s is None else due_s

    def _can_nest(self, top: _Task) -> bool:
        """Whether another task may run inside ``top``."""
        return top.preemptible and len(self._stack) <= self._config.depth

    def _stop(self, top: _Task, now_s: float) -> tuple[float, list[tuple[str, float]]]:
        """Returns when the next task can start, and what is emitted by then."""
        counts = self.counts
        done_s = top.progress_s(now_s)
        stop_s = top.forward.next_check_s(done_s)
        stopped_s = max(now_s, top.runs_s) + stop_s - done_s
        counts.blocked_s.append(stopped_s - now_s)
        self._turns.stopped(stopped_s - now_s, top.predicted_s)
        if stop_s >= top.forward.seconds:
            return stopped_s, self._end()
        counts.busy_s += stop_s - top.done_s
        counts.suspensions += 1
        top.done_s, top.suspended = stop_s, True
        tokens = sum(tokens for task in self._stack for _, tokens in task.batch.members)
        counts.suspended_tokens = max(counts.suspended_tokens, tokens)
        counts.deepest = max(counts.deepest, len(self._stack))
        return stopped_s + self._config.switch_s, []

    def _start(self, batch: Batch, start_s: float, decodes: bool) -> None:
        preemptible = not decodes and self._stops(batch)
        self._stepped = decodes
        step = self._sample(batch)
        forward = Pass(
            self._model,
            self._truth,
            step,
            self._noise.next(),
            self._config.granularity if preemptible else "off",
            self._config.check_s,
        )
        predicted_s = self._believed.step_s(step)
        self._stack.append(_Task(batch, forward, preemptible, predicted_s, start_s))
        for key, _ in batch.members:
            self._waiting.pop(key, None)
        self.counts.tasks += 1

    def _end(self) -> list[tuple[str, float]]:
        """The running task has ended. Returns the emitted tokens: their requests and times."""
        task = self._stack.pop()
        ends_s = task.ends_s
        self.counts.busy_s += task.forward.seconds - task.done_s
        emitted = []
        for key, tokens in task.batch.members:
            each = self._live[key]
            each.computed += tokens
            each.pending = max(0, each.pending - tokens)
            if each.pending:
                self._queue(key)
                continue
            emitted.append((key, ends_s))
            each.left, each.emitted, each.last_s = each.left - 1, each.emitted + 1, ends_s
            if each.emitted == 1:
                each.first_s = ends_s
            if not each.left:
                del self._live[key]
        return emitted


class PrefillRun(NamedTuple):
    """A run: its requests with the times of their first tokens, and what was done."""

    requests: Requests
    counts: Counts


def simulate_prefills(
    workload: Workload,
    truth: Truth,
    believed: LatencyModel | None = None,
    config: SuspensionConfig | None = None,
    model: Model = LLAMA3_8B,
    seed: int = 0,
) -> PrefillRun:
    """Run ``workload`` through one engine until every request has its tokens. ``believed`` makes
    the decisions; default: the truth with headroom."""
    believed = truth.model.with_headroom(HEADROOM) if believed is None else believed
    requests = Requests(workload)
    if requests.followers:
        raise ValueError(f"workload {workload.name} has loops: simulate it on a cluster")
    rng = np.random.default_rng(seed)
    engine = PreemptiveEngine(config or SuspensionConfig(), model, truth, believed, rng)
    places = requests.offsets[requests.first_stage[:-1]].copy()
    arrivals = deque(enumerate(workload.arrivals))
    now_s = 0.0
    while (next_s := min(arrivals[0][1].arrival_s if arrivals else inf, engine.next_s)) < inf:
        now_s = max(now_s, next_s)
        while arrivals and arrivals[0][1].arrival_s <= now_s:
            key, arrival = arrivals.popleft()
            engine.submit(str(key), arrival, *requests.rows[key, [TTFT, TPOT]].tolist())
        for key, emitted_s in ((int(name), when) for name, when in engine.round(now_s)):
            requests.emitted_s[places[key]] = emitted_s
            places[key] += 1
    engine.counts.end_s = now_s
    return PrefillRun(requests, engine.counts)
