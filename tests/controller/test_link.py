"""The link's repair, where what it meets is not what it expects. No Ray: the actor is a stand-in,
the link is real; the conversation with a real actor is in ``test_client.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from sluice.controller import cell_client as link_module
from sluice.controller.cell_client import CallMetrics, Coalescer, Link
from sluice.controller.config import ControllerConfig
from sluice.controller.transport.channel import NoAnswerError


class FarSide:
    """Answers a question with its square, when it is let."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.unwanted: list[tuple[int, int]] = []

    async def send(self, questions: list[int], left_s: float) -> Sequence[int]:
        assert left_s > 0
        self.calls.append(questions)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return [question * question for question in questions]

    def take_back(self, question: int, answer: int) -> None:
        self.unwanted.append((question, answer))


def make(far: FarSide, timeout_s: float = 5.0) -> Coalescer[int, int]:
    return Coalescer(far.send, far.take_back, timeout_s)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question a call, one call at a time, and two questions that wait."""
    for name, most in (("BATCH", 1), ("CALLS", 1), ("QUEUED", 2)):
        monkeypatch.setattr(link_module, f"MAX_{name}", most)


async def turns() -> None:
    """Let the event loop run everything that is ready, and what that makes ready."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_questions_of_one_turn_go_in_one_call() -> None:
    far = FarSide()
    coalescer = make(far)
    answers = await asyncio.gather(*(coalescer.ask(number) for number in range(64)))
    assert answers == [number * number for number in range(64)]
    assert far.calls == [list(range(64))]


async def test_batches_and_calls_are_bounded_and_the_rest_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "MAX_BATCH", 4)
    monkeypatch.setattr(link_module, "MAX_CALLS", 2)
    far = FarSide()
    far.gate.clear()
    coalescer = make(far)
    asked = [asyncio.create_task(coalescer.ask(number)) for number in range(11)]
    await turns()
    assert far.calls == [[0, 1, 2, 3], [4, 5, 6, 7]]
    far.gate.set()
    assert await asyncio.gather(*asked) == [number * number for number in range(11)]
    assert far.calls[2:] == [[8, 9, 10]]


async def test_a_full_queue_refuses_at_once(few: None) -> None:
    far = FarSide()
    far.gate.clear()
    coalescer = make(far)
    asked = [asyncio.create_task(coalescer.ask(0))]
    await turns()
    asked += [asyncio.create_task(coalescer.ask(number)) for number in (1, 2)]
    await turns()
    with pytest.raises(NoAnswerError, match="full"):
        await coalescer.ask(3)
    far.gate.set()
    assert await asyncio.gather(*asked) == [0, 1, 4]


async def test_a_late_answer_is_given_back() -> None:
    far = FarSide()
    far.gate.clear()
    coalescer = make(far, timeout_s=0.05)
    with pytest.raises(NoAnswerError, match="timeout"):
        await coalescer.ask(3)
    far.gate.set()
    await turns()
    assert far.unwanted == [(3, 9)]


async def test_a_cancelled_asker_gets_nothing_and_spoils_nothing() -> None:
    far = FarSide()
    far.gate.clear()
    coalescer = make(far)
    asked = [asyncio.create_task(coalescer.ask(number)) for number in (2, 3)]
    await turns()
    asked[0].cancel()
    await asyncio.sleep(0)
    far.gate.set()
    assert await asked[1] == 9
    with pytest.raises(asyncio.CancelledError):
        await asked[0]
    assert far.unwanted == [(2, 4)]


async def test_an_asker_cancelled_in_the_turn_of_its_answer_gives_it_back() -> None:
    far = FarSide()
    coalescer = make(far)
    asked = asyncio.create_task(coalescer.ask(2))
    answered = asyncio.Event()

    async def send(questions: list[int], left_s: float) -> Sequence[int]:
        # The answer is set in the turn in which this returns; cancel right behind it.
        asyncio.get_running_loop().call_soon(asked.cancel)
        answered.set()
        return [4]

    coalescer._send = send
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert answered.is_set()
    assert far.unwanted == [(2, 4)]


async def test_a_question_whose_asker_left_is_not_sent(few: None) -> None:
    far = FarSide()
    far.gate.clear()
    coalescer = make(far)
    asked = [asyncio.create_task(coalescer.ask(1))]
    await turns()
    asked += [asyncio.create_task(coalescer.ask(number)) for number in (2, 3)]
    await turns()
    asked[1].cancel()
    far.gate.set()
    assert await asked[0] == 1
    assert await asked[2] == 9
    assert far.calls == [[1], [3]]


@pytest.mark.parametrize("failure", [NoAnswerError("unavailable"), ValueError("refused")])
async def test_a_failed_call_fails_its_askers_and_only_them(failure: Exception) -> None:
    far = FarSide()
    far.failure = failure
    coalescer = make(far)
    outcomes = await asyncio.gather(coalescer.ask(1), coalescer.ask(2), return_exceptions=True)
    assert outcomes == [failure, failure]
    far.failure = None
    assert await coalescer.ask(3) == 9


async def test_queued_questions_can_be_failed_at_once(few: None) -> None:
    far = FarSide()
    far.gate.clear()
    coalescer = make(far)
    asked = [asyncio.create_task(coalescer.ask(number)) for number in (1, 2)]
    await turns()
    coalescer.fail_queued()
    with pytest.raises(NoAnswerError, match="unavailable"):
        await asked[1]
    far.gate.set()
    assert await asked[0] == 1


class Method:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        elif self._answer is not None:
            future.set_result(self._answer)
        return future


class Actor:
    """Never answers but to ``fingerprint``, which gives what the test says."""

    def __init__(self) -> None:
        self.probed: list[Any] = []

    def __getattr__(self, method: str) -> Method:
        if method == "fingerprint":
            return Method(self.probed.pop(0) if self.probed else "reply")
        return Method(None)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    actor = Actor()
    monkeypatch.setattr(link_module, "ensure_controller", lambda *_, **__: actor)
    monkeypatch.setattr(link_module, "find_or_start", lambda *_: actor)
    return actor


@pytest.mark.parametrize("method", ["drain", "sync", "release"])
async def test_a_slow_answer_to_other_than_decisions_and_reports_is_no_loss(
    actor: Actor, method: str
) -> None:
    link = Link("app", ControllerConfig(), lambda: None, CallMetrics(None))
    with pytest.raises(NoAnswerError, match="timeout"):
        await link.call(method, timeout_s=0.001)
    assert link.up
    assert await link.call("fingerprint", timeout_s=120) == "reply"


@pytest.mark.parametrize("method", ["hello", "report"])
async def test_a_report_without_an_answer_is_a_loss_that_is_repaired(
    actor: Actor, method: str
) -> None:
    downs: list[None] = []
    link = Link("app", ControllerConfig(), lambda: downs.append(None), CallMetrics(None))
    with pytest.raises(NoAnswerError, match="timeout"):
        await link.call(method, timeout_s=0.001)
    assert not link.up
    await _repaired(link)
    assert downs == [None]


async def test_who_gave_up_waiting_hears_of_the_answer_that_comes_after_all(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[asyncio.Future[Any]] = []

    def ask(_self: Method, *_args: Any) -> asyncio.Future[Any]:
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    link = Link("app", ControllerConfig(), lambda: None, CallMetrics(None))
    late: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(Method, "remote", ask)
        for _ in range(2):
            with pytest.raises(NoAnswerError, match="timeout"):
                await link.ask("endpoint", timeout_s=0.001, on_late=late.append)
        with pytest.raises(NoAnswerError, match="timeout"):
            await link.ask("endpoint", timeout_s=0.001)
    asked[0].set_result("reply")
    asked[1].set_exception(KeyError("no answer"))
    assert asked[2].cancelled()
    await asyncio.sleep(0)
    assert late == ["reply"]


async def test_an_unexpected_failure_of_a_probe_does_not_end_the_repair(
    actor: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link("app", ControllerConfig(), lambda: None, CallMetrics(None))
    actor.probed = [KeyError("unheard of"), KeyError("unheard of")]
    link.lost()
    await _repaired(link)
    assert caplog.text.count("unheard of") >= 2
    # And the next loss is repaired as well.
    link.lost()
    assert not link.up
    await _repaired(link)


async def _repaired(link: Link) -> None:
    async with asyncio.timeout(120):
        while not link.up:  # noqa: ASYNC110 - nothing else waits for it
            await asyncio.sleep(0.001)
