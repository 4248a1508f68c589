"""Whether a missed promise is blamed on what made it late: ``sluice bench causes``.

The router's dispatcher, the controller and simulated engines in one process and in virtual time.
Each run delays one promised request in one way, by a drawn time, beside small delays on the way."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import click

from sluice.benchmarks.live.report import table
from sluice.benchmarks.options import as_json, number_option, show
from sluice.controller.config import ControllerConfig
from sluice.protocol import requests
from sluice.protocol.messages import RequestEnding
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.profiling import VirtualLoop
from sluice.replica.reporter import Membership, Reporter
from sluice.replica.simulated.engine import SimulatedEngine
from sluice.scheduling.request.job import NO_REPLICA, UNATTAINABLE, RouteDecision, RouteQuery
from sluice.scheduling.request.lateness import Cause
from sluice.scheduling.request.objective import SLO

TOKEN_S, STEP_S = 0.00005, 0.004
BEFORE = (Cause.EDGE, Cause.ADMISSION_QUEUE, Cause.FAILURE, Cause.REPLICA_START)
INJECTED = [cause for cause in Cause if cause is not Cause.UNKNOWN]


class _System:
    """The far side of one router: a controller, and engines ``a``, which answers, and ``b``."""

    roles, single = ("mixed",), True

    def __init__(self, cause: Cause, seconds: float, late_s: float, clock: Any) -> None:
        # It imports Ray, which must not happen before `sluice serve` has set Ray's environment.
        from sluice.controller.actor import Controller

        self.cause, self.seconds, self.late_s, self.clock = cause, seconds, late_s, clock
        self.controller = Controller(ControllerConfig(), clock)
        self.asleep = False
        self.armed = False
        self.until_s = 0.0
        self.endings: list[RequestEnding] = []
        self.tasks: list[asyncio.Task[Any]] = []
        blocks = 128 if cause is Cause.KV_MEMORY else 4_096
        transfer_s = seconds if cause is Cause.KV_TRANSFER else 0.002
        simulated = {
            **{"step_s": STEP_S, "token_s": TOKEN_S, "context_token_s": 0.0},
            **{"kv_blocks": blocks, "max_model_tokens": 32_768, "transfer_s": transfer_s},
        }
        config = {"kind": "simulated", "model": "m", "policy": "fcfs", "simulated": simulated}
        made = EngineConfig.model_validate(config)
        self.engines = {name: SimulatedEngine(made, name, 300, clock) for name in "ab"}

    async def start(self) -> None:
        for name, engine in self.engines.items():
            info, member = await engine.start(), Membership(name, "node", 300)
            rest: Any = (ReplicaConfig(), member, lambda: 0, lambda _: False, self.clock)
            reporter = Reporter(engine.state, info, self.controller, *rest)
            if name == "a":  # only it is chosen
                await reporter.tick()
                self.reporter = reporter

    # In the place of the controller's client.

    async def route(self, query: RouteQuery) -> RouteDecision | None:
        cause, waits = self.cause, self.armed and self.clock() < self.until_s
        if waits and cause is Cause.ADMISSION_QUEUE:
            return RouteDecision(None, UNATTAINABLE, retry_after_s=1.0, room_s=0.05)
        if waits and cause is Cause.REPLICA_START:
            return RouteDecision(None, NO_REPLICA, predicted_ttft_s=1.0, starts_in_s=self.seconds)
        await self.reporter.tick()
        decision = (await self.controller.route([query])).decisions[0]
        if not self.armed:
            return decision
        if cause is Cause.DECISION:
            await asyncio.sleep(self.seconds)
        if cause is Cause.FAILURE and not query.avoid:
            return decision._replace(replica_id="dead")
        if cause is Cause.KV_TRANSFER:
            return decision._replace(prefill_id="b", kv_transfer_s=0.02)
        others = {
            Cause.PREFILLS: [(round(self.seconds / TOKEN_S / 4), 1)] * 4,
            Cause.DECODES: [(2, 400)] * 250,
            Cause.KV_MEMORY: [(1_200, round(self.seconds / STEP_S))],
        }.get(cause, ())
        for number, (prompt, output) in enumerate(others):
            # Of another router, which the controller has not heard of yet.
            self.tasks.append(asyncio.create_task(self._drain(number, prompt, output)))
        await asyncio.sleep(0)
        return decision

    async def _drain(self, number: int, prompt: int, output: int) -> None:
        body = body_of(prompt, output)
        request = requests.EngineRequest(f"o{number}", "completions", body, SLO(), waited_s=60.0)
        async for _ in self.engines["a"].generate(request):
            pass

    async def quote(self, *_: Any) -> None:
        pass

    def ended(self, ending: RequestEnding) -> None:
        self.endings.append(ending)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    # In the place of the replicas.

    async def wake(self) -> None:
        await asyncio.sleep(max(0.0, self.until_s - self.clock()))

    async def progress(self, ids: Any, target: str | None, *_: Any) -> requests.Progress:
        return requests.Progress(target or "a", False)

    def generate(self, request: requests.EngineRequest, target: str, *_: Any) -> _Stream:
        return _Stream(self, request, target)


class _Stream:
    """One call's answer; ``cancel`` needs no work, as none is cut short."""

    forward: Any = None

    def __init__(self, system: _System, request: requests.EngineRequest, target: str) -> None:
        self._system, self._request, self._target = system, request, target

    async def __aiter__(self) -> AsyncIterator[list[requests.ResponseItem]]:
        from sluice.router.errors import Reason
        from sluice.router.serve.contract import ReplicaFailedError

        system, armed = self._system, self._system.armed
        if self._target == "dead":
            await asyncio.sleep(system.seconds)
            raise ReplicaFailedError(Reason.REPLICA_FAILED, "It died.", dead=True)
        engine = system.engines[self._target]
        if armed and system.cause is Cause.ENGINE_STALL:
            engine.stall()
            asyncio.get_running_loop().call_later(system.seconds, engine.recover)
        delay_s = system.late_s if armed else 0.0
        async for item in engine.generate(self._request):
            if delay_s and isinstance(item, requests.ResponseChunk) and item.tokens:
                await asyncio.sleep(delay_s)
                delay_s = 0.0
            yield [item]

    def cancel(self) -> None:
        """Nothing is left to stop."""


def body_of(prompt: int, output: int) -> requests.RequestBody:
    """A streamed completion of a prompt of this many tokens."""
    fields = {"model": "m", "prompt": [5] * prompt, "max_tokens": output, "stream": True}
    return requests.RequestBody.of(fields)


async def delayed(cause: Cause, seed: int, slack: float = 0.04) -> dict[str, Any]:
    """One promised request that ``cause`` delays: its cause as found, and the lateness."""
    # They import Ray, which must not happen before `sluice serve` has set Ray's environment.
    from sluice.router.config import RouterConfig
    from sluice.router.dispatch.access_log import Telemetry
    from sluice.router.dispatch.dispatcher import Dispatcher
    from sluice.router.errors import ApiError
    from sluice.router.metrics.instruments import Outcome, RouterMetrics
    from sluice.router.request.call import Call
    from sluice.router.request.prompt import PromptSize
    from sluice.scheduling.request.objective import TokenClock

    chance, loop = random.Random(f"{cause} {seed}"), asyncio.get_running_loop()
    seconds, prompt = chance.uniform(0.3, 0.8), chance.randrange(900, 1_100)
    before, early_s = cause in BEFORE, chance.uniform(0.005, 0.02)
    ttft_s = (prompt * TOKEN_S + 2 * STEP_S + (seconds if before else 0.0)) * (1 + slack) + 0.04
    # What was promised in time is late by a little more than the slack.
    late_s = ttft_s - seconds - prompt * TOKEN_S + early_s if before else early_s / 4
    system = _System(cause, seconds, late_s + (cause is Cause.WAY_BACK) * seconds, loop.time)
    far: Any = system
    classes: dict[str, Any] = {"standard": {}, "queued": {"when_unattainable": "queue"}}
    config = RouterConfig.model_validate({"classes": classes})
    dispatcher = Dispatcher(far, far, RouterMetrics(), config, loop.time, asyncio.sleep)
    await system.start()

    async def served(name: str, own: int, size: int, output: int, slo: SLO, waited_s: float) -> Any:
        received_s = loop.time() - waited_s
        body, clock = body_of(own, output), TokenClock(slo, received_s)
        call = Call(name, "completions", body, slo, PromptSize(0, size), received_s, False, output)
        answer = await dispatcher.open(call, clock=clock)
        async for piece in dispatcher.pieces(answer):
            clock.emit(piece.tokens, loop.time())
        dispatcher.close(answer)
        dispatcher.ended(call, clock, Outcome.OK, None, answer, Telemetry())
        return answer

    calm = [served(f"c{n}", 16, 16, 60, SLO(e2e_s=60.0), 0.0) for n in range(2)]
    tasks = [asyncio.create_task(each) for each in calm]
    await asyncio.sleep(0.1)
    system.armed, system.until_s = True, loop.time() + seconds
    own = prompt + (cause is Cause.OWN_PREFILL) * round(seconds / TOKEN_S)
    tpot_s = 0.006 if cause is Cause.DECODES else None
    name = "queued" if cause is Cause.ADMISSION_QUEUE else "standard"
    slo = SLO(ttft_s=5.0 if tpot_s else ttft_s, tpot_s=tpot_s, service_class=name)
    waited_s = seconds if cause is Cause.EDGE else 0.0
    answer = None
    with suppress(ApiError):
        answer = await served("x", own, prompt, 100 if tpot_s else 8, slo, waited_s)
    await asyncio.gather(*tasks, *system.tasks)
    for engine in system.engines.values():
        await engine.stop()
    if answer is None or not answer.promises:
        return await delayed(cause, seed, slack + 0.1)
    (ending,) = [each for each in system.endings if each.request_id == "x"]
    late_s = (ending.ttft_s or 0.0) - (slo.ttft_s or 0.0)
    if tpot_s and ending.tpot_s:
        late_s = (ending.tpot_s - tpot_s) * (ending.tokens - 1)
    parts_ms = {each.value: 1_000 * part_s for each, part_s in ending.late}
    return {"late_ms": 1_000 * late_s, "parts_ms": parts_ms}


def confusion(runs: int) -> list[dict[str, Any]]:
    """A row for each injected cause: which were found, and how far parts are from the lateness."""
    rows: list[dict[str, Any]] = []
    for cause in INJECTED:
        found = Counter[str]()
        off_ms = 0.0
        for seed in range(runs):
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                one = runner.run(delayed(cause, seed))
            parts = one["parts_ms"]
            found[next(iter(parts), "in time")] += 1
            off_ms = max(off_ms, abs(sum(parts.values()) - max(0.0, one["late_ms"])))
        said = ", ".join(f"{name} {count}" for name, count in found.most_common())
        right = found[cause.value] / runs
        rows.append({"injected": cause.value, "right": right, "found": said, "off_ms": off_ms})
    return rows


@click.command()
@number_option("--runs", default=20, least=1, most=1_000, words="Of each cause.")
@as_json
def causes(runs: int, as_json: bool) -> None:
    """Delay promised requests in each way, and count the causes that are found.

    \b
    Example:
      sluice bench causes --runs 20
    """
    rows = confusion(runs)
    right = sum(row["right"] for row in rows) / len(rows)
    shown = table(rows, *rows[0], title="Causes of missed promises")
    show(
        {"right": right, "causes": rows}, [shown], as_json, f"{right:.1%} of the causes are right."
    )
