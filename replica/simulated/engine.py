"""An engine with a latency model in place of a GPU, in real time, with the same policies, local
scheduler and API as the vLLM engine; outputs are made up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import (
    EVENT_STREAM,
    UNABLE,
    EngineDeadError,
    EngineRequest,
    KVHandle,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
    request_key,
)
from sluice.replica.config import EngineConfig
from sluice.replica.engine import (
    NOT_GIVEN,
    EngineInfo,
    Forward,
    check_resume,
    check_transfer,
    table_capacity,
)
from sluice.replica.openai_format import Call, ResponseWriter, models_body, parse_call
from sluice.replica.scheduler.local_scheduler import LocalScheduler
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import RequestArgs
from sluice.replica.simulated.core import SimulatedCore, SimulatedSequence, Transfer
from sluice.scheduling.batching import make_policy
from sluice.scheduling.fleet.state import EngineState
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.roles import Role
from sluice.telemetry.records import RecordLog

logger = logging.getLogger(__name__)

_MAX_LAG_S = 0.01
"""How far the engine may be behind its deadlines and still catch up, seconds: timers are late by
about a millisecond, which must not add up, and a stall must not be replayed as a burst."""


@dataclass(slots=True, eq=False)
class _LiveCall:
    """A live call: ``emitted`` tokens of each choice, of which ``left`` have not ended. A slow
    consumer gets larger chunks."""

    request: EngineRequest
    received_s: float
    stream: bool
    emitted: list[int]
    left: int
    sequences: list[SimulatedSequence] = field(default_factory=list)
    first_choice_s: list[float] = field(default_factory=list)
    started_s: float | None = None
    moved: bool = False
    waiter: asyncio.Future[None] | None = None
    aborted: bool = False

    @property
    def queued_s(self) -> float:
        """From its arrival until its first sequence ran."""
        return 0.0 if self.started_s is None else self.started_s - self.received_s

    def wake(self) -> None:
        """There are tokens, or it has ended."""
        self.moved = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self) -> None:
        """Until :meth:`wake` was called. As an event, which would cost as much as a token."""
        if not self.moved:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter


class SimulatedEngine:
    """An engine without a model. Sequences share no KV, also not those of one prompt; the model is
    at most as long as the KV holds.

    The planner knows the ground truth ``config.simulated`` unless ``config.latency_profile`` gives
    it another model. Further calls than ``max_live_requests``, of four sequences each, get 503."""

    def __init__(
        self,
        config: EngineConfig,
        replica_id: str,
        max_live_requests: int,
        clock: Callable[[], float] = time.monotonic,
        role: Role = "mixed",
    ) -> None:
        profile = _profile(config)
        of_role = partial(make_policy, config.policy, config.policy_options, config.best_effort)
        policy = of_role(role)
        self._clock = clock
        self._table = StateTable.create(table_capacity(max_live_requests), clock=clock)
        self._table.set_role(role)
        path = config.batch_log
        log = None if path is None else RecordLog(path / f"{replica_id}.jsonl")
        model = profile.model.with_headroom(config.headroom)
        scheduler = LocalScheduler(policy, self._table, model, log, of_role=of_role)
        self._replica_id = replica_id
        self._config = config.simulated
        self._scheduler = scheduler
        self._core = SimulatedCore(config.simulated, scheduler, self._table)
        self._info = EngineInfo(
            model=config.served_model_name or config.model,
            policy=config.policy,
            policy_options=policy.options.model_dump(mode="json"),
            max_model_tokens=self._core.max_model_tokens,
            max_batch_tokens=config.simulated.max_batch_tokens,
            max_sequences=config.simulated.max_sequences,
            kv_blocks=config.simulated.kv_blocks,
            block_tokens=config.simulated.block_tokens,
            profile=profile,
        )
        self._calls: set[_LiveCall] = set()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop_task: asyncio.Task[None] | None = None
        self._dead: str | None = "it was not started"
        self._now_s = 0.0
        self._turned_s = 0.0
        self._moves = asyncio.Event()
        self._moves.set()

    async def start(self) -> EngineInfo:
        """Begin to run steps."""
        if self._loop_task is None:
            self._dead = None
            self._loop_task = asyncio.create_task(self._run(), name="simulated-engine")
        return self._info

    def set_role(self, role: Role) -> None:
        """See :meth:`sluice.replica.engine.Engine.set_role`."""
        self._table.set_role(role)

    async def generate(
        self, request: EngineRequest, forward: Forward | None = None
    ) -> AsyncIterator[ResponseItem]:
        """Serve one request; a refusal also ends with a tail."""
        await self.check_health()
        received_s = self._clock()
        try:
            check_transfer(request)
            check_resume(request)
            if request.cached_only:
                raise RequestError(NOT_GIVEN, None, UNABLE)
            call = parse_call(
                request.endpoint, request.body, self._info.model, self._info.max_model_tokens
            )
            live = self._submit(call, request, received_s)
        except RequestError as error:
            yield ResponseHead(error.status, "application/json")
            yield ResponseChunk(error.body(request.endpoint))
            yield ResponseTail(0, 0)
            return
        try:
            response_id = request.resume.response_id if request.resume else request.request_id
            writer = ResponseWriter(call, response_id, self._info.model, int(time.time()))
            if request.prefill_only:
                respond = self._prefill(live, self._kv_handle(call, request))
            elif live.stream:
                respond = self._stream(live, writer)
            else:
                respond = self._respond(live, writer)
            key = request_key(request.request_id)
            async for item in respond:
                if request.promised and isinstance(item, ResponseTail):  # of a prefill
                    item = item._replace(late_parts=self._table.late_parts(key))
                yield item
            if not live.aborted and not request.prefill_only:
                offsets = () if live.stream else tuple(live.first_choice_s)
                prompt_tokens = sum(prompt.tokens for prompt in call.prompts)
                yield ResponseTail(
                    prompt_tokens,
                    sum(live.emitted),
                    offsets,
                    live.queued_s,
                    late_parts=self._table.late_parts(key) if request.promised else (),
                )
        finally:
            self._drop(live)

    def _submit(self, call: Call, request: EngineRequest, received_s: float) -> _LiveCall:
        limit = self._table.capacity
        if self._core.queued + call.choices > limit:
            message = f"The engine serves at most {limit} sequences at once. Try again later."
            raise RequestError(message, None, 503)
        cached_tokens = self._stop(request.kv_of_request) if request.kv_of_request else 0
        resumed, choices = request.resumed_tokens, call.choices
        stream = call.stream and not request.prefill_only
        live = _LiveCall(request, received_s, stream, [resumed] * choices, choices)
        args = RequestArgs.of(request, received_s)
        key = request_key(request.request_id)
        transfer = self._transfer(call, request, received_s)
        if resumed > call.max_tokens:
            raise RequestError(f"{resumed} tokens were sent of {call.max_tokens}.", None)
        if resumed == call.max_tokens:
            live.left = 0
            live.wake()
        for choice in range(live.left):
            sequence = self._core.submit(
                args,
                key,
                call.prompts[choice // call.n].tokens + resumed,
                1 if request.prefill_only else call.max_tokens - resumed,
                live,
                choice,
                transfer,
                request.prefill_only,
                cached_tokens,
            )
            live.sequences.append(sequence)
        self._calls.add(live)
        self._idle.clear()
        self._work.set()
        return live

    def _stop(self, request_id: str) -> int:
        """Stop a live request. Returns how many tokens' KV it had."""
        for live in tuple(self._calls):
            if live.request.request_id == request_id and live.left:
                computed = self._core.computed_tokens(live.sequences[0])
                live.aborted = True
                self._drop(live)
                live.wake()
                return computed
        return 0

    def _transfer(self, call: Call, request: EngineRequest, now_s: float) -> Transfer | None:
        """The transfer of the prompt's KV from another engine; ``None``: there is none."""
        kv_handle = request.kv_handle
        if kv_handle is None:
            return None
        if call.choices != 1 or kv_handle._replace(replica_id=self._replica_id) != self._kv_handle(
            call, request
        ):
            self._scheduler.kv_failed()
            return None
        seconds = self._config.transfer_s + kv_handle.prompt_tokens * 1e-5  # of each token
        return Transfer(now_s, now_s + seconds)

    def _kv_handle(self, call: Call, request: EngineRequest) -> KVHandle:
        (prompt,) = call.prompts
        params = {"model": self._info.model, "prompt": prompt.seed}
        return KVHandle(self._replica_id, params, prompt.tokens + request.resumed_tokens)

    async def _prefill(self, live: _LiveCall, kv_handle: KVHandle) -> AsyncIterator[ResponseItem]:
        await self._progress(live)
        if not live.aborted:
            yield ResponseHead(200, "application/json")
            tokens = kv_handle.prompt_tokens
            yield ResponseTail(tokens, 0, queued_s=live.queued_s, kv_handle=kv_handle)

    async def _stream(self, live: _LiveCall, writer: ResponseWriter) -> AsyncIterator[ResponseItem]:
        yield ResponseHead(200, EVENT_STREAM)
        resume = live.request.resume
        if resume is None:
            await live.wait()  # what opens a stream leaves with the first token, as of vLLM
        opening = writer.opening()
        if opening:
            yield ResponseChunk(opening)
        sent = [0] * len(live.emitted)
        for tokens in filter(None, resume.chunks if resume else ()):
            yield self._chunk(live, writer, 0, sent[0], sent[0] + tokens)
            sent[0] += tokens
        unfinished = True
        while unfinished:
            await self._progress(live)
            unfinished = live.left > 0
            for choice, emitted in enumerate(live.emitted):
                start = sent[choice]
                if emitted > start:
                    sent[choice] = emitted
                    yield self._chunk(live, writer, choice, start, emitted)
            if live.aborted:
                return
        yield ResponseChunk(writer.closing())

    def _chunk(
        self, live: _LiveCall, writer: ResponseWriter, choice: int, start: int, stop: int
    ) -> ResponseChunk:
        """Tokens ``start`` to ``stop`` of a choice; a token's id is its position."""
        resumable = live.request.resumable and len(live.emitted) == 1
        ids = tuple(range(start, stop)) if resumable else ()
        return ResponseChunk(writer.delta(choice, start, stop), 0 if choice else stop - start, ids)

    async def _respond(
        self, live: _LiveCall, writer: ResponseWriter
    ) -> AsyncIterator[ResponseItem]:
        await self._progress(live)
        if not live.aborted:
            yield ResponseHead(200, "application/json")
            yield ResponseChunk(writer.body(), live.emitted[0])

    async def _progress(self, live: _LiveCall) -> None:
        await live.wait()
        live.moved = False
        if live.left and not live.aborted:
            await self.check_health()

    def _emit(self, sequence: SimulatedSequence) -> None:
        live: _LiveCall = sequence.owner
        live.emitted[sequence.choice] += 1
        if not sequence.live:
            live.left -= 1
        if live.stream or not live.left:
            live.wake()
        if not live.stream and not sequence.choice:
            live.first_choice_s.append(self._now_s - live.received_s)

    def _drop(self, live: _LiveCall) -> None:
        if live.left:
            now_s = self._clock()
            for sequence in live.sequences:
                self._core.abort(sequence, now_s)
        self._calls.discard(live)
        if not self._calls:
            self._idle.set()

    async def _run(self) -> None:
        """Run steps; deadlines are absolute, so that late timers do not add up."""
        core = self._core
        try:
            deadline_s = self._clock()
            while True:
                if not core.live:
                    await self._await_work()
                    deadline_s = self._clock()
                now_s = self._turned_s = self._clock()
                deadline_s = max(deadline_s, now_s - _MAX_LAG_S)
                step = core.begin(now_s)
                if step is None:
                    continue
                for sequence, _ in step.ran:
                    if sequence.owner.started_s is None:
                        sequence.owner.started_s = now_s
                deadline_s += step.seconds
                # Also yields to the other tasks when there is nothing to wait for.
                await asyncio.sleep(max(0.0, deadline_s - self._clock()))
                await self._moves.wait()
                self._now_s = self._clock()
                core.complete(step, self._now_s, self._emit)
        except Exception:
            logger.exception("the simulated engine failed")
            self._die("it failed; its log says why")

    async def _await_work(self) -> None:
        self._work.clear()
        arrival_s = self._core.next_arrival_s()
        if arrival_s is None:
            await self._work.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, arrival_s - self._clock())):
                await self._work.wait()

    def _die(self, reason: str) -> None:
        self._dead = reason
        for live in self._calls:
            live.wake()

    async def abort(self, request_id: str) -> None:
        """Stop a request; its response ends without a tail."""
        self._stop(request_id)

    def state(self) -> EngineState:
        """The scheduler's state as of its last step."""
        return self._table.read()

    def waits_since_s(self) -> float | None:
        """Since when the oldest call that could run waits, or the current step's start if later."""
        received = [sequence.owner.received_s for sequence in self._core.live.values()]
        return max(min(received), self._turned_s) if received else None

    async def pulse(self) -> None:
        """Return when the engine is not stalled."""
        await self._moves.wait()

    def stall(self) -> None:
        """Stall until :meth:`recover`: end no step, as an engine whose device hangs."""
        self._moves.clear()

    def recover(self) -> None:
        """End the stalled step, and continue."""
        self._moves.set()

    async def models(self) -> dict[str, Any]:
        """The OpenAI list-models body."""
        return models_body(self._info.model, self._info.max_model_tokens, int(time.time()))

    async def check_health(self) -> None:
        """Raises EngineDeadError: it failed, was stopped, or was not started."""
        if self._dead is not None:
            raise EngineDeadError(f"the simulated engine is dead: {self._dead}")

    async def drain(self) -> None:
        """Wait until no request is live."""
        while self._calls:
            await self._idle.wait()

    async def stop(self) -> None:
        """Stop running steps; live requests end with an error. Idempotent."""
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self._die("it was stopped")


def _profile(config: EngineConfig) -> LatencyProfile:
    if config.latency_profile is not None:
        return LatencyProfile.from_json(config.latency_profile.read_text(encoding="utf-8"))
    own = config.simulated
    # With free tokens a planner would promise any SLO.
    token_s = max(own.token_s, 1e-7)
    model = LinearLatency(own.step_s, token_s, own.context_token_s, own.quadratic_s)
    return LatencyProfile.of("simulated", model, None)
