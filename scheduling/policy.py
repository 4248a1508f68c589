"""What all policies have in common: validated options, and a registry that knows them by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from sluice.scheduling.roles import Role


class PolicyOptions(BaseModel):
    """Base of every policy's options: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def for_role(self, role: Role) -> Self:
        """The same with what a replica's ``role`` decides where options leave it open."""
        return self


class Policy(Protocol):
    """A named algorithm with options; ``source`` is where it was published."""

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]]

    def __init__(self, options: PolicyOptions | None = None) -> None: ...


P = TypeVar("P", bound=Policy)


class Registry(Mapping[str, type[P]]):
    """The policies of one kind: the project's ``own``, then those of installed packages (entry
    points of the group ``sluice.<kind>``). A package is imported only when its policy is asked for,
    so a broken one does no harm where it is not used."""

    def __init__(self, kind: str, base: type, own: Iterable[type[P]]) -> None:
        self._kind = kind
        self._base = base
        self.own: dict[str, type[P]] = {each.name: each for each in own}

    def __getitem__(self, name: str) -> type[P]:
        if name in self.own:
            return self.own[name]
        return self._load(self._offered[name])

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self._offered

    def __len__(self) -> int:
        return len(self.own) + len(self._offered)

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._offered

    def make(self, name: str, options: Mapping[str, Any] | None = None, role: Role = "mixed") -> P:
        """Build the policy ``name``. Raises ValueError if it is unknown or cannot be loaded, or an
        option is wrong (pydantic's ``ValidationError`` is one)."""
        if name not in self:
            raise ValueError(
                f"unknown {self._kind} policy {name!r}; known: {', '.join(sorted(self))}"
            )
        policy = self[name]
        return policy(policy.Options.model_validate(dict(options or {})).for_role(role))

    @cached_property
    def _offered(self) -> dict[str, EntryPoint]:
        """Of installed packages, by name. Raises ValueError for a name with two policies."""
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=f"sluice.{self._kind}"):
            other = found.get(entry.name)
            # A package that is found twice on the path is one package.
            if entry.name in self.own or (other is not None and other.value != entry.value):
                raise ValueError(
                    f"the {self._kind} policy {entry.name!r} of {_package(entry)} has the name of "
                    f"{'one of Sluice' if other is None else f'that of {_package(other)}'}; "
                    f"one of the two must be renamed or uninstalled"
                )
            found[entry.name] = entry
        return found

    def _load(self, entry: EntryPoint) -> type[P]:
        """Raises ValueError if the package's policy cannot be imported or is of another kind or
        name."""
        offered = f"the {self._kind} policy {entry.name!r} of {_package(entry)}"
        try:
            policy: type[P] = entry.load()
        except Exception as error:
            raise ValueError(f"{offered} cannot be imported: {error!r}") from error
        if not isinstance(policy, type) or not issubclass(policy, self._base):
            raise ValueError(f"{offered} must be a subclass of {self._base.__name__}")
        if getattr(policy, "name", None) != entry.name:
            raise ValueError(f"{offered} must have that name as its attribute `name`")
        return policy


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
