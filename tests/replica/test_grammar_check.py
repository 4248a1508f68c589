"""The process that tries grammars, where it starts late or ends."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.replica.grammar import check
from sluice.replica.grammar.check import MALFORMED, UNKNOWN, Constraint, GrammarCheck, Verdict

CONSTRAINT = Constraint(SimpleNamespace(json_object=None), frozenset())


def late(connection: Any, release: str, _limit_s: float) -> None:
    """Is ready when a file is there, and then finds every constraint malformed."""
    from pathlib import Path

    while not Path(release).exists():
        time.sleep(0.01)
    connection.send(Verdict(None))
    while True:
        connection.recv()
        connection.send(Verdict(MALFORMED, "as it must be"))


def test_a_late_start_is_not_taken_for_a_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(check, "serve", late)
    monkeypatch.setattr(check, "START_S", 0.5)
    release = tmp_path / "release"
    checker = GrammarCheck(str(release), 1.0)
    assert not checker._running()
    assert checker._ask(CONSTRAINT).fault == UNKNOWN
    checker._running()
    release.touch()
    monkeypatch.setattr(check, "START_S", 120.0)
    assert checker._ask(CONSTRAINT).fault == MALFORMED
    assert checker._ask(CONSTRAINT).fault == MALFORMED
    checker.stop()
