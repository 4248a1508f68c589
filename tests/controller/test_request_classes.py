"""The classes of live requests."""

from __future__ import annotations

from sluice.controller.observability.recent_decisions import UNKNOWN_CLASS, RequestClasses


def test_classes_are_remembered_until_the_end() -> None:
    classes = RequestClasses()
    classes.note(1, "chat")
    classes.note(2, "batch")
    assert classes.of([2, 1, 3]) == ["batch", "chat", UNKNOWN_CLASS]
    classes.ended([1, 77])
    assert classes.of([1, 2]) == [UNKNOWN_CLASS, "batch"]


def test_requests_that_never_end_are_forgotten_in_the_end() -> None:
    classes = RequestClasses(limit=20)
    for key in range(1_000):
        classes.note(key, "chat")
        assert len(classes) <= 20
        assert classes.of([key]) == ["chat"]
    assert classes.of([900]) == [UNKNOWN_CLASS]
