"""One simulated engine that can suspend a prefill for another, or for a step of decodes, by
production's policies (``scheduling.preemption``). Tasks are a stack; the last one computes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Literal, NamedTuple

import numpy as np

from sluice.scheduling.admission import AdmissionPolicy
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.state import ROW
from sluice.scheduling.latency.model import LatencyModel, StepSample
from sluice.scheduling.preemption import (
    BATCH_TOKENS,
    CHUNK_TOKENS,
    DECODE_GAP_S,
    DEPTH,
    LEAST_TOKENS,
    SMALL_CHUNK_TOKENS,
    Batch,
    DecodeTurns,
    InFlight,
    Options,
    Prefill,
    decide,
    decode_step_due_s,
)
from sluice.scheduling.request.job import Tier
from sluice.scheduling.request.kernels import (
    BEST_EFFORT,
    COMPUTED,
    FIELDS,
    KV_BLOCKS,
    PENDING,
    PREFILL_CONTEXT,
    PREFILL_CROSS,
    PREFILL_SQUARE,
    RUNNING,
    TPOT,
    TTFT,
    Floats,
)
from sluice.scheduling.routing import RouteQuery
from sluice.scheduling.routing import make_policy as make_routing
from sluice.simulation.config import ClusterConfig
from sluice.simulation.engine import Noise, Truth
from sluice.simulation.mirror import Sent, VirtualMirror
from sluice.simulation.requests import Requests
from sluice.simulation.run import HEADROOM
from sluice.simulation.workload import Workload

Granularity = Literal["off", "layer", "operator"]
"""Where a pass can be left: not at all, before a layer, or before an operator."""

CHECKS: dict[Granularity, int] = {"off": 0, "layer": 1, "operator": 5}
"""How many places a layer has where it can be left."""


class Model(NamedTuple):
    """A decoder's operators per layer (FlowPrefill §5.1), with weights of the linear ones in any
    unit."""

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
"""With the router's gate and 8 experts a token for ``gate_up_proj``, ``down_proj`` (§6.5)."""


class Pass:
    """One forward pass of ``seconds``. Layers take the same time; in one, attention has the part
    that depends on the context, and the linear operators the rest, by their weights. A check of
    ``check_s`` stands before each place where the pass can be left."""

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
        """When the next check is reached from ``done_s`` of its work, or ``seconds``."""
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


WHOLE = 1 << 30
"""A chunk that no prompt fills."""

BLOCK_TOKENS = 16

Foresight = Literal["slack", "deadline", "none"]
"""Late by deadline less predicted time (S-EDF), by deadline (D-EDF), never (EDF); §6.3."""


@dataclass(frozen=True, slots=True)
class SuspensionConfig:
    """Where prefills stop, and at which cost (measured on a CPU). ``depth`` None: no limit.
    ``switch_s``: idle time of a suspension and resumption."""

    granularity: Granularity = "operator"
    depth: int | None = DEPTH
    chunk_tokens: int = CHUNK_TOKENS
    small_chunk_tokens: int = SMALL_CHUNK_TOKENS
    batch_tokens: int = BATCH_TOKENS
    least_tokens: int = LEAST_TOKENS
    foresight: Foresight = "slack"
    switch_s: float = 0.0013
    decode_gap_s: float = DECODE_GAP_S
    check_s: float = 3.2e-7

    @property
    def options(self) -> Options:
        """As the policy takes them."""
        most = max(self.chunk_tokens, self.batch_tokens)
        return Options(self.chunk_tokens, self.small_chunk_tokens, self.batch_tokens, most)


@dataclass(slots=True)
class Counts:
    """What a run did. ``blocked_s``: per stop request, time until the task stopped or ended.
    ``deepest``, ``suspended_tokens``, ``held_tokens`` (with KV, of begun prefills): most at a time.
    ``idle_s``: what suspensions took."""

    tasks: int = 0
    rounds: int = 0
    suspensions: int = 0
    blocked_s: list[float] = field(default_factory=list)
    deepest: int = 0
    suspended_tokens: int = 0
    held_tokens: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
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

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.batch.members)

    def progress_s(self, now_s: float) -> float:
        """How much of its pass is computed."""
        return self.done_s if self.suspended else self.done_s + max(0.0, now_s - self.runs_s)

    @property
    def ends_s(self) -> float:
        """When it will have ended, if nothing suspends it."""
        return self.runs_s + self.forward.seconds - self.done_s


@dataclass(slots=True)
class _Decode:
    """A request's tokens to come and emitted, and when the first and the last one was."""

    left: int
    tpot_s: float
    best_effort: bool
    emitted: int = 0
    first_s: float = nan
    last_s: float = -inf


class PreemptiveEngine:
    """Runs prefills and steps of decodes, one task at a time, on the caller's clock: ``round`` once
    after all that happens at a moment. A stopped task continues to its next check. Progress is
    estimated by checks passed. KV memory is unlimited, and counted."""

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
        self._options = config.options
        self._depth = WHOLE if config.depth is None else config.depth
        self._model = model
        self._truth = truth.model
        self._believed = believed
        self._noise = Noise(truth.noise, rng)
        self._waiting: dict[str, Prefill] = {}
        self._computed: dict[str, int] = {}
        self._pending: dict[str, int] = {}
        self._due: dict[str, tuple[float, float]] = {}
        self._output: dict[str, _Decode] = {}
        self._stack: list[_Task] = []
        self._held = 0
        self._turns = DecodeTurns(model.layers * CHECKS[config.granularity])
        self._stepped = False

    @property
    def next_s(self) -> float:
        """When the next round is, unless a request arrives before; infinite for an idle engine."""
        if not self._stack:
            return inf
        top = self._stack[-1]
        return min(top.ends_s, self._decodes_due_s(top) if self._can_nest(top) else inf)

    def submit(
        self,
        key: str,
        tokens: int,
        arrival_s: float,
        ttft_s: float,
        best_effort: bool,
        output: int = 1,
        tpot_s: float = inf,
    ) -> None:
        """Queue a request of ``tokens`` that emits ``output``; infinite times: no objective."""
        self._computed[key], self._pending[key] = 0, tokens
        self._due[key] = arrival_s + ttft_s, ttft_s
        self._output[key] = _Decode(output, tpot_s, best_effort)
        self._queue(key)

    def _queue(self, key: str) -> None:
        tokens, computed = self._pending[key], self._computed[key]
        alone_s = self._foreseen(self._believed.step_s(StepSample.of([(tokens, computed)])))
        (due_s, ttft_s), best_effort = self._due[key], self._output[key].best_effort
        self._waiting[key] = Prefill(key, due_s, tokens, alone_s, best_effort, ttft_s)

    def _foreseen(self, seconds: float) -> float:
        """What lateness is judged by, of a predicted time."""
        if self._config.foresight == "slack":
            return seconds
        return 0.0 if self._config.foresight == "deadline" else -inf

    def round(self, now_s: float) -> list[tuple[str, float]]:
        """Take a task's end, and decide; returns the emitted tokens: their requests and times."""
        through: list[tuple[str, float]] = []
        top = self._stack[-1] if self._stack else None
        if top is not None and top.ends_s <= now_s:
            through += self._end()
            top = self._stack[-1] if self._stack else None
        if top is not None and not self._can_nest(top):
            return through
        in_flight = None
        if top is not None:
            left = 1.0 - top.forward.passed(top.progress_s(now_s))
            left_s = self._foreseen(top.predicted_s * left)
            in_flight = InFlight(top.batch.due_s, left_s, top.batch.best_effort)
        self.counts.rounds += 1
        due_s = self._decodes_due_s(top)
        decodes = now_s >= due_s
        batch = None if decodes else self._prefills(in_flight, now_s)
        if batch is not None and not self._stepped and not self._stops(batch):
            # It cannot be stopped for a step that comes due in it.
            decodes = now_s + self._believed.step_s(self._sample(batch)) > due_s
        if decodes:
            batch = Batch(tuple((key, 1) for key in self._decodes), now_s, False)
        if batch is None:
            if top is not None and top.suspended:
                top.suspended, top.runs_s = False, now_s
            return through
        start_s = now_s
        if top is not None and not top.suspended:
            start_s, ended = self._stop(top, now_s)
            through += ended
        self._start(batch, start_s, decodes)
        return through

    def _prefills(self, top: InFlight | None, now_s: float) -> Batch | None:
        """The next task of prefills, inside ``top`` if there is one."""
        decoding = [each for each in self._output.values() if each.left + each.emitted > 1]
        tpots_s = [each.tpot_s for each in decoding if not each.best_effort]
        most = self._turns.most_tokens(
            np.array(tpots_s),
            max(self._decode_step_s(), self._believed.fixed_s),
            self._believed,
            max((self._computed[key] for key in self._waiting), default=0),
            self._config.least_tokens,
            now_s,
            self._config.decode_gap_s if decoding else inf,
        )
        options = replace(self._options, most=min(self._options.most, most))
        full = len(self._stack) >= self._depth
        return decide(self._waiting.values(), top, now_s, self._together_s, options, full=full)

    def _stops(self, batch: Batch) -> bool:
        """Whether a task can be suspended."""
        return (
            self._config.granularity != "off"
            and sum(tokens for _, tokens in batch.members) >= self._config.least_tokens
            and len(self._stack) < self._depth
        )

    def _sample(self, batch: Batch) -> StepSample:
        return StepSample.of((tokens, self._computed[key]) for key, tokens in batch.members)

    def _timed(self, guaranteed: bool) -> list[_Decode]:
        """The decodes, or the ``guaranteed`` ones only."""
        found = map(self._output.__getitem__, self._decodes)
        return [each for each in found if not (guaranteed and each.best_effort)]

    def _decode_step_s(self) -> float:
        """Predicted time of a step of all decodes; 0 without any."""
        keys = self._decodes
        if not keys:
            return 0.0
        return self._believed.step_s(StepSample.of((1, self._computed[key]) for key in keys))

    @property
    def _decodes(self) -> list[str]:
        """The requests that have emitted a token."""
        return [key for key in self._output if key not in self._pending]

    def _decodes_due_s(self, top: _Task | None) -> float:
        """When a step of all decodes is due, inside ``top`` if there is one; infinite for none."""
        if not self._decodes:
            return inf
        if top is None and not self._waiting:
            return -inf
        timed = self._timed(top is not None and not top.batch.best_effort)
        due_s = decode_step_due_s(
            np.array([nan if each.best_effort else each.first_s for each in timed]),
            np.array([float(each.emitted) for each in timed]),
            np.array([each.last_s for each in timed]),
            np.array([each.tpot_s for each in timed]),
            self._decode_step_s(),
            self._config.decode_gap_s,
            self._turns.stop_s(top.predicted_s) if top is not None else 0.0,
        )
        return inf if due_s is None else due_s

    def _can_nest(self, top: _Task) -> bool:
        """Whether another task may run inside ``top``."""
        return top.preemptible and len(self._stack) <= self._depth

    def _stop(self, top: _Task, now_s: float) -> tuple[float, list[tuple[str, float]]]:
        """Returns when the next task can start, and the prefills complete by then."""
        done_s = top.progress_s(now_s)
        stop_s = top.forward.next_check_s(done_s)
        stopped_s = max(now_s, top.runs_s) + stop_s - done_s
        blocked_s = self.counts.blocked_s
        blocked_s.append(stopped_s - now_s)
        self._turns.stopped(blocked_s[-1], top.predicted_s)
        if stop_s >= top.forward.seconds:
            return stopped_s, self._end()
        self.counts.busy_s += stop_s - top.done_s
        self.counts.idle_s += self._config.switch_s
        self.counts.suspensions += 1
        top.done_s, top.suspended = stop_s, True
        tokens = sum(task.tokens for task in self._stack)
        self.counts.suspended_tokens = max(self.counts.suspended_tokens, tokens)
        self.counts.deepest = max(self.counts.deepest, len(self._stack))
        return stopped_s + self._config.switch_s, []

    def _start(self, batch: Batch, start_s: float, decodes: bool) -> None:
        config, members = self._config, batch.members
        tokens = sum(count for _, count in members)
        preemptible = not decodes and self._stops(batch)
        self._stepped = decodes
        step = self._sample(batch)
        forward = Pass(
            self._model,
            self._truth,
            step,
            self._noise.next(),
            config.granularity if preemptible else "off",
            config.check_s,
        )
        predicted_s = self._believed.step_s(step)
        self._stack.append(_Task(batch, forward, preemptible, predicted_s, start_s))
        for key, _ in members:
            self._waiting.pop(key, None)
        self.counts.tasks += 1
        self._held += tokens
        self.counts.held_tokens = max(self.counts.held_tokens, self._held)

    def _end(self) -> list[tuple[str, float]]:
        """The running task has ended. Returns the emitted tokens: their requests and times."""
        task = self._stack.pop()
        ends_s = task.ends_s
        self.counts.busy_s += task.forward.seconds - task.done_s
        through = []
        for key, tokens in task.batch.members:
            self._computed[key] += tokens
            if key in self._pending:
                self._pending[key] -= tokens
                if self._pending[key]:
                    self._queue(key)
                    continue
                del self._pending[key], self._due[key]
            through.append((key, ends_s))
            output = self._output[key]
            output.left, output.emitted, output.last_s = output.left - 1, output.emitted + 1, ends_s
            if output.emitted == 1:
                output.first_s = ends_s
            if not output.left:
                self._held -= self._computed.pop(key)
                del self._output[key]
        return through

    def _together_s(self, members: Sequence[Prefill]) -> float:
        sequences = ((each.tokens, self._computed[each.request_id]) for each in members)
        return self._believed.step_s(StepSample.of(sequences))

    def table(self, requests: Requests, now_s: float) -> Floats:
        """Its requests as a replica reports them, tasks in flight by the share of their checks."""
        computed = dict(self._computed)
        running = {key for task in self._stack for key, _ in task.batch.members}
        for task in self._stack:
            share = task.forward.passed(task.progress_s(now_s))
            for key, tokens in task.batch.members:
                computed[key] += int(share * tokens)
        table = np.empty((len(computed), FIELDS))
        for place, (key, tokens) in enumerate(computed.items()):
            row = table[place]
            row[:] = requests.rows[int(key)]
            whole = self._computed[key] + self._pending[key]
            row[COMPUTED], row[PENDING] = tokens, max(1, whole - tokens)
            row[RUNNING] = key in running or tokens > 0
            row[KV_BLOCKS] = -(-tokens // BLOCK_TOKENS)
        return table


REFUSED = "no replica can meet its SLO"

_REPLICA = "prefill"
_BLOCKS = 1 << 24
_NO_ROWS = np.zeros(0, ROW)


class PrefillRun(NamedTuple):
    """A run: its requests with the times of their first tokens, and what was done."""

    requests: Requests
    counts: Counts


class Gate:
    """Admits requests as the router of one replica does, by a report made at arrival. ``refuses``:
    what cannot be promised."""

    def __init__(
        self,
        admission: AdmissionPolicy,
        refuses: bool,
        requests: Requests,
        latency: LatencyModel,
        now_s: float,
    ) -> None:
        self._mirror = VirtualMirror(ClusterConfig(), make_routing("round_robin"), admission)
        self._tiers = frozenset({Tier.GUARANTEED}) if refuses else frozenset(Tier)
        self._requests = requests
        self._latency = latency
        self._given: list[int] = []
        self._mirror.register(_REPLICA, self._given, self._sent(np.empty((0, FIELDS)), 0.0), now_s)

    def _sent(self, table: Floats, now_s: float) -> Sent:
        free = _BLOCKS - int(table[:, KV_BLOCKS].sum())
        report = Report(
            _NO_ROWS,
            now_s,
            0.0,
            now_s,
            self._latency,
            free,
            _BLOCKS,
            BLOCK_TOKENS,
            _BLOCKS,
            preempts=True,
        )
        return Sent(table, report, len(self._given))

    def lets_in(self, key: int, engine: PreemptiveEngine, now_s: float) -> bool:
        """Whether a request is admitted to the engine, guaranteed or not; a refused one fails."""
        requests = self._requests
        self._mirror.receive(_REPLICA, self._sent(engine.table(requests, now_s), now_s), now_s)
        arrival = requests.arrivals[key]
        waited_s = now_s - arrival.arrival_s
        query = RouteQuery(
            key, arrival.slo, arrival.prompt_tokens, waited_s, self._tiers, output_tokens=1
        )
        placement = self._mirror.place(query, now_s)
        if placement.replica_id is None:
            requests.failures[key] = REFUSED
            return False
        self._given.append(key)
        requests.serve_as(key, placement.tier is Tier.BEST_EFFORT)
        return True


def simulate_prefills(
    workload: Workload,
    truth: Truth,
    believed: LatencyModel | None = None,
    config: SuspensionConfig | None = None,
    model: Model = LLAMA3_8B,
    seed: int = 0,
    admission: AdmissionPolicy | None = None,
    refuses: bool = False,
) -> PrefillRun:
    """Run ``workload`` through one engine until every request has its tokens or was refused.
    ``believed`` makes the decisions; default: the truth with head-room. Raises ValueError for
    ``admission`` with a request of more than one token."""
    longer = [key for key, each in enumerate(workload.arrivals) if each.output_tokens != 1]
    if longer and admission is not None:
        raise ValueError(
            f"workload {workload.name}: request {longer[0]} emits "
            f"{workload.arrivals[longer[0]].output_tokens} tokens; with an admission policy this "
            "engine only prefills, and takes requests of one"
        )
    believed = truth.model.with_headroom(HEADROOM) if believed is None else believed
    requests = Requests(workload)
    rng = np.random.default_rng(seed)
    engine = PreemptiveEngine(config or SuspensionConfig(), model, truth, believed, rng)
    gate = None
    if admission is not None:
        gate = Gate(admission, refuses, requests, believed.with_headroom(1.0), 0.0)
    engine.counts.end_s = _drive(engine, requests, gate)
    return PrefillRun(requests, engine.counts)


def _drive(engine: PreemptiveEngine, requests: Requests, gate: Gate | None) -> float:
    """Run the clock until all ``requests`` have ended; return the time."""
    arrivals = requests.arrivals
    places = requests.offsets[requests.first_stage[:-1]].copy()
    arrived, now_s = 0, 0.0
    while True:
        next_s = arrivals[arrived].arrival_s if arrived < len(arrivals) else inf
        next_s = min(next_s, engine.next_s)
        if next_s == inf:
            return now_s
        now_s = max(now_s, next_s)
        while arrived < len(arrivals) and arrivals[arrived].arrival_s <= now_s:
            if gate is None or gate.lets_in(arrived, engine, now_s):
                row = requests.rows[arrived]
                apart = bool(row[BEST_EFFORT])
                ttft_s = inf if apart else float(row[TTFT])
                arrival_s, tokens = arrivals[arrived].arrival_s, arrivals[arrived].prompt_tokens
                output, tpot_s = arrivals[arrived].output_tokens, float(row[TPOT])
                engine.submit(str(arrived), tokens, arrival_s, ttft_s, apart, output, tpot_s)
            arrived += 1
        for key, emitted_s in engine.round(now_s):
            requests.emitted_s[places[int(key)]] = emitted_s
            places[int(key)] += 1
