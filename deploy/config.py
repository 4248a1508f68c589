"""The configuration of a whole Sluice application, read from YAML and flags."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from sluice.controller.config import ControllerConfig
from sluice.replica.config import EngineConfig, ReplicaConfig
from sluice.replica.pools import Pool, pools_of
from sluice.replica.processes import has_cuda_vllm
from sluice.replica.vllm_args import by_option
from sluice.router.config import RouterConfig
from sluice.telemetry.logs import TelemetryConfig
from sluice.telemetry.phases import phase

# Several models behind one endpoint: the settings of each, and the settings they share.

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
        silent_s = self.replica.heartbeat_s
        if silent_s >= self.controller.aged_after_s:
            raise ValueError(
                f"a replica without news reports every {silent_s:g} s (20 times report_interval_s),"
                f" so controller.stale_after_s must be above {2 * silent_s:g}: one that is silent "
                "for half of it is promised nothing"
            )
        if self.controller.shadow is not None and self.replica.elastic:
            raise ValueError("controller.shadow needs replicas that keep their roles: not elastic")
        if self.controller.startup_s is not None and not _may_be_none(pools):
            raise ValueError(
                "controller.startup_s has no effect: it is for models with min_replicas: 0"
            )
        return self


class ModelFleet(NamedTuple):
    """One model with all that is deployed for it. ``key`` tells it apart in names of deployments
    and actors; ``None`` for a single model that the configuration does not name."""

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


def with_shared(data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with the shared sections filled in for each of its ``models``; wrong types are left
    to the validation. Raises ValueError: a name is given twice over."""
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
    """``shared`` overridden by ``own``, field by field, without the shared options of a policy
    that ``own`` replaces and shared replica numbers that conflict with its own."""
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


def _thinks(engine: EngineConfig) -> bool:
    """Whether it knows which tokens are reasoning, as vLLM needs to bound their number."""
    return (
        not by_option(engine.vllm_args).keys().isdisjoint(("reasoning-parser", "reasoning-config"))
    )


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
    def _check_accepts(self) -> SluiceConfig:
        engines = [fleet.config.engine for fleet in self.fleets]
        names = {name for engine in engines for name in (engine.served_name, *engine.adapters)}
        for name, entry in self.router.classes.items():
            where = f"router.classes.{name}.accepts"
            for each in entry.accepts:
                if each.model is not None and each.model not in names:
                    known = ", ".join(sorted(names))
                    raise ValueError(f"{where}: model {each.model!r} is not one of: {known}")
                if each.thinking_tokens is not None and not all(map(_thinks, engines)):
                    raise ValueError(
                        f"{where}: thinking_tokens needs reasoning-parser or reasoning-config in "
                        "the engine.vllm_args of every model"
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
            return tuple(
                ModelFleet(name, re.sub(r"[^A-Za-z0-9._-]", "-", name), model)
                for name, model in self.models.items()
            )
        one = ModelConfig(engine=self.engine, replica=self.replica, controller=self.controller)
        return (ModelFleet(self.engine.served_name, None, one),)


def load_config(path: Path | None, overrides: dict[str, Any] | None = None) -> SluiceConfig:
    """Read ``path`` (YAML) and lay ``overrides`` (nested) over it. Raises ValueError: see
    :func:`parse_config`; OSError: the file cannot be read."""
    data = {} if path is None else read_mapping(path)
    return parse_config(_merge(data, overrides or {}))


def read_mapping(path: Path) -> dict[str, Any]:
    """The YAML mapping in ``path``, unchecked. Raises ValueError: no mapping; OSError."""
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
    """The configuration in ``data``. Raises ValueError: every field that is not allowed, and what
    is; without the values, because one of them may be a key."""
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


# Checks in seconds, before anything starts, of what engines need: files, vLLM, and a configuration
# that vLLM takes.

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DESCRIPTIONS = ("config.json", "params.json")
"""Files by which vLLM knows a model: Hugging Face's, and Mistral's."""

_HUB_TIMEOUT_S = 10.0

_DRY_RUN_LIMIT_S = 120.0


def vllm_is_here() -> bool:
    """Whether vLLM is installed, without importing it."""
    return find_spec("vllm") is not None


def check_installed(config: SluiceConfig) -> None:
    """Raises ValueError: the software that the engines need is not installed."""
    if _engines(config) and not vllm_is_here():
        raise ValueError(
            "engine.kind is vllm, and vLLM is not installed here: install sluice-serve[vllm], or "
            "sluice-serve[cpu] for machines without a GPU, or set engine.kind simulated"
        )


def has_odd_names(config: SluiceConfig) -> bool:
    """Whether an argument for vLLM is named nowhere in the sources of vLLM's parser, which takes
    seconds to import: most likely misspelt."""
    names = {name for _, pool in _engines(config) for name in by_option(pool.engine.vllm_args)}
    return bool(names) and not names <= parser_words()


def parser_words() -> set[str]:
    """The words in the sources of vLLM's parser, with ``-`` for ``_``. Reads files of 0.2 MB."""
    found = find_spec("vllm")
    files = [
        file
        for folder in map(Path, (found and found.submodule_search_locations) or ())
        for file in (folder / "engine" / "arg_utils.py", *folder.glob("entrypoints/**/cli_args.py"))
    ]
    sources = "".join(file.read_text("utf-8") for file in files if file.is_file())
    return {word.replace("_", "-") for word in re.findall(r"[a-z][\w-]+", sources)}


def engine_faults(config: SluiceConfig, here: bool = True, idle_only: bool = False) -> list[str]:
    """Why engines of ``config`` could not start, as far as the installed vLLM can tell: wrong
    arguments, and, if they would run ``here`` and the model's files are on this machine, an
    impossible configuration. ``idle_only``: of pools that start without a replica, as replicas
    say the same. Takes the 5 to 10 s of importing vLLM if vLLM is configured."""
    if not vllm_is_here():
        return []
    configured = [
        (place, pool)
        for place, pool in _engines(config)
        if (pool.engine.vllm_args or pool.engine.transfer is not None or pool.engine.preemption)
        and not (idle_only and pool.replica.first)
    ]
    if not configured:
        return []
    asked = [
        {
            "engine": pool.engine.model_dump(mode="json", exclude_unset=True),
            "role": pool.role,
            "here": here and (has_cuda_vllm() or not pool.replica.num_gpus),
        }
        for _, pool in configured
    ]
    with phase("vLLM: asked for its arguments"):
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "sluice.replica.dry_run", str(os.getpid())],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_DRY_RUN_LIMIT_S,
            check=False,
        )
    if ran.returncode:  # vLLM itself cannot be imported, perhaps
        why = ran.stderr.strip().splitlines()[-1:] or [f"exit status {ran.returncode}"]
        return [f"engine: vLLM cannot be asked for its arguments: {why[0]}"]
    faults = zip(configured, json.loads(ran.stdout), strict=True)
    return [f"{place}: {' '.join(why.split())}" for (place, _), why in faults if why]


def _engines(config: SluiceConfig) -> list[tuple[str, Pool]]:
    """The pools with vLLM's engines, by the places of their engines in the configuration."""
    found = []
    for fleet in config.fleets:
        model = f"models.{fleet.model}." if config.models else ""
        for pool in fleet.pools:
            where = f"replica.pools.{pool.name}." if fleet.config.replica.pools else ""
            if pool.engine.kind == "vllm":
                found.append((f"{model}{where}engine", pool))
    return found


def check_model(engine: EngineConfig) -> None:
    """Check, without loading it, that the model of ``engine`` is on this machine, or else on the
    hub. Raises ValueError: it is not."""
    profile = engine.latency_profile
    if profile is not None and not profile.expanduser().is_file():
        raise ValueError(f"engine.latency_profile: there is no file {profile}")
    model = engine.model
    if engine.kind != "vllm" or model == "local":
        return
    path = Path(model)
    if path.is_dir():
        has_description = any((path / name).is_file() for name in _DESCRIPTIONS)
        if not has_description and not any(path.glob("*.gguf")):
            raise ValueError(f"engine.model: the folder {model} holds no model: no config.json")
    elif path.is_absolute() or model.startswith((".", "~")):
        if not path.is_file():
            raise ValueError(f"engine.model: there is no folder {model}")
    elif _HUB_ID.fullmatch(model) and not os.environ.get("VLLM_USE_MODELSCOPE"):
        _check_hub(model, by_option(engine.vllm_args))


def _check_hub(model: str, arguments: dict[str, Any]) -> None:
    """See :func:`check_model`. Raises ValueError: there is no such model, or it cannot be had."""
    if find_spec("huggingface_hub") is None:  # it comes with vLLM, which then is not here either
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RevisionNotFoundError,
    )

    revision, cache = arguments.get("revision"), arguments.get("download-dir")
    for name in _DESCRIPTIONS:
        if isinstance(try_to_load_from_cache(model, name, cache, revision), str):
            return
    where = f"engine.model: there is no folder {model} here, and no copy in the hub's cache"
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{where}; HF_HUB_OFFLINE forbids to ask the hub for {model}")
    try:
        HfApi().model_info(model, revision=revision, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        raise ValueError(
            f"engine.model: the hub gives {model} only to accounts that have been granted access: "
            "set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"engine.model: the hub's {model} has no revision {revision}") from None
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 404):
            return  # the hub has a problem, and vLLM asks it again
        raise ValueError(
            f"{where}; the hub has no model {model}, or needs HF_TOKEN to show it"
        ) from None
    except Exception as error:  # of the HTTP client, whose types depend on the hub's version
        raise ValueError(f"{where}; the hub cannot be reached: {error}") from None
