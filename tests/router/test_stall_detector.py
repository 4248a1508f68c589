"""Replicas that stand still without an error, behind a real router and in virtual time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.requests import (
    EngineRequest,
    Progress,
    ResponseHead,
    ResponseItem,
    ResponseTaken,
    request_key,
)
from sluice.router.config import RouterConfig
from sluice.router.dispatch.attempt import Answer, Attempt, OpenAttempts
from sluice.router.dispatch.retries import RetryBudget
from sluice.router.dispatch.stall_detector import (
    ANSWER_S,
    ASK_EVERY_S,
    MAX_NAMES,
    ON_THE_WAY_S,
    OWN_GAP_S,
    SILENCE_S,
    SWEEP_S,
    StallDetector,
)
from sluice.router.errors import Reason
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.serve.contract import Forward, ReplicaFailedError, ReplicaStream
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.request.job import RouteDecision
from sluice.scheduling.roles import Role
from tests.examples import examples
from tests.router.far_side import (
    Behaviour,
    Edge,
    FarController,
    FarSide,
    FarStream,
    Items,
    attempt_at,
    hang,
    waiting_call,
)
from tests.router.test_resume import PATHS, TOKENS, simulated, text, without_time_and_name
from tests.router.virtual_time import LoopClock, virtual

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
AFTER_S = 1.0
BOUND_S = 2 * (ASK_EVERY_S + SWEEP_S) + 2 * ANSWER_S
"""From when a silent replica says no more that it goes on until its attempts are given up: two
questions, each up to a look late, the second one's answer, and that of who is alive."""


def freezing(after: int, whole: Behaviour | None = None) -> Behaviour:
    """A replica whose process stands still, once, when ``after`` items have left it."""
    serve = whole or simulated()
    left = after

    async def behaviour(side: FarSide, name: str, request: EngineRequest) -> Items:
        nonlocal left
        if not after and name not in side.frozen:
            side.freeze(name)
        async for item in serve(side, name, request):
            yield item
            await side.let_go()
            left -= 1
            if not left:
                side.freeze(name)

    return behaviour


def edge(
    config: RouterConfig | None = None, decisions: Sequence[Any] = (), **replicas: Behaviour
) -> Edge:
    controller = FarController(*(decisions or replicas))
    return Edge(FarSide(**replicas), controller, config, LoopClock())  # type: ignore[arg-type]


async def asked(router: Edge, path: str = CHAT, **body: Any) -> asyncio.Task[str]:
    """A stream under way."""
    task = asyncio.create_task(text(router, path, **body))
    await router.side.until(lambda: bool(router.side.calls))
    return task


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@given(cuts=st.lists(st.integers(0, TOKENS + 2), max_size=1), engine=st.booleans())
@settings(max_examples=examples(10), deadline=None)
@virtual
async def test_a_client_sees_nothing_of_replicas_that_freeze(
    path: str, cuts: list[int], engine: bool
) -> None:
    """At any item, and whether the process or only the engine in it stands still."""
    whole = await text(edge(r0=simulated()), path)
    replicas = {f"r{index}": freezing(cut) for index, cut in enumerate(cuts)}
    router = edge(RouterConfig(max_attempts=10), **replicas, last=simulated())
    if engine:
        says_so(router.side)
    moved = await text(router, path)
    assert without_time_and_name(moved) == without_time_and_name(whole)
    names = [name for name, _ in router.side.calls]
    assert names == [*replicas, "last"]
    assert set(router.controller.troubles) == {(name, ReplicaFault.HUNG) for name in replicas}
    assert router.side.cancelled == [
        request.request_id for name, request in router.side.calls if name != "last"
    ]
    assert [query.avoid for query in router.controller.queries] == [
        tuple(names[:index]) for index in range(len(names))
    ]
    assert router.sample("sluice_abandoned_attempts_total") == len(cuts)


def words(stream: str) -> str:
    """The text of a whole chat: what gathered meanwhile comes in one event."""
    *events, done = re.findall(r"data: (.*)", stream)
    assert done == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def says_so(side: FarSide) -> None:
    """Who is frozen is asked all the same, and says that its engine hangs."""
    ask = side.progress

    async def progress(
        names: Sequence[str], target: str | None, avoid: Sequence[str], role: Role
    ) -> Progress:
        if target in side.frozen:
            return Progress(target, hung=True)
        return await ask(names, target, avoid, role)

    side.progress = progress  # type: ignore[method-assign]


@virtual
async def test_who_waits_at_a_replica_that_goes_on_waits_for_as_long_as_it_takes() -> None:
    router = edge(slow=freezing(0), other=simulated())
    ask = router.side.progress

    async def progress(*question: Any) -> Progress:
        router.side.questions.append(question[1])
        return Progress(question[1], hung=False)

    router.side.progress = progress  # type: ignore[method-assign]
    streams = [await asked(router) for _ in range(5)]
    await asyncio.sleep(600)
    assert len(router.side.calls) == 5
    assert not router.controller.troubles
    assert 300 < len(router.side.questions) < 600, "for all of them together, once a second"
    router.side.progress = ask  # type: ignore[method-assign]
    router.side.thaw("slow")
    assert all(stream.endswith("data: [DONE]\n\n") for stream in await asyncio.gather(*streams))
    assert router.sample("sluice_retries_total") == 0


@virtual
async def test_where_everything_stands_still_everything_waits() -> None:
    """And costs no attempt: as after a stall of the whole machine, each goes on where it was."""
    router = edge(r0=freezing(3), r1=freezing(4), decisions=("r0", "r1", "r0"))
    streams = [await asked(router), await asked(router)]
    await asyncio.sleep(SILENCE_S - 10)
    assert len(router.side.calls) == 2
    assert {name for name, _ in router.controller.troubles} == {"r0", "r1"}
    assert router.sample("sluice_retries_total") == 0
    for name in tuple(router.side.frozen):
        router.side.thaw(name)
    whole = words(await text(edge(r0=simulated()), CHAT))
    for stream in await asyncio.gather(*streams):
        assert words(stream) == whole
    assert len(router.side.calls) == 2


@virtual
async def test_the_first_that_comes_back_takes_over_the_others() -> None:
    router = edge(r0=freezing(3), r1=freezing(3), decisions=("r0", "r1"))
    streams = [await asked(router), await asked(router)]
    await asyncio.sleep(30)
    router.side.thaw("r1")
    await asyncio.gather(*streams)
    assert [name for name, _ in router.side.calls] == ["r0", "r1", "r1"]


@virtual
async def test_what_cannot_go_on_elsewhere_waits_for_its_replica() -> None:
    router = edge(r0=freezing(3), r1=simulated())
    stream = await asked(router, COMPLETIONS, n=2)
    await asyncio.sleep(SILENCE_S - 10)
    assert not stream.done()
    router.side.thaw("r0")
    assert (await stream).endswith("data: [DONE]\n\n")
    assert len(router.side.calls) == 1


@virtual
async def test_no_more_leave_at_once_than_the_budget_pays_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.router.dispatch.retries.WINDOW_S", 20)
    router = edge(
        RouterConfig(retry_budget=2), r0=freezing(0), r1=simulated(), decisions=(*["r0"] * 5, "r1")
    )
    streams = [await asked(router) for _ in range(5)]
    await asyncio.sleep(15)
    assert [stream.done() for stream in streams] == [True, True, False, False, False]
    await asyncio.sleep(120)
    assert all(stream.result().endswith("data: [DONE]\n\n") for stream in streams), "as it refills"
    assert router.sample("sluice_retries_refused_total") == 0


@virtual
async def test_attempts_are_bounded_and_the_last_one_waits() -> None:
    router = edge(RouterConfig(max_attempts=2), r0=freezing(0), r1=freezing(0), r2=simulated())
    stream = await asked(router)
    await asyncio.sleep(SILENCE_S - 10)
    assert [name for name, _ in router.side.calls] == ["r0", "r1"]
    router.side.thaw("r1")
    assert (await stream).endswith("data: [DONE]\n\n")


async def ended(router: Edge, path: str = CHAT, **body: Any) -> tuple[httpx.Response, float]:
    """The answer to a request, and how long it took."""
    began_s = asyncio.get_running_loop().time()
    async with router.client() as client:
        answer = await client.post(path, json={**PATHS[path], **body}, timeout=None)
    return answer, asyncio.get_running_loop().time() - began_s


@pytest.mark.parametrize("stream", [False, True])
@virtual
async def test_a_request_that_serve_never_sends_has_an_end(stream: bool) -> None:
    """The controller does not answer, and Serve chooses no replica."""

    class Nowhere(FarSide):
        def generate(self, request: EngineRequest, *_: Any, **__: Any) -> FarStream:
            return FarStream(self, hang(self, "", request), request.request_id)

    controller = FarController(None)
    router = Edge(Nowhere(r0=simulated()), controller, None, LoopClock())  # type: ignore[arg-type]
    answer, took_s = await ended(router, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_failed")
    assert "no sign of life" in answer.json()["error"]["message"]
    assert SILENCE_S <= took_s < SILENCE_S + 1


@pytest.mark.parametrize(("stream", "after"), [(False, 0), (False, 1), (True, 0), (True, 3)])
@virtual
async def test_where_everything_stands_still_for_good_a_request_has_an_end(
    stream: bool, after: int
) -> None:
    router = edge(r0=freezing(after))
    answer, took_s = await ended(router, stream=stream)
    if stream and after:
        event = answer.text.strip().rpartition("\n")[2]
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "stream_broken"
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_failed")
    assert SILENCE_S <= took_s < SILENCE_S + 2


@virtual
async def test_a_request_that_its_replica_never_got_goes_to_another() -> None:
    """The replica lives, and does not know it."""

    async def never(side: FarSide, name: str, request: EngineRequest) -> Items:
        side.live.discard(request.request_id)
        await asyncio.Event().wait()
        yield ResponseHead(200, "application/json", name)

    router = edge(r0=never, r1=simulated())
    answer, took_s = await ended(router)
    assert answer.status_code == 200
    assert [name for name, _ in router.side.calls] == ["r0", "r1"]
    assert ON_THE_WAY_S <= took_s < ON_THE_WAY_S + 3


@virtual
async def test_a_stall_of_this_process_ends_no_request() -> None:
    script = Script([("frozen", 3600.0)])
    stalls = detector(script)
    attempt, answer = silent_at(None), waiting_call()
    stalls.open(attempt, answer)
    waiting = asyncio.create_task(attempt.begin())
    await asyncio.sleep(1)
    answer.alive_s -= SILENCE_S + OWN_GAP_S  # as if it had come after the last check
    stalls.swept_s -= SILENCE_S + OWN_GAP_S
    await asyncio.sleep(SILENCE_S - 5)
    assert not waiting.done()
    await asyncio.sleep(6)
    with pytest.raises(ReplicaFailedError, match="no sign of life"):
        waiting.result()


@pytest.mark.parametrize("frozen", ["p0", "d0"])
@virtual
async def test_each_leg_of_a_pair_is_watched_over(frozen: str) -> None:
    replicas = {name: simulated() for name in ("p0", "d0", "p1", "d1")}
    replicas[frozen] = freezing(0 if frozen == "p0" else 4)
    decisions = [
        RouteDecision(f"d{index}", "placed", role="decode", prefill_id=f"p{index}")
        for index in range(2)
    ]
    router = edge(decisions=decisions, **replicas)
    router.side.roles = ("decode", "prefill")
    whole = await text(edge(r0=simulated()), CHAT)
    assert without_time_and_name(await text(router, CHAT)) == without_time_and_name(whole)
    assert router.controller.troubles == [(frozen, ReplicaFault.HUNG)]
    (left,) = (request for name, request in router.side.calls if name == frozen)
    assert request_key(left.request_id) in router.controller.released


@virtual
async def test_a_stream_that_its_replica_has_lost_goes_on_elsewhere() -> None:
    async def loses(side: FarSide, name: str, request: EngineRequest) -> Items:
        left = 4
        async for item in simulated()(side, name, request):
            yield item
            await side.let_go()
            left -= 1
            if not left:
                side.live.discard(request.request_id)
                await asyncio.Event().wait()

    router = edge(r0=loses, r1=simulated())
    whole = await text(edge(r0=simulated()), CHAT)
    assert without_time_and_name(await text(router, CHAT)) == without_time_and_name(whole)
    assert router.controller.troubles == [("r0", ReplicaFault.FAILED)]


@virtual
async def test_a_frozen_replica_is_left_that_nobody_but_serve_has_chosen() -> None:
    router = edge(decisions=[None], r0=freezing(0), r1=simulated())
    whole = await text(edge(r0=simulated()), CHAT)
    assert without_time_and_name(await text(router, CHAT)) == without_time_and_name(whole)
    assert router.controller.troubles == [("r0", ReplicaFault.HUNG)]


@virtual
async def test_a_client_that_leaves_a_frozen_replica_is_forgotten() -> None:
    router = edge(r0=freezing(2))
    stream = await asked(router)
    await asyncio.sleep(10)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    await router.side.until(lambda: bool(router.side.cancelled))
    questions = len(router.side.questions)
    await asyncio.sleep(60)
    assert len(router.side.questions) <= questions + 1, "nobody waits there any more"


class Script:
    """A replica ``a`` that lives, hangs or is frozen by turns, beside ``b``, which lives."""

    roles: Sequence[Role] = ("mixed",)
    asleep = False

    def is_leaving(self, replica_id: str) -> bool:
        return True

    def __init__(self, turns: Sequence[tuple[str, float]]) -> None:
        self._now = asyncio.get_running_loop().time
        self._turns: list[tuple[float, str]] = []
        at_s = self._now()
        for state, seconds in turns:
            self._turns.append((at_s, state))
            at_s += seconds
        self.ends_s = at_s
        self.told: list[str] = []
        """What each question to ``a`` came to, in the end."""

    def state(self) -> str:
        return [state for at_s, state in self._turns if at_s <= self._now()][-1]

    async def progress(
        self, names: Sequence[str], target: str | None, avoid: Sequence[str], role: Role
    ) -> Progress:
        if target is None:
            return Progress("b", hung=False)
        try:
            while self.state() == "frozen":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.told.append("nothing")
            raise
        self.told.append(self.state())
        return Progress("a", self.state() == "hung")

    def faulted(self, replica_id: str, fault: ReplicaFault) -> None:
        assert (replica_id, fault) == ("a", ReplicaFault.HUNG)
        assert self.told[-1] == "hung" or self.told[-2:] == ["nothing", "nothing"]


class Silence:
    """A stream of which nothing comes."""

    forward: Forward | None = None

    async def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
        await asyncio.Event().wait()
        yield ()

    def cancel(self) -> None:
        pass


class Watched(StallDetector):
    """A detector, and the attempts that it watches."""

    def __init__(self, script: Script, budget: RetryBudget, clock: Callable[[], float]) -> None:
        self.attempts: OpenAttempts = {}
        self._watching: asyncio.Task[None] | None = None
        rest: Any = (script, script, budget, RouterMetrics(), AFTER_S, clock, lambda: None)
        super().__init__(self.attempts, *rest)

    def open(self, attempt: Attempt, answer: Answer) -> None:
        answer.alive_s = attempt.made_s
        if not self.attempts:
            self._watching = asyncio.create_task(self.watch())
        self.attempts[attempt] = answer


def detector(script: Script) -> Watched:
    clock = asyncio.get_running_loop().time
    budget = RetryBudget(1_000, clock)
    return Watched(script, budget, clock)


def silent_at(place: str | None, stream: ReplicaStream | None = None, name: str = "r") -> Attempt:
    return attempt_at(place, stream or Silence(), asyncio.get_running_loop().time, name)


@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["lives", "hung", "frozen"]), st.floats(0.05, 8)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=examples(200), deadline=None)
@virtual
async def test_given_up_if_and_only_if_it_stands_still(turns: list[tuple[str, float]]) -> None:
    script = Script(turns)
    clock = asyncio.get_running_loop().time
    stalls = detector(script)
    attempt = silent_at("a")
    stalls.open(attempt, waiting_call())
    with pytest.raises((TimeoutError, ReplicaFailedError)) as ended:
        async with asyncio.timeout(script.ends_s - clock()):
            await attempt.begin()
    still_s = 0.0
    """For how long at most it has stood still at a time, since it could be asked."""
    run_s = at_s = 0.0
    for state, seconds in turns:
        counted_s = max(0.0, min(seconds, at_s + seconds - AFTER_S))
        run_s = 0.0 if state == "lives" else run_s + counted_s
        still_s, at_s = max(still_s, run_s), at_s + seconds
    if isinstance(ended.value, ReplicaFailedError):
        assert ended.value.hung
        assert still_s > 0
    else:
        assert still_s <= BOUND_S


@virtual
async def test_who_has_taken_what_was_sent_to_anybody_is_asked() -> None:
    class Taken(Silence):
        async def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
            yield [ResponseTaken("a")]
            await asyncio.Event().wait()

    script = Script([("frozen", 3600.0)])
    stalls = detector(script)
    attempt = silent_at(None, Taken())
    stalls.open(attempt, waiting_call())
    with pytest.raises(ReplicaFailedError):
        await attempt.begin()
    assert attempt.place == "a"


@pytest.mark.parametrize("stood_still", [True, False])
@virtual
async def test_what_waits_at_a_replica_that_serve_has_replaced_goes_to_the_new_one(
    stood_still: bool,
) -> None:
    """Where the old one hung and nobody else was there. One that only drains keeps what it has."""

    class Replaced(Script):
        replaced = False

        async def progress(
            self, names: Sequence[str], target: str | None, avoid: Sequence[str], role: Role
        ) -> Progress:
            if self.replaced:
                return Progress("b", hung=False)
            return Progress("a", hung=stood_still)

    script = Replaced([("hung", 3600.0)])
    stalls = detector(script)
    script.told.append("hung")
    waiting = []
    for after_s in (100.0, 0.1):  # the second comes between two questions
        attempt = silent_at("a")
        stalls.open(attempt, waiting_call())
        waiting.append(asyncio.create_task(attempt.begin()))
        await asyncio.sleep(after_s)
    assert not any(each.done() for each in waiting), "there is nobody else"
    script.replaced = True
    await asyncio.wait(waiting, timeout=120)
    assert [each.done() for each in waiting] == [stood_still] * 2
    for each in waiting:
        each.cancel()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    kind = ReplicaFailedError if stood_still else asyncio.CancelledError
    assert all(isinstance(end, kind) for end in ends)


@virtual
async def test_a_word_while_a_question_is_open_is_an_answer() -> None:
    """A replica that has no time for questions but sends tokens goes on."""

    class Busy(Script):
        async def progress(self, *_: Any) -> Progress:
            await asyncio.Event().wait()
            raise AssertionError

    class Slow(Silence):
        async def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
            yield [ResponseHead(200, "application/json", "a")]
            while True:
                await asyncio.sleep(1.3)
                yield ()

    busy = Busy([("lives", 1.0)])
    stalls = detector(busy)
    slow = silent_at("a", Slow())
    for attempt in (slow, silent_at("a")):
        stalls.open(attempt, waiting_call())
    begun = asyncio.gather(slow.begin(), return_exceptions=True)
    await asyncio.sleep(100)
    assert not begun.done()
    begun.cancel()


@virtual
async def test_a_question_names_a_bounded_number_of_requests_and_all_get_their_turn() -> None:
    questions: list[Sequence[str]] = []

    class Counting(Script):
        async def progress(self, names: Sequence[str], *_: Any) -> Progress:
            questions.append(names)
            return Progress("a", hung=False)

    class Begun(Silence):
        async def __aiter__(self) -> AsyncIterator[Sequence[ResponseItem]]:
            await asyncio.sleep(0.01)
            yield [ResponseHead(200, "application/json", "a")]
            await asyncio.Event().wait()

    counting = Counting([("lives", 1.0)])
    stalls = detector(counting)
    names = [f"r{number}" for number in range(2 * MAX_NAMES + 3)]
    tasks = []
    for name in names:
        attempt = silent_at("a", Begun(), name)
        stalls.open(attempt, waiting_call())
        tasks.append(asyncio.create_task(attempt.begin()))
    await asyncio.sleep(30)
    assert max(map(len, questions)) == MAX_NAMES
    assert {name for named in questions for name in named} == set(names)
    for task in tasks:
        task.cancel()


@virtual
async def test_who_is_given_up_and_cancelled_at_once_is_cancelled() -> None:
    attempt = silent_at("a")
    assert not attempt.abandon(ReplicaFailedError(Reason.REPLICA_FAILED, "too early"))
    task = asyncio.create_task(attempt.begin())
    await asyncio.sleep(1)
    assert attempt.abandon(ReplicaFailedError(Reason.REPLICA_FAILED, "in time"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
