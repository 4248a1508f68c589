"""The configuration of a whole Sluice application, read from YAML and flags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sluice.controller.config import ControllerConfig
from sluice.deploy.models import MAX_MODELS, ModelConfig, ModelFleet, ModelName, key_of, with_shared
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.router.config import RouterConfig
from sluice.telemetry.config import TelemetryConfig

_FIELD = re.compile(r"[a-z_]{0,40}[0-9]?[a-z_]{0,40}")
"""Pattern of field names. A mistyped name matches it, a secret key hardly ever."""


class SluiceConfig(BaseModel):
    """Everything that `sluice serve` and `serve deploy` need. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        default="sluice",
        pattern=r"^[a-z0-9][a-z0-9-]{0,62}$",
        description="Name of the Serve application that `sluice serve` starts. With `serve deploy` "
        "the file's own name of the application counts.",
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The engine.")
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="The replicas.")
    controller: ControllerConfig = Field(
        default_factory=ControllerConfig, description="The central controller."
    )
    router: RouterConfig = Field(
        default_factory=RouterConfig, description="The router replicas and what they accept."
    )
    telemetry: TelemetryConfig = Field(
        default_factory=TelemetryConfig, description="Log lines and traces of requests."
    )
    models: dict[ModelName, ModelConfig] = Field(
        default_factory=dict,
        max_length=MAX_MODELS,
        description="Several models behind one endpoint, by the names that requests use. What an "
        "entry leaves out of `engine`, `replica` and `controller` it takes from the sections of "
        "these names above. Empty: those sections are the one model.",
    )

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any) -> Any:
        return with_shared(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _check_names(self) -> SluiceConfig:
        keys = [fleet.key for fleet in self.fleets]
        if len(set(keys)) < len(keys):
            raise ValueError(
                "two names of models differ only in characters that names of deployments may not "
                "have: / : @"
            )
        engines = [fleet.config.engine for fleet in self.fleets]
        names = [name for engine in engines for name in (engine.served_name, *engine.adapters)]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"models and adapters share names: {', '.join(doubles)}")
        return self

    @model_validator(mode="after")
    def _check_output_tokens(self) -> SluiceConfig:
        for fleet in self.fleets:
            unknown = sorted(set(fleet.config.controller.output_tokens) - set(self.router.classes))
            if unknown:
                known = ", ".join(sorted(self.router.classes))
                raise ValueError(
                    f"controller.output_tokens names {', '.join(unknown)}, which router.classes "
                    f"does not have; its classes are: {known}"
                )
        return self

    @model_validator(mode="after")
    def _check_cells(self) -> SluiceConfig:
        for fleet in self.fleets:
            if fleet.config.controller.cells == 1:
                continue
            if fleet.config.replica.elastic or any(pool.role != "mixed" for pool in fleet.pools):
                raise ValueError(
                    "controller.cells must be 1 with replica.elastic, and with pools of prefill "
                    "and decode replicas: each cell places requests on its own replicas, which may "
                    "lack one of the roles"
                )
            if fleet.controller.startup_s is not None:
                raise ValueError(
                    "controller.cells must be 1 with min_replicas: 0: the first replica may belong "
                    "to another cell than the one that was asked"
                )
        return self

    @property
    def fleets(self) -> tuple[ModelFleet, ...]:
        """Every model with its deployed parts, in the order of the configuration."""
        if self.models:
            return tuple(ModelFleet(name, key_of(name), it) for name, it in self.models.items())
        one = ModelConfig(engine=self.engine, replica=self.replica, controller=self.controller)
        return (ModelFleet(self.engine.served_name, None, one),)


def load_config(path: Path | None, overrides: dict[str, Any] | None = None) -> SluiceConfig:
    """Read ``path`` (YAML) and lay ``overrides`` (nested, as in the file) over it.

    Raises:
        ValueError: the file is not a YAML mapping, or a value is not allowed; the message names
            every such field and what is allowed.
        OSError: the file cannot be read.
    """
    data = {} if path is None else read_mapping(path)
    return parse_config(_merge(data, overrides or {}))


def read_mapping(path: Path) -> dict[str, Any]:
    """The YAML mapping in ``path``, unchecked.

    Raises:
        ValueError: it is not a YAML mapping.
        OSError: the file cannot be read.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    except yaml.YAMLError as error:
        # Without the parser's message: it shows the line, which may hold a key.
        raise ValueError(f"{path} is not YAML{_place_of(error)}") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        # Other errors of the parser: an invalid date or number, a tag, or too deep nesting.
        raise ValueError(
            f"{path} cannot be read: a value in it is not of its type, or nested too deeply"
        ) from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a mapping at its top level")
    return data


def parse_config(data: Mapping[str, Any]) -> SluiceConfig:
    """The configuration in ``data``.

    Raises:
        ValueError: every field that is not allowed, and what is; without the values, because one
            of them may be a key.
    """
    try:
        return SluiceConfig.model_validate(dict(data))
    except ValidationError as error:
        lines = [
            f"{_name_of(entry['loc'], entry['type'])}: {_fault(entry['loc'], entry)}"
            for entry in error.errors(include_input=False, include_url=False)
        ]
        raise ValueError("the configuration is not valid:\n" + "\n".join(lines)) from None


def _name_of(parts: tuple[int | str, ...], fault: str) -> str:
    """The place of a fault. An unknown name may be a misplaced secret key and is not shown."""
    names = [str(part) for part in parts]  # none where the parts are at odds
    if fault == "extra_forbidden" and not _FIELD.fullmatch(names[-1]):
        names[-1] = "(no name of a field, so not shown)"
    return ".".join(names)


def _fault(parts: tuple[int | str, ...], entry: Mapping[str, Any]) -> str:
    """What is wrong there, and for an unknown name the one that was probably meant."""
    if entry["type"] != "extra_forbidden":
        return str(entry["msg"])
    near = difflib.get_close_matches(str(parts[-1]), sorted(_names_in(parts[:-1])), n=1)
    return "there is no such key" + (f"; did you mean {near[0]}?" if near else "")


def _names_in(parts: tuple[int | str, ...]) -> set[str]:
    """The names of the fields at a place of the configuration."""
    models: set[type[BaseModel]] = {SluiceConfig}
    for part in parts:
        fields = [model.model_fields[str(part)] for model in models if part in model.model_fields]
        # Any other part is a name or a number in a mapping or list of models, or a model's tag.
        if fields:
            models = {each for field in fields for each in _models_in(field.annotation)}
    return {name for model in models for name in model.model_fields}


def _models_in(annotation: Any) -> set[type[BaseModel]]:
    """The models in a field's type: itself, or within optional ones, mappings and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {model for inner in get_args(annotation) for model in _models_in(inner)}


def _place_of(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", at line {mark.line + 1}, column {mark.column + 1}"


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged
