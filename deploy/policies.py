"""Every policy that can be configured, with its source and options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel

from sluice.scheduling import admission, autoscaling, batching, routing
from sluice.scheduling.policy import Policy


class Listed(NamedTuple):
    """A policy as users see it.

    Attributes:
        kind: ``batch``, ``admission``, ``routing`` or ``autoscaling``.
        name: as configurations name it.
        source: where it was published.
        options: name -> default and description.
    """

    kind: str
    name: str
    source: str
    options: dict[str, dict[str, Any]]


def policies() -> list[Listed]:
    """All policies, as ``engine.policy``, ``controller.admission``, ``controller.policy`` and
    ``replica.autoscaling.policy`` name them."""
    kinds: dict[str, Iterable[type[Policy]]] = {
        "batch": batching.POLICIES.values(),
        "admission": admission.POLICIES.values(),
        "routing": routing.POLICIES.values(),
        "autoscaling": autoscaling.POLICIES.values(),
    }
    return [
        Listed(kind, policy.name, policy.source, _options(policy.Options))
        for kind, registered in kinds.items()
        for policy in registered
    ]


def _options(model: type[BaseModel]) -> dict[str, Any]:
    return {
        field.alias or name: {"default": field.default, "description": field.description or ""}
        for name, field in model.model_fields.items()
    }
