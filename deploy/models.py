"""Several models behind one endpoint: the settings of each, and the settings they share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from sluice.controller.config import ControllerConfig
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.pools import Pool, pools_of

ROUTER_DEPLOYMENT = "Router"
MAX_MODELS = 64
"""Most models of an application: each labels metrics and has replicas and a controller."""

ModelName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$", max_length=128)
]

_OPTIONS = {"policy": "policy_options", "admission": "admission_options"}
"""Fields that choose a policy -> the fields that are only good for that policy."""

_SIZES = ("count", "autoscaling")
"""Fields for the number of replicas without pools; unused with ``pools``."""


class ModelConfig(BaseModel):
    """One of several models."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineConfig = Field(default_factory=EngineConfig, description="Its engine.")
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Its replicas.")
    controller: ControllerConfig = Field(
        default_factory=ControllerConfig, description="Its controller."
    )

    @model_validator(mode="after")
    def _check_pools(self) -> ModelConfig:
        pools = pools_of(self.engine, self.replica)
        if self.controller.startup_s is not None and not _may_be_none(pools):
            raise ValueError(
                "controller.startup_s has no effect: it is for models with min_replicas: 0"
            )
        return self


class ModelFleet(NamedTuple):
    """One model with all that is deployed for it.

    Attributes:
        model: the name that requests use.
        key: tells it from the other models in names of deployments and actors; ``None`` where
            there is one model that the configuration does not name.
        config: its engine, replicas and controller.
    """

    model: str
    key: str | None
    config: ModelConfig

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of its replicas, at least one."""
        return pools_of(self.config.engine, self.config.replica)

    @property
    def controller(self) -> ControllerConfig:
        """The configuration of its controller, with ``startup_s`` if the model may have no
        replica."""
        config, scaled = self.config.controller, self.pools[0].replica.autoscaling
        if scaled is None or not _may_be_none(self.pools) or config.startup_s is not None:
            return config
        return config.model_copy(update={"startup_s": scaled.make().startup_s})


def _may_be_none(pools: Sequence[Pool]) -> bool:
    """Whether the pools of a model may have no replica."""
    scaled = pools[0].replica.autoscaling
    return scaled is not None and not scaled.min_replicas


def key_of(model: str) -> str:
    """``model`` as a part of the name of a deployment."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", model)


def with_shared(data: Mapping[str, Any]) -> dict[str, Any]:
    """The raw configuration ``data``; fields that one of its ``models`` omits are taken from the
    sections that they share. What is of a wrong type is left for the validation to refuse.

    Raises:
        ValueError: a name is given twice over.
    """
    models = data.get("models")
    if not isinstance(models, Mapping) or not models:
        return dict(data)
    if _plain(data.get("engine")).get("served_model_name") is not None:
        raise ValueError(
            "engine.served_model_name cannot be set beside models: their keys are the names"
        )
    filled = {name: _filled(data, name, entry) for name, entry in models.items()}
    return {**data, "models": filled}


def _filled(data: Mapping[str, Any], name: Any, entry: Any) -> Any:
    if isinstance(entry, ModelConfig):
        entry = entry.model_dump(exclude_unset=True)
    if entry is None:
        entry = {}
    if not isinstance(entry, Mapping):
        return entry
    filled = dict(entry)
    for section in ModelConfig.model_fields:
        own = entry.get(section, {})
        if isinstance(own, Mapping | BaseModel):
            filled[section] = _laid_over(_plain(data.get(section)), _plain(own))
    if isinstance(filled["engine"], dict):
        served = filled["engine"].setdefault("served_model_name", name) or name
        if served != name:
            raise ValueError(
                f"models.{name}.engine.served_model_name is {served!r}: leave it out, the name is "
                f"{name!r}"
            )
        filled["engine"]["served_model_name"] = name
    return filled


def _laid_over(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """``shared`` overridden by ``own``, field by field. Shared options of a policy that ``own``
    replaces are dropped, and so are shared settings of the number of replicas that conflict with
    those of ``own``."""
    foreign = {
        options
        for choice, options in _OPTIONS.items()
        if own.get(choice, shared.get(choice)) != shared.get(choice)
    }
    if own.get("pools"):
        foreign.update(_SIZES)
    elif any(own.get(size) is not None for size in _SIZES):
        foreign.add("pools")
    return {name: value for name, value in shared.items() if name not in foreign} | own


def _plain(section: Any) -> dict[str, Any]:
    if isinstance(section, BaseModel):
        return section.model_dump(exclude_unset=True)
    return dict(section) if isinstance(section, Mapping) else {}
