"""The process that tries grammars, where it starts late."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.protocol.errors import RequestError
from sluice.replica.grammar import check
from sluice.replica.grammar.check import GrammarCheck, Result


def late(connection: Any, release: str, _limit_s: float) -> None:
    """Is ready when a file is there, and then finds every constraint malformed."""
    while not Path(release).exists():
        time.sleep(0.01)
    connection.send(Result(None))
    while True:
        connection.recv()
        connection.send(Result("malformed", "as it must be"))


async def test_a_late_start_is_not_taken_for_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "serve", late)
    monkeypatch.setattr(check, "START_S", 0.5)
    release = tmp_path / "release"
    checker = GrammarCheck(str(release), 1.0)
    checker.start()

    async def tried(value: int) -> tuple[int, str]:
        with pytest.raises(RequestError) as refused:
            await checker.check(SimpleNamespace(json=value), frozenset())
        return refused.value.status, str(refused.value)

    status, message = await tried(1)
    assert (status, "could not be checked" in message) == (503, True)
    release.touch()
    monkeypatch.setattr(check, "START_S", 120.0)
    for value in (1, 2):
        status, message = await tried(value)
        assert (status, "is malformed: as it must be" in message) == (400, True)
    checker.stop()
