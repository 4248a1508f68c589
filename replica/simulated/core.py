"""The simulated engine without a clock of its own: the simulator's continuous batching
(:mod:`sluice.simulation.rows`) with a replica's local scheduler, one step at a time.

The caller says when a step begins and when it ended, so the same code runs in real time and in
virtual time. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from sluice.replica.config import SimulatedEngineConfig
from sluice.replica.scheduler.local_scheduler import LocalScheduler, StepInFlight, TrackedRequest
from sluice.replica.scheduler.state_table import NO_SLOT, ChangedRows, StateTable
from sluice.scheduling.batching import BatchBudget, BatchPlan, make_policy
from sluice.scheduling.request.kernels import (
    COMPUTED,
    EMITTED,
    EXPECTED,
    PENDING,
    PROMISED,
    Floats,
    Ints,
)
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, begin_stage, row_of
from sluice.simulation.rows import OUTGROWN, PRIVATE, TARGET, Rows


class SimulatedSequence:
    """One sequence: a prompt, and the number of tokens that it will produce.

    ``owner`` and ``choice`` belong to the submitter and are not used here. ``emitted`` counts its
    tokens so far. ``live`` ends when it has produced ``output_tokens`` or was aborted.
    ``prefill_only``: it ends with its prompt, and is not used to predict output lengths.
    """

    __slots__ = (
        "choice",
        "emitted",
        "key",
        "live",
        "output_tokens",
        "owner",
        "prefill_only",
        "tracked",
    )

    def __init__(
        self,
        key: int,
        tracked: TrackedRequest,
        output_tokens: int,
        owner: Any,
        choice: int,
        prefill_only: bool = False,
    ) -> None:
        self.key = key
        self.tracked = tracked
        self.output_tokens = output_tokens
        self.owner = owner
        self.choice = choice
        self.prefill_only = prefill_only
        self.emitted = 0
        self.live = True

    @property
    def engine_id(self) -> str:
        """Its id in the engine, as plans name it."""
        return str(self.key)


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


def drift(config: SimulatedEngineConfig, now_s: float) -> float:
    """Factor on the time of a step that begins at ``now_s``. All engines of a machine share its
    monotonic clock, so they drift together."""
    phase = now_s / config.drift_period_s % 1.0
    return 1.0 + (config.drift - 1.0) * (1.0 - abs(2.0 * phase - 1.0))


class SimulatedCore:
    """Queue, KV blocks and batches of a simulated engine: :class:`~sluice.simulation.rows.Rows`
    with a local scheduler and a state table.

    At most one step is in flight: :meth:`begin`, then :meth:`complete`. Requests may be submitted
    and aborted at any time, also in between. Not thread-safe.

    A step costs ``O(live requests)`` besides the policy's plan; nothing costs per prompt token.
    """

    def __init__(
        self, config: SimulatedEngineConfig, scheduler: LocalScheduler, table: StateTable
    ) -> None:
        self.live: dict[int, SimulatedSequence] = {}
        """Sequences that could run, by key."""
        self.rows = Rows(config.kv_blocks, config.block_tokens, config.max_sequences)
        """The rows of :attr:`live`."""
        # Sequences whose KV is being transferred, by key, and the rows that they will have.
        self._awaited: dict[int, tuple[Transfer, SimulatedSequence, Floats]] = {}
        self.max_model_tokens = min(config.max_model_tokens, config.kv_blocks * config.block_tokens)
        self._config = config
        self._scheduler = scheduler
        self._table = table
        self._slos: dict[int, SLO] = {}
        self._keys = count()
        self._fallback = make_policy("fcfs")
        self._stepping = False
        table.idle(config.kv_blocks, config.kv_blocks)

    def submit(
        self,
        name: str,
        key: int,
        slo: SLO,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        owner: Any = None,
        choice: int = 0,
        best_effort: bool = False,
        transfer: Transfer | None = None,
        prefill_only: bool = False,
        tenant: int = 0,
        weight: float = 1.0,
        promised: bool = False,
        cached_tokens: int = 0,
    ) -> SimulatedSequence:
        """Queue a sequence. With a ``transfer`` the KV of its prompt comes from another engine; an
        earlier sequence has left that of ``cached_tokens`` here. Its blocks are allocated when it
        begins to run.

        Raises:
            ValueError: the sequence could never run: no prompt, no output, or longer than the model
                allows.
        """
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a sequence needs at least one prompt token and one output token")
        if prompt_tokens + output_tokens > self.max_model_tokens:
            raise ValueError(
                f"{prompt_tokens} prompt and {output_tokens} output tokens are more than "
                f"the {self.max_model_tokens} tokens of the model"
            )
        own = next(self._keys)
        # Outputs always have their max length here.
        self._scheduler.track(
            str(own),
            name,
            key,
            slo,
            arrival_s,
            prompt_tokens,
            output_tokens,
            best_effort,
            tenant,
            weight,
            promised,
        )
        tracked = self._scheduler.requests[str(own)]
        sequence = SimulatedSequence(own, tracked, output_tokens, owner, choice, prefill_only)
        slo, expected = tracked.slo, tracked.expected_tokens
        row = np.array(row_of(slo, arrival_s, prompt_tokens, expected, best_effort, tenant, weight))
        row[PROMISED] = promised
        self._slos[own] = slo
        # The last token is always computed here, for the next token.
        computed = min(cached_tokens, prompt_tokens - 1) if transfer is None else prompt_tokens - 1
        row[COMPUTED], row[PENDING] = computed, prompt_tokens - computed
        if transfer is None:
            self._enter(sequence, row)
        else:
            self._awaited[own] = transfer, sequence, row
            self._scheduler.update(ChangedRows(np.array([tracked.slot]), row[None]))
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
            self._scheduler.transfers.arrived(now_s - transfer.asked_s, int(row[COMPUTED]), 0)

    def begin(self, now_s: float) -> SimulatedStep | None:
        """Plan and start the next batch; ``None`` if no request could run.

        Raises:
            RuntimeError: nothing could run although requests are live: a fault in the engine.
        """
        self._admit_arrived(now_s)
        if not self.live:
            return None
        plan = self._scheduler.plan(self._queue(), now_s, self._budget())
        self._scheduler.count_evictions(plan)
        preempted = self._start(plan)
        if not self.rows.ran_count:
            # A policy that plans nothing must not stop the engine: run requests in order, as stock
            # vLLM would. This counts as a plan mismatch.
            model = self._scheduler.model
            preempted += self._start(
                self._fallback.plan(self._queue(), now_s, model, self._budget())
            )
        if not self.rows.ran_count:
            raise RuntimeError(f"no batch could be made of {len(self.live)} live requests")
        rows, tokens = self.rows.ran.T
        ran = list(zip(self._sequences(rows), tokens.tolist(), strict=True))
        computed = self.rows.table[rows, COMPUTED].astype(np.int64).tolist()
        in_flight = self._scheduler.begin_step(
            plan,
            [
                (sequence.engine_id, new, before)
                for (sequence, new), before in zip(ran, computed, strict=True)
            ],
            now_s,
            [sequence.engine_id for sequence in preempted],
        )
        self._stepping = True
        config, work = self._config, in_flight.work
        seconds = (
            config.step_s
            + config.token_s * work.new_tokens
            + config.context_token_s * work.context_tokens
            + config.quadratic_s * work.quadratic
        )
        return SimulatedStep(seconds * drift(config, now_s), ran, preempted, in_flight)

    def _queue(self) -> QueueView:
        live = self.rows.live
        return QueueView.of_table(self.rows.keys[:live].copy(), self.rows.table[:live], self._slos)

    def _budget(self) -> BatchBudget:
        config = self._config
        return BatchBudget(
            config.max_batch_tokens,
            config.max_sequences,
            self.rows.free_blocks,
            config.block_tokens,
        )

    def _start(self, plan: BatchPlan) -> list[SimulatedSequence]:
        """Carry a plan out; return the sequences that lost their KV."""
        self.rows.begin(plan)
        return self._sequences(self.rows.victims)

    def _sequences(self, rows: Ints) -> list[SimulatedSequence]:
        return [self.live[key] for key in self.rows.keys[rows].tolist()]

    def complete(
        self,
        step: SimulatedStep,
        now_s: float,
        emit: Callable[[SimulatedSequence], None],
    ) -> None:
        """The batch is done: count its tokens, end finished sequences, publish the state.

        ``emit`` is called for each sequence that produced a token, after its counts changed and
        before the state is published; ``live`` is then false if it was the sequence's last token.
        """
        rows = self.rows
        outgrown = {key for key, turn in rows.complete(now_s).tolist() if turn == OUTGROWN}
        self._stepping = False
        keys = rows.keys[: rows.live].tolist()
        place_of = {key: place for place, key in enumerate(keys)}
        answered: list[SimulatedSequence] = []
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
                    self._scheduler.prolong(tracked, emitted)
                    row[EXPECTED] = tracked.expected_tokens - begun
                new = emitted - sequence.emitted
                if tracked.stages and self._scheduler.follow_stages(tracked, new, now_s):
                    self._begin_stage(sequence, place, tracked.begun - begun)
            if emitted > sequence.emitted:
                sequence.emitted = emitted
                if place is None:
                    self._end(sequence)
                answered.append(sequence)
        changed = [sequence for sequence, _ in step.ran] + step.preempted
        changed = [sequence for sequence in changed if sequence.live]
        table = rows.table[[place_of[sequence.key] for sequence in changed]]
        for sequence in answered:
            emit(sequence)
        # Some may have been aborted for what was emitted.
        slots = [sequence.tracked.slot if sequence.live else NO_SLOT for sequence in changed]
        self._scheduler.end_step(
            step.in_flight,
            now_s,
            ChangedRows(np.array(slots, np.int64), table),
            self.queued - rows.sequences,
            rows.sequences,
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
