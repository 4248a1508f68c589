"""The supported versions of vLLM, and checks that the installed one has what Sluice uses: names,
arguments of calls, and those of overridden methods.

Names alone do not find a changed signature. Arguments are compared by number, and by name where
they have a default, as these are usually passed by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from inspect import Parameter, isclass, isfunction, signature, unwrap
from typing import Any, Final, Literal, NamedTuple

Versions = tuple[tuple[int, int], tuple[int, int]]
"""The oldest supported minor version, and the newest that was run."""

SUPPORTED: Final[Versions] = ((0, 26), (0, 33))  # Versions in which batch plans can be executed

WITH_PREEMPTION: Final[Versions] = ((0, 26), (0, 32))
"""Versions in which running prefills can be preempted."""

WITH_TRANSFER: Final[Versions] = ((0, 29), (0, 32))
"""Versions in which Sluice's connector can transfer KV."""

ASYNC_TRANSFER: Final[Versions] = ((0, 32), (0, 33))
"""Versions in which KV is transferred under asynchronous scheduling. In 0.29 a token was lost where
KV was short; 0.30 and 0.31 were not run so."""

WITH_PIPELINE: Final[Versions] = ((0, 29), (0, 32))
"""Versions in which several batches can be in a pipeline: a request that is preempted while one of
its tokens is on the way waits for that token."""

WITH_DATA_PARALLEL: Final[Versions] = ((0, 32), (0, 32))
"""Versions in which one engine can have several ranks, each with a queue of its own."""

WITH_HOST_MEMORY: Final[Versions] = ((0, 32), (0, 32))
"""Versions in which what vLLM keeps in the memory of the host is known."""

WITH_KEPT_KV: Final[Versions] = ((0, 32), (0, 32))
"""Versions in which sessions' KV is evicted by worth; others evict it by time of use."""

WITH_SPECULATION: Final[Versions] = ((0, 26), (0, 32))
"""Versions in which the plan can choose how many drafted tokens are checked."""

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")


def age(version: str, versions: Versions) -> Literal["older", "known", "unknown"]:
    """Whether a version is too old, one that was run, or unknown: newer, or without a number."""
    match = _RELEASE.match(version)
    if match is None:
        return "unknown"
    oldest, newest = versions
    release = int(match[1]), int(match[2])
    return "older" if release < oldest else "known" if release <= newest else "unknown"


_OWN: Final = __name__.partition(".")[0]
_USE: Final = re.compile(r"(\w+)(\([^)]*\))?")
_VARIABLE: Final[tuple[Any, ...]] = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class Part(NamedTuple):
    """What is used of a class or a module, in names separated by blanks.

    ``places``: ``module:Class`` or ``module``, by version. ``used``: ``f(_, _, key=)`` must take
    two arguments by position and ``key``. ``made``: set by the constructor. ``called``: in the code
    of ``by``."""

    places: tuple[str, ...]
    used: str = ""
    made: str = ""
    called: str = ""
    by: str = "__init__"


def unmet(parts: Iterable[Part]) -> list[str]:
    """What is missing of ``parts``."""
    return [each for part in parts for each in _unmet(part)]


def unfit(kinds: Iterable[type]) -> list[str]:
    """Methods of ``kinds`` that do not take vLLM's arguments, and missing abstract ones."""
    found = []
    for kind in kinds:
        absent = sorted(getattr(kind, "__abstractmethods__", ()))
        found += [f"{kind.__name__} without {name}" for name in absent]
        found += [
            f"{theirs.__qualname__}{_arguments(theirs)} as {kind.__name__} overrides it: "
            f"{_arguments(ours)}"
            for ours, theirs in _overrides(kind)
            if not takes(ours, theirs)
        ]
    return found


def takes(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether ``ours`` takes every call of ``theirs``, by position or by name."""
    given = [each for each in _parameters(theirs) if each.kind not in _VARIABLE]
    required = [each for each in given if each.default is Parameter.empty and not _by_name(each)]
    named = [each.name for each in given if each not in required]
    positional = [each for each in given if not _by_name(each)]
    only_named = [each.name for each in given if _by_name(each)]
    return binds(ours, len(required), named) and binds(ours, len(positional), only_named)


def binds(function: Callable[..., Any], positional: int, named: Iterable[str] = ()) -> bool:
    """Whether a function takes these arguments; compiled ones without a signature count as such."""
    try:
        signature(function).bind(*[None] * positional, **dict.fromkeys(named))
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def located(places: Iterable[str]) -> Any:
    """The first of ``places`` that exists. Raises ImportError: none; with the reason of each."""
    reasons = []
    for place in places:
        module, _, name = place.partition(":")
        try:
            found = import_module(module)
            return getattr(found, name) if name else found
        except (ImportError, AttributeError) as error:
            reasons.append(f"{place} ({error})")
    raise ImportError(" or ".join(reasons))


def _unmet(part: Part) -> Iterator[str]:
    try:
        owner = located(part.places)
    except ImportError as error:
        yield str(error)
        return
    name = owner.__name__
    for attribute, arguments in _uses(part.used):
        value: Any = getattr(owner, attribute, None)
        if value is None and not hasattr(owner, attribute):
            yield f"{name}.{attribute}"
        elif arguments is not None:
            positional = [each for each in arguments if not each.endswith("=")]
            named = [each[:-1] for each in arguments if each.endswith("=")]
            itself = isclass(owner) and isfunction(value) and not _is_static(owner, attribute)
            if not binds(value, len(positional) + itself, named):
                yield f"{name}.{attribute}({', '.join(arguments)}): it takes {_arguments(value)}"
    if part.made:
        has = {*dir(owner), *_names_in(owner.__init__)}
        yield from (f"{name}.{each}" for each in part.made.split() if each not in has)
    if part.called:
        names = _names_in(getattr(owner, part.by, None))
        yield from (
            f"{each} in {name}.{part.by}" for each in part.called.split() if each not in names
        )


def _names_in(function: Any) -> frozenset[str]:
    """Attributes and functions that the code of a function uses, ignoring decorators."""
    code = getattr(unwrap(function), "__code__", None) if function is not None else None
    return frozenset(code.co_names) if code is not None else frozenset()


def _uses(text: str) -> Iterator[tuple[str, list[str] | None]]:
    """The names, each with the arguments of its call if it is called."""
    for name, called in _USE.findall(text):
        yield name, re.findall(r"\w+=?", called) if called else None


def _overrides(kind: type) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Sluice's functions in ``kind``, each with the one of another package that it overrides."""
    classes = kind.__mro__
    for place, owner in enumerate(classes):
        if owner.__module__.partition(".")[0] != _OWN:
            continue
        for name, ours in vars(owner).items():
            if not isfunction(ours):
                continue
            below = (vars(each).get(name) for each in classes[place + 1 :] if each is not object)
            theirs = next((each for each in below if isfunction(each)), None)
            if theirs is not None and not theirs.__module__.startswith(f"{_OWN}."):
                yield ours, theirs


def _by_name(parameter: Parameter) -> bool:
    return parameter.kind is Parameter.KEYWORD_ONLY


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    return list(signature(function).parameters.values())


def _is_static(owner: type, name: str) -> bool:
    return any(isinstance(vars(each).get(name), staticmethod) for each in owner.__mro__)


def _arguments(function: Callable[..., Any]) -> str:
    stars = dict(zip(_VARIABLE, ("*", "**"), strict=True))
    return "({})".format(
        ", ".join(
            stars.get(each.kind, "") + each.name + ("" if each.default is Parameter.empty else "=")
            for each in _parameters(function)
        )
    )
