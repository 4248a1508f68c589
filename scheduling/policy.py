"""What batch and routing policies have in common: validated options, and making one by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict


class PolicyOptions(BaseModel):
    """Base of every policy's options: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Policy(Protocol):
    """A named algorithm with options.

    ``name`` is its registered name, ``source`` where it was published, ``Options`` what can be set.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    Options: ClassVar[type[PolicyOptions]]

    def __init__(self, options: PolicyOptions | None = None) -> None: ...


P = TypeVar("P", bound=Policy)


def make(
    kind: str, policies: Mapping[str, type[P]], name: str, options: Mapping[str, Any] | None
) -> P:
    """Build the policy called ``name`` from the registry ``policies`` of ``kind`` policies.

    Raises:
        ValueError: no such policy, or an option that is unknown or out of range (pydantic's
            ``ValidationError``, which is a ``ValueError``).
    """
    if name not in policies:
        raise ValueError(f"unknown {kind} policy {name!r}; known: {', '.join(sorted(policies))}")
    policy = policies[name]
    return policy(policy.Options.model_validate(dict(options or {})))
