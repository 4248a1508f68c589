"""The simulated engine without a clock: continuous batching (:mod:`sluice.simulation.rows`) with a
replica's local scheduler. Times are seconds on the caller's monotonic clock, real or virtual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from sluice.replica.config import SimulatedEngineConfig
from sluice.replica.scheduler.local_scheduler import LocalScheduler, StepInFlight, TrackedRequest
from sluice.replica.scheduler.state_table import NO_SLOT, ChangedRows, StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.scheduling.batching import BatchBudget, make_policy
from sluice.scheduling.request.kernels import COMPUTED, EMITTED, EXPECTED, PENDING, Floats
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, begin_stage
from sluice.simulation.rows import LIVE, OUTGROWN, PRIVATE, TARGET, Rows


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """One sequence. ``prefill_only``: it ends with its prompt, and is not used to predict output
    lengths. ``emitted``: tokens so far. ``live``: not finished or aborted."""

    key: int
    engine_id: str
    tracked: TrackedRequest
    output_tokens: int
    owner: Any
    choice: int
    prefill_only: bool
    emitted: int = 0
    live: bool = True


class Transfer(NamedTuple):
    """A KV transfer from another engine in progress: start and end, monotonic seconds."""

    asked_s: float
    ready_s: float


class SimulatedStep(NamedTuple):
    """A batch in progress: its duration and content."""

    seconds: float
    ran: list[tuple[SimulatedSequence, int]]
    preempted: list[SimulatedSequence]
    in_flight: StepInFlight


class SimulatedCore:
    """Queue, KV blocks and batches of a simulated engine. Not thread-safe.

    At most one step is in flight: ``begin``, then ``complete``; submit and abort at any time. A
    step costs ``O(live requests)`` besides the plan; nothing costs per prompt token."""

    def __init__(
        self, config: SimulatedEngineConfig, scheduler: LocalScheduler, table: StateTable
    ) -> None:
        self.live: dict[int, SimulatedSequence] = {}
        self.rows = Rows(config.kv_blocks, config.block_tokens, config.max_sequences)
        # Sequences whose KV is being transferred, by key, and the rows that they will have.
        self._awaited: dict[int, tuple[Transfer, SimulatedSequence, Floats]] = {}
        self.max_model_tokens = min(config.max_model_tokens, config.kv_blocks * config.block_tokens)
        self._config = config
        self._scheduler = scheduler
        self._table = table
        self._slos: dict[int, SLO] = {}
        self._keys = count()
        self._stepping = False
        # Before the first step, or no request could ever run here, as it would seem.
        table.write(free_kv_blocks=config.kv_blocks, total_kv_blocks=config.kv_blocks)

    def submit(
        self,
        args: RequestArgs,
        key: int,
        prompt_tokens: int,
        output_tokens: int,
        owner: Any = None,
        choice: int = 0,
        transfer: Transfer | None = None,
        prefill_only: bool = False,
        cached_tokens: int = 0,
    ) -> SimulatedSequence:
        """Queue a sequence; with a ``transfer`` the KV of its prompt comes from another engine.
        Raises ValueError: it could never run."""
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a sequence needs at least one prompt token and one output token")
        if prompt_tokens + output_tokens > self.max_model_tokens:
            raise ValueError(
                f"{prompt_tokens} prompt and {output_tokens} output tokens are more than "
                f"the {self.max_model_tokens} tokens of the model"
            )
        own = next(self._keys)
        # Outputs always have their full length here.
        tracked = self._scheduler.track(str(own), args, key, prompt_tokens, output_tokens)
        sequence = SimulatedSequence(
            own, str(own), tracked, output_tokens, owner, choice, prefill_only
        )
        row = np.array(tracked.row(prompt_tokens))
        self._slos[own] = tracked.slo
        # The last token is always computed here, for the next token.
        computed = min(cached_tokens, prompt_tokens - 1) if transfer is None else prompt_tokens - 1
        row[COMPUTED], row[PENDING] = computed, prompt_tokens - computed
        tracked.cached_tokens = computed
        if transfer is None:
            self._enter(sequence, row)
        else:
            self._awaited[own] = transfer, sequence, row
            self._scheduler.publish(ChangedRows(np.array([tracked.slot]), row[None]))
        return sequence

    def _enter(self, sequence: SimulatedSequence, row: Floats) -> None:
        private = np.zeros(PRIVATE, np.int64)
        private[TARGET] = sequence.output_tokens
        self.live[sequence.key] = sequence
        self.rows.append(sequence.key, row, private)

    def computed_tokens(self, sequence: SimulatedSequence) -> int:
        """Tokens whose KV a live sequence has."""
        rows = self.rows
        (places,) = np.nonzero(rows.keys[: rows.live] == sequence.key)
        return int(rows.table[places[0], COMPUTED]) if len(places) else 0

    @property
    def queued(self) -> int:
        """Sequences that have not ended."""
        return len(self.live) + len(self._awaited)

    def next_arrival_s(self) -> float | None:
        """When the next KV transfer from another engine ends; ``None``: none is in progress."""
        return min((transfer.ready_s for transfer, _, _ in self._awaited.values()), default=None)

    def abort(self, sequence: SimulatedSequence, now_s: float) -> None:
        """Drop a sequence and free its blocks. A sequence that has ended is ignored."""
        if not sequence.live:
            return
        if self._awaited.pop(sequence.key, None) is None:
            self.rows.drop(sequence.key)
        self._end(sequence)
        if not self._stepping:
            # No step will end soon to publish the shorter queue.
            self._table.write(
                updated_s=now_s,
                waiting=self.queued - self.rows.sequences,
                running=self.rows.sequences,
                free_kv_blocks=self.rows.free_blocks,
                total_kv_blocks=self._config.kv_blocks,
            )

    def _admit_arrived(self, now_s: float) -> None:
        arrived = [each for each in self._awaited.values() if each[0].ready_s <= now_s]
        for transfer, sequence, row in arrived:
            del self._awaited[sequence.key]
            self._enter(sequence, row)
            moved = int(row[COMPUTED])
            self._scheduler.kv_arrived(sequence.engine_id, transfer.asked_s, now_s, moved, 0)

    def begin(self, now_s: float) -> SimulatedStep | None:
        """Start the next batch, if a request could run. Raises RuntimeError: an engine fault."""
        if self._awaited:
            self._admit_arrived(now_s)
        if not self.live:
            return None
        config, rows, sequences = self._config, self.rows, self.live

        # Plan, and have the rows carry it out.
        queue, budget = self._queue()
        plan = self._scheduler.plan(queue, now_s, budget)
        self._scheduler.count_evictions(plan)
        runs = rows.begin(plan)
        lost: list[int] = rows.keys[rows.victims].tolist()
        if not runs:
            # A policy that plans nothing must not stop the engine: run requests in order, as stock
            # vLLM would. This counts as a plan mismatch.
            queue, budget = self._queue()
            plan_in_order = make_policy("fcfs").plan
            if not rows.begin(plan_in_order(queue, now_s, self._scheduler.model, budget)):
                raise RuntimeError(f"no batch could be made of {len(sequences)} live requests")
            lost += rows.keys[rows.victims].tolist()
        preempted = [sequences[key] for key in lost] if lost else []

        # What runs, as the local scheduler and as the engine know it.
        places, tokens = rows.ran.T
        keys, computed = rows.keys[places].tolist(), rows.table[places, COMPUTED].tolist()
        ran: list[tuple[SimulatedSequence, int]] = []
        by_id: list[tuple[str, int, int]] = []
        for key, new, before in zip(keys, tokens.tolist(), computed, strict=True):
            sequence = sequences[key]
            ran.append((sequence, new))
            by_id.append((sequence.engine_id, new, int(before)))
        lost_ids = [sequence.engine_id for sequence in preempted] if preempted else ()
        in_flight = self._scheduler.begin_step(plan, by_id, now_s, lost_ids)
        self._stepping = True

        # How long it takes, by the ground truth.
        work = in_flight.work
        new_tokens = work.new_tokens
        seconds = (
            config.step_s
            + config.token_s * new_tokens
            + config.context_token_s * (work.prefill_context + work.decode_context + new_tokens)
            + config.quadratic_s * work.quadratic
        )
        return SimulatedStep(seconds, ran, preempted, in_flight)

    def _queue(self) -> tuple[QueueView, BatchBudget]:
        config, rows = self._config, self.rows
        live = int(rows.counters[LIVE])
        queue = QueueView.of_table(rows.keys[:live].copy(), rows.table[:live], self._slos)
        return queue, BatchBudget(
            config.max_batch_tokens, config.max_sequences, rows.free_blocks, config.block_tokens
        )

    def complete(
        self,
        step: SimulatedStep,
        now_s: float,
        emit: Callable[[SimulatedSequence], None],
    ) -> None:
        """The batch is done. ``emit`` is called for each sequence with a token, after its counts
        changed and before the state is published; ``live`` is false at its last one."""
        rows, scheduler = self.rows, self._scheduler
        outgrown = set[int]()
        for key, turn in rows.complete(now_s).tolist():
            if turn == OUTGROWN:
                outgrown.add(key)
        self._stepping = False
        keys = rows.keys[: int(rows.counters[LIVE])].tolist()
        place_of = dict(zip(keys, range(len(keys)), strict=True))

        answered: list[SimulatedSequence] = []
        changed: list[SimulatedSequence] = []
        places: list[int] = []
        for sequence, _ in step.ran:
            if not sequence.live:
                continue
            place, tracked = place_of.get(sequence.key), sequence.tracked
            emitted = sequence.output_tokens
            if place is not None:
                row = rows.table[place]
                begun = tracked.begun
                emitted = begun + int(row[EMITTED])
                if sequence.key in outgrown:
                    scheduler.prolong(tracked, emitted)
                    row[EXPECTED] = tracked.expected_tokens - begun
                new = emitted - sequence.emitted
                if tracked.stages and scheduler.follow_stages(tracked, new, now_s):
                    self._begin_stage(sequence, place, tracked.begun - begun)
                changed.append(sequence)
                places.append(place)
            if emitted > sequence.emitted:
                sequence.emitted = emitted
                if place is None:
                    self._end(sequence)
                answered.append(sequence)
        for sequence in step.preempted:
            if sequence.live:
                changed.append(sequence)
                places.append(place_of[sequence.key])

        table = rows.table[places]
        for sequence in answered:
            emit(sequence)
        # Some may have been aborted for what was emitted.
        slots = np.empty(len(changed), np.int64)
        for at, sequence in enumerate(changed):
            slots[at] = sequence.tracked.slot if sequence.live else NO_SLOT
        running = rows.sequences
        scheduler.end_step(
            step.in_flight,
            now_s,
            ChangedRows(slots, table),
            len(self.live) + len(self._awaited) - running,
            running,
            rows.free_blocks,
            self._config.kv_blocks,
        )

    def _begin_stage(self, sequence: SimulatedSequence, place: int, tokens: int) -> None:
        """A sequence is in another stage after ``tokens`` tokens of the one before."""
        tracked = sequence.tracked
        self._slos[sequence.key] = tracked.slo
        begin_stage(self.rows.table[place], tracked.slo, tracked.arrival_s, tokens)
        self.rows.private[place, TARGET] -= tokens

    def _end(self, sequence: SimulatedSequence) -> None:
        sequence.live = False
        self.live.pop(sequence.key, None)
        del self._slos[sequence.key]
        ended = sequence.emitted == sequence.output_tokens and not sequence.prefill_only
        self._scheduler.forget(sequence.engine_id, sequence.emitted if ended else None)
