"""The simulated engine without a clock of its own: continuous batching, chunked prefill and paged
KV with preemption by recompute, one step at a time.

The caller says when a step begins and when it ended, so the same code runs in real time and in
virtual time. Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from sluice.replica.config import SimulatedEngineConfig
from sluice.replica.scheduler.local_scheduler import LocalScheduler, StepInFlight, TrackedRequest
from sluice.replica.scheduler.state_table import RowUpdate, StateTable
from sluice.scheduling.batching import BatchBudget, BatchPlan, make_policy
from sluice.scheduling.objective import SLO
from sluice.scheduling.request import QueueView, RequestView


class SimulatedSequence:
    """One sequence: a prompt, and the number of tokens that it will produce.

    ``owner`` and ``choice`` belong to the submitter and are not used here. ``live`` ends when the
    sequence has produced ``output_tokens`` or was aborted. ``prefill_only``: it ends with its
    prompt, and is not used to predict output lengths.
    """

    __slots__ = (
        "blocks",
        "choice",
        "computed",
        "emitted",
        "engine_id",
        "live",
        "output_tokens",
        "owner",
        "prefill_only",
        "prompt_tokens",
        "running",
        "tracked",
        "view",
    )

    def __init__(
        self,
        engine_id: str,
        tracked: TrackedRequest,
        prompt_tokens: int,
        output_tokens: int,
        owner: Any,
        choice: int,
        computed: int = 0,
        prefill_only: bool = False,
    ) -> None:
        self.engine_id = engine_id
        self.tracked = tracked
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.owner = owner
        self.choice = choice
        self.prefill_only = prefill_only
        self.computed = computed
        self.emitted = 0
        self.blocks = 0
        self.running = False
        self.live = True
        self.view = self._make_view()

    @property
    def pending(self) -> int:
        """Tokens that could be computed now: the rest of the prefill, or one in decode."""
        return self.prompt_tokens + self.emitted - self.computed

    def refresh(self) -> None:
        """Rebuild :attr:`view` after a change. Unchanged requests keep theirs between steps."""
        self.view = self._make_view()

    def _make_view(self) -> RequestView:
        return RequestView(
            self.engine_id,
            self.tracked.slo,
            self.tracked.arrival_s,
            self.prompt_tokens,
            self.computed,
            self.prompt_tokens + self.emitted - self.computed,
            self.emitted,
            self.tracked.first_token_s,
            self.blocks,
            self.running,
            self.tracked.last_token_s,
            self.tracked.expected_tokens,
            self.tracked.best_effort,
            tenant=self.tracked.tenant,
            weight=self.tracked.weight,
            promised=self.tracked.promised,
        )

    def row(self) -> RowUpdate:
        """The changing part of its row in the state table."""
        return RowUpdate(
            self.tracked.slot,
            self.computed,
            self.prompt_tokens + self.emitted - self.computed,
            self.emitted,
            self.blocks,
            self.running,
            self.tracked.first_token_s,
            self.tracked.last_token_s,
            self.tracked.expected_tokens,
        )


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
    """Queue, KV blocks and batches of a simulated engine.

    At most one step is in flight: :meth:`begin`, then :meth:`complete`. Requests may be submitted
    and aborted at any time, also in between. Not thread-safe.

    A step costs ``O(live requests)`` besides the policy's plan; nothing costs per prompt token.
    """

    def __init__(
        self, config: SimulatedEngineConfig, scheduler: LocalScheduler, table: StateTable
    ) -> None:
        self.live: dict[str, SimulatedSequence] = {}
        """Sequences that could run, by engine id."""
        self._awaited: dict[str, tuple[Transfer, SimulatedSequence]] = {}
        # Sequences whose KV is being transferred, by engine id.
        self.free_blocks = config.kv_blocks
        self.max_model_tokens = min(config.max_model_tokens, config.kv_blocks * config.block_tokens)
        self._config = config
        self._scheduler = scheduler
        self._table = table
        # In order of admission; the last one is preempted first, as in vLLM.
        self._running: dict[str, SimulatedSequence] = {}
        self._ids = count()
        self._fallback = make_policy("fcfs")
        self._stepping = False
        table.idle(self.free_blocks, config.kv_blocks)

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
    ) -> SimulatedSequence:
        """Queue a sequence. With a ``transfer`` the KV of its prompt comes from another engine; its
        blocks are allocated when it begins to run.

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
        engine_id = str(next(self._ids))
        # Outputs always have their max length here.
        self._scheduler.track(
            engine_id,
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
        sequence = SimulatedSequence(
            engine_id,
            self._scheduler.requests[engine_id],
            prompt_tokens,
            output_tokens,
            owner,
            choice,
            # The last token is always computed here, for the next token.
            0 if transfer is None else prompt_tokens - 1,
            prefill_only,
        )
        if transfer is None:
            self.live[engine_id] = sequence
        else:
            self._awaited[engine_id] = transfer, sequence
            self._scheduler.update([sequence.row()])
        return sequence

    @property
    def queued(self) -> int:
        """Sequences that have not ended."""
        return len(self.live) + len(self._awaited)

    def next_arrival_s(self) -> float | None:
        """When the next KV transfer from another engine ends; ``None``: none is in progress."""
        return min((transfer.ready_s for transfer, _ in self._awaited.values()), default=None)

    def abort(self, sequence: SimulatedSequence, now_s: float) -> None:
        """Drop a sequence and free its blocks. A sequence that has ended is ignored."""
        if not sequence.live:
            return
        self._end(sequence)
        if not self._stepping:
            # No step will end soon to publish the shorter queue.
            self._table.write(
                (),
                updated_s=now_s,
                waiting=self.queued - len(self._running),
                running=len(self._running),
                free_kv_blocks=self.free_blocks,
                total_kv_blocks=self._config.kv_blocks,
            )

    def _admit_arrived(self, now_s: float) -> None:
        arrived = [each for each in self._awaited.values() if each[0].ready_s <= now_s]
        for transfer, sequence in arrived:
            del self._awaited[sequence.engine_id]
            self.live[sequence.engine_id] = sequence
            self._scheduler.transfers.arrived(now_s - transfer.asked_s, sequence.computed, 0)

    def begin(self, now_s: float) -> SimulatedStep | None:
        """Plan and start the next batch; ``None`` if no request could run.

        Raises:
            RuntimeError: nothing could run although requests are live: a fault in the engine.
        """
        self._admit_arrived(now_s)
        if not self.live:
            return None
        config = self._config
        queue = QueueView([sequence.view for sequence in self.live.values()])
        budget = BatchBudget(
            config.max_batch_tokens, config.max_sequences, self.free_blocks, config.block_tokens
        )
        plan = self._scheduler.plan(queue, now_s, budget)
        # A policy that plans nothing must not stop the engine: run requests in order, as stock vLLM
        # would. This counts as a plan mismatch.
        runnable = plan
        if not plan.entries:
            runnable = self._fallback.plan(queue, now_s, self._scheduler.model, budget)
        ran, preempted = self._allocate(runnable)
        if not ran:
            raise RuntimeError(f"no batch could be made of {len(self.live)} live requests")
        in_flight = self._scheduler.begin_step(
            plan,
            [(sequence.engine_id, tokens, sequence.computed) for sequence, tokens in ran],
            now_s,
            [sequence.engine_id for sequence in preempted],
        )
        self._stepping = True
        work = in_flight.work
        seconds = (
            config.step_s
            + config.token_s * work.new_tokens
            + config.context_token_s * work.context_tokens
            + config.quadratic_s * work.quadratic
        )
        return SimulatedStep(seconds * drift(config, now_s), ran, preempted, in_flight)

    def _allocate(
        self, plan: BatchPlan
    ) -> tuple[list[tuple[SimulatedSequence, int]], list[SimulatedSequence]]:
        """Preempt what the plan evicts, then give every planned request its blocks, preempting
        running ones outside the plan."""
        block = self._config.block_tokens
        spared = {entry.request_id for entry in plan.entries}.union(plan.kept_ids)
        ran: list[tuple[SimulatedSequence, int]] = []
        preempted = [self.live[engine_id] for engine_id in plan.evicted_ids]
        for victim in preempted:
            self._preempt(victim)
        self._scheduler.count_evictions(plan)
        for engine_id, tokens in plan.entries:
            sequence = self.live[engine_id]
            if not sequence.running and len(self._running) >= self._config.max_sequences:
                continue
            needed = -(-(sequence.computed + tokens) // block) - sequence.blocks
            while needed > self.free_blocks:
                loser = next(
                    (other for key, other in reversed(self._running.items()) if key not in spared),
                    None,
                )
                if loser is None:
                    break
                self._preempt(loser)
                preempted.append(loser)
            if needed > self.free_blocks:
                continue
            if needed > 0:
                self.free_blocks -= needed
                sequence.blocks += needed
            if not sequence.running:
                sequence.running = True
                self._running[engine_id] = sequence
            ran.append((sequence, tokens))
        return ran, preempted

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
        self._stepping = False
        updates: list[RowUpdate] = []
        for sequence, tokens in step.ran:
            if not sequence.live:
                continue
            sequence.computed += tokens
            if sequence.computed == sequence.prompt_tokens + sequence.emitted:
                sequence.emitted += 1
                tracked = sequence.tracked
                tracked.emitted(now_s)
                if sequence.emitted >= tracked.expected_tokens:
                    self._scheduler.prolong(tracked, sequence.emitted)
                if sequence.emitted == sequence.output_tokens:
                    self._end(sequence)
                    emit(sequence)
                    continue
                emit(sequence)
            sequence.refresh()
            updates.append(sequence.row())
        updates.extend(sequence.row() for sequence in step.preempted if sequence.live)
        running = len(self._running)
        self._scheduler.end_step(
            step.in_flight,
            now_s,
            updates,
            self.queued - len(self._running),
            running,
            self.free_blocks,
            self._config.kv_blocks,
        )

    def _preempt(self, sequence: SimulatedSequence) -> None:
        """Return a sequence to the queue without KV; its generated tokens are kept and count as
        prefill."""
        del self._running[sequence.engine_id]
        sequence.running = False
        sequence.computed = 0
        self._release(sequence)
        sequence.refresh()

    def _end(self, sequence: SimulatedSequence) -> None:
        sequence.live = False
        self.live.pop(sequence.engine_id, None)
        self._awaited.pop(sequence.engine_id, None)
        self._running.pop(sequence.engine_id, None)
        self._release(sequence)
        ended = sequence.emitted == sequence.output_tokens and not sequence.prefill_only
        self._scheduler.forget(sequence.engine_id, sequence.emitted if ended else None)

    def _release(self, sequence: SimulatedSequence) -> None:
        self.free_blocks += sequence.blocks
        sequence.blocks = 0
