"""What can be chosen: every batch, admission and routing policy with its source and options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel

from controller.config import ControllerConfig
from scheduling import batching, routing


class Listed(NamedTuple):
    """A policy as users see it.

    Attributes:
        kind: ``batch``, ``admission`` or ``routing``.
        name: as configurations name it.
        source: where it was published.
        options: name -> default and description.
    """

    kind: str
    name: str
    source: str
    options: dict[str, dict[str, Any]]


def policies() -> list[Listed]:
    """All policies. Admission has no policies of its own to choose: it acts inside the batch policy
    or the controller that its options belong to, and is listed so that they are found."""
    promise = batching.POLICIES["slos_serve"]
    batch, route = batching.POLICIES.values(), routing.POLICIES.values()
    return [
        *(Listed("batch", p.name, p.source, _options(p.Options)) for p in batch),
        Listed(
            "admission",
            "pab",
            "FairBatching §3.4 and appendix A; the controller publishes the budget, the routing "
            "policy `pab` spends it",
            _options(ControllerConfig, ("reference_ttft_ms", "reference_tpot_ms")),
        ),
        Listed(
            "admission",
            "slos_serve",
            "SLOs-Serve §3.2.1 and appendix C; part of the batch policy `slos_serve`",
            _options(promise.Options),
        ),
        *(Listed("routing", p.name, p.source, _options(p.Options)) for p in route),
    ]


def _options(model: type[BaseModel], names: Iterable[str] | None = None) -> dict[str, Any]:
    fields = model.model_fields
    return {
        name: {"default": fields[name].default, "description": fields[name].description or ""}
        for name in (fields if names is None else names)
    }
