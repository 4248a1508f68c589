"""The link's repair, where what it meets is not what it expects. No Ray: the actor is a stand-in,
the link is real; the conversation with a real actor is in ``test_client.py``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice.controller import cell_client as link_module
from sluice.controller.cell_client import Link
from sluice.controller.config import ControllerConfig
from sluice.controller.transport.channel import NoAnswerError


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
    link = Link("app", ControllerConfig(), lambda: None)
    with pytest.raises(NoAnswerError, match="timeout"):
        await link.call(method, timeout_s=0.001)
    assert link.up
    assert await link.call("fingerprint", timeout_s=120) == "reply"


@pytest.mark.parametrize("method", ["hello", "report"])
async def test_a_report_without_an_answer_is_a_loss_that_is_repaired(
    actor: Actor, method: str
) -> None:
    downs: list[None] = []
    link = Link("app", ControllerConfig(), lambda: downs.append(None))
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

    link = Link("app", ControllerConfig(), lambda: None)
    late: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(Method, "remote", ask)
        for _ in range(2):
            with pytest.raises(NoAnswerError, match="timeout"):
                await link.call("endpoint", timeout_s=0.001, on_late=late.append)
        with pytest.raises(NoAnswerError, match="timeout"):
            await link.call("endpoint", timeout_s=0.001)
    asked[0].set_result("reply")
    asked[1].set_exception(KeyError("no answer"))
    assert asked[2].cancelled()
    await asyncio.sleep(0)
    assert late == ["reply"]


async def test_an_unexpected_failure_of_a_probe_does_not_end_the_repair(
    actor: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link("app", ControllerConfig(), lambda: None)
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
