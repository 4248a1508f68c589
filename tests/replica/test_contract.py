"""What a changed name or signature of a package does to code that uses it, on classes made here."""

from __future__ import annotations

import abc
import sys
from types import ModuleType
from typing import Any

import pytest

from sluice.replica.vllm.contract import SUPPORTED, Part, age, takes, unfit, unmet


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.25.1", "older"),
        ("0.26.0", "known"),
        ("{}.{}.7.dev1+g12".format(*SUPPORTED[1]), "known"),
        ("0.99", "unknown"),
        ("1.0.0", "unknown"),
        ("dev", "unknown"),
    ],
)
def test_only_older_versions_are_refused_by_their_number(version: str, found: str) -> None:
    assert age(version, SUPPORTED) == found


class Theirs:
    def __init__(self, config: Any) -> None:
        self.waiting: list[Any] = []
        self.config = config

    def schedule(self, throttle: bool = False) -> None:
        self.split(1, 2)

    def split(self, request: Any, tokens: int, *, aligned: bool = True) -> None: ...

    @staticmethod
    def blocked(status: int) -> bool:
        return bool(status)

    @property
    def length(self) -> int:
        return 0


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("a_package")
    module.Theirs = Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_package", module)
    return "a_package:Theirs"


def test_what_is_there_is_found(place: str) -> None:
    used = "schedule() split(_, _, aligned=) blocked(_) length"
    met = Part(("another:Theirs", place), used, "waiting length", "split", "schedule")
    assert unmet([met, Part(("a_package",), "Theirs(_)")]) == []


@pytest.mark.parametrize(
    ("part", "missing"),
    [
        ({"used": "split(_)"}, "Theirs.split(_): it takes (self, request, tokens, aligned=)"),
        (
            {"used": "split(_, _, whole=)"},
            "Theirs.split(_, _, whole=): it takes (self, request, tokens, aligned=)",
        ),
        ({"used": "blocked(_, _)"}, "Theirs.blocked(_, _): it takes (status)"),
        ({"used": "gone(_)"}, "Theirs.gone"),
        ({"made": "waiting running"}, "Theirs.running"),
        ({"called": "split cut", "by": "schedule"}, "cut in Theirs.schedule"),
        ({"called": "cut", "by": "plan"}, "cut in Theirs.plan"),
    ],
)
def test_what_is_missing_is_named(place: str, part: dict[str, str], missing: str) -> None:
    assert unmet([Part((place,), **part)]) == [missing]


def test_a_class_that_is_nowhere_is_named_with_all_its_places(place: str) -> None:
    places = ("no_such_package:Theirs", "a_package:Other")
    (missing,) = unmet([Part(places)])
    assert (
        "no_such_package:Theirs (No module named 'no_such_package') or a_package:Other" in missing
    )


def plain(self: Any, request: Any, tokens: int) -> None: ...
def passes_on(self: Any, request: Any, tokens: int, *args: Any, **kwargs: Any) -> None: ...
def renamed(self: Any, each: Any, count: int, *, aligned: bool = True) -> None: ...


def test_an_override_takes_what_it_may_be_given() -> None:
    assert takes(passes_on, Theirs.split)
    assert takes(renamed, Theirs.split)
    assert not takes(plain, Theirs.split)
    assert not takes(plain, Theirs.schedule)


def test_overrides_are_compared_with_the_package_and_not_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Theirs, "__module__", "a_package")
    for name in ("schedule", "split"):
        monkeypatch.setattr(getattr(Theirs, name), "__module__", "a_package")

    class Mixin:
        def split(self, request: Any, tokens: int) -> None: ...

    class Ours(Mixin, Theirs):
        def schedule(self, *args: Any, **kwargs: Any) -> None: ...

        def own(self, anything: int) -> None: ...

    class Grammar(abc.ABC):
        @abc.abstractmethod
        def accept(self, tokens: list[int]) -> bool: ...

    class Bounded(Grammar):
        pass

    for kind in (Mixin, Ours, Bounded):
        kind.__module__ = "sluice.somewhere"
    assert unfit([Ours, Bounded]) == [
        "Theirs.split(self, request, tokens, aligned=) as Ours overrides it: "
        "(self, request, tokens)",
        "Bounded without accept",
    ]
