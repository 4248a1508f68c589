"""The options of ``sluice simulate``, read and checked: from text to classes, latency and fleet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sluice.deploy.config import SluiceConfig
from sluice.replica.config import EngineConfig as ReplicaEngine
from sluice.router.config import RouterConfig, ServiceClass
from sluice.scheduling import batching, routing
from sluice.scheduling.latency.model import FAMILIES, LatencyModel, LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.planning.capacity import PlannedFleet
from sluice.simulation.planning.traffic import SharedClass

MOST_CLASSES = 16
MAX_SHARE = 1e6

_SLO_FIELDS = ("name", "ttft_ms", "tpot_ms", "tpot_anchor", "e2e_ms", "priority", "share")

_VLLM_LIMITS = {
    "num-gpu-blocks-override": "kv_blocks",
    "block-size": "block_tokens",
    "max-num-batched-tokens": "max_batch_tokens",
    "max-num-seqs": "max_sequences",
}


M = TypeVar("M", bound=BaseModel)


class OptionError(ValueError):
    """An option's value is not allowed. The message names option, fault and valid values."""


def _pairs(option: str, text: str, known: Sequence[str]) -> dict[str, str]:
    """``name=value,name=value`` by name."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or not value:
            raise OptionError(f"{option}: {part.strip()!r} is not of the form name=value")
        if name not in known:
            raise OptionError(f"{option}: unknown name {name!r}; known: {', '.join(known)}")
        if name in found:
            raise OptionError(f"{option}: {name} is given twice")
        found[name] = value
    return found


def _number(option: str, name: str, value: str, most: float) -> float:
    """A finite number from 0 to ``most``."""
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not (isfinite(number) and 0 <= number <= most):
        raise OptionError(f"{option}: {name} must be a number from 0 to {most:g}, got {value!r}")
    return number


def _share(option: str, name: str, value: str) -> float:
    share = _number(option, name, value, MAX_SHARE)
    if share == 0:
        raise OptionError(f"{option}: {name} must be above 0; leave the class out instead")
    return share


def classes(
    config: SluiceConfig, slos: Sequence[str], shares: Sequence[str]
) -> tuple[SharedClass, ...]:
    """The service classes that requests are drawn into.

    Args:
        config: its classes are used where ``slos`` is empty: those in ``shares``, and without any
            its default class alone, as for requests that name none.
        slos: texts such as ``ttft_ms=800,tpot_ms=80,priority=2,share=0.5``, each a class.
        shares: texts such as ``interactive=0.5``, classes of the configuration.

    Raises:
        OptionError: a text that is not allowed.
    """
    if slos and shares:
        raise OptionError("--share is for classes of --config; with --slo say share=... in it")
    if len(slos) > MOST_CLASSES:
        raise OptionError(f"--slo: at most {MOST_CLASSES} classes, got {len(slos)}")
    if slos:
        return _distinct([_stated(text, number) for number, text in enumerate(slos, 1)])
    known = config.router.classes
    if not shares:
        name = config.router.default_class
        return (SharedClass(known[name].objective(name), 1.0),)
    chosen = []
    for text in shares:
        ((name, value),) = _pairs("--share", text, list(known)).items()
        chosen.append(SharedClass(known[name].objective(name), _share("--share", name, value)))
    return _distinct(chosen)


def _distinct(chosen: Sequence[SharedClass]) -> tuple[SharedClass, ...]:
    names = [each.slo.service_class for each in chosen]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise OptionError(f"a class is given twice: {', '.join(doubles)}")
    return tuple(chosen)


def _stated(text: str, number: int) -> SharedClass:
    given = _pairs("--slo", text, _SLO_FIELDS)
    name = given.pop("name", f"class-{number}")
    share = _share("--slo", "share", given.pop("share", "1"))
    try:
        # Refuse what a router's configuration refuses, such as a name that is invalid in a header.
        made = ServiceClass.model_validate(given)
        RouterConfig(classes={name: made}, default_class=name)
    except ValidationError as error:
        raise OptionError(f"--slo: {_problems(error)}") from None
    return SharedClass(made.objective(name), share)


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, part['loc']))}: {part['msg']}".removeprefix(": ")
        for part in error.errors(include_url=False)
    )


def latency(config: SluiceConfig, profile: Path | None, stated: str | None) -> LatencyModel:
    """The step times of a replica.

    Args:
        config: where neither of the others is given: the profile that it names, or its simulated
            engine.
        profile: a file that a replica keeps.
        stated: coefficients such as ``a=0.009,b=8e-5``, of the linear family or another one that
            ``family=`` names.

    Raises:
        OptionError: none is given, more than one is, or it cannot be read.
    """
    if profile is not None and stated is not None:
        raise OptionError("give --profile or --latency, not both")
    if stated is not None:
        return _stated_latency(stated)
    path = profile or config.engine.latency_profile
    if path is not None:
        try:
            return LatencyProfile.from_json(path.read_text(encoding="utf-8")).model
        except OSError as error:
            raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise OptionError(f"{path}: {error}") from error
    if config.engine.kind == "simulated":
        engine = config.engine.simulated
        constants = (engine.step_s, engine.token_s, engine.context_token_s, engine.quadratic_s)
        if not any(constants):
            raise OptionError("the simulated engine of the configuration takes no time at all")
        return LinearLatency(*constants)
    kept = config.engine.cache_dir / "profiles"
    raise OptionError(
        f"no latency is known: give --profile FILE (replicas keep theirs in {kept}) or --latency "
        "a=SECONDS,b=SECONDS"
    )


def _stated_latency(text: str) -> LatencyModel:
    everything = ["family", *dict.fromkeys(n for model in FAMILIES.values() for n in model.names)]
    given = _pairs("--latency", text, everything)
    family = given.pop("family", LinearLatency.family)
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise OptionError(f"--latency: unknown family {family!r}; known: {known}")
    model = FAMILIES[family]
    needed = {f.name for f in fields(model) if f.init and f.default is MISSING}
    if wrong := given.keys() - set(model.names) or needed - given.keys():
        raise OptionError(
            f"--latency: the family {family} has {', '.join(model.names)}, of which "
            f"{', '.join(n for n in model.names if n in needed)} must be given; "
            f"wrong or missing: {', '.join(sorted(wrong))}"
        )
    numbers = {name: _number("--latency", name, value, 1e3) for name, value in given.items()}
    try:
        return model(**numbers)
    except ValueError as error:
        raise OptionError(f"--latency: {error}") from error


def fleet(
    config: SluiceConfig,
    model: LatencyModel,
    policy: str | None,
    policy_options: str | None,
    router: str | None,
    limits: Mapping[str, int | None],
) -> PlannedFleet:
    """The fleet that serves the requests: as in ``config``, overridden by the other arguments.

    Args:
        config: of the fleet; its options of a policy count for that policy only.
        model: of step times.
        policy, router: names of policies.
        policy_options: a JSON object, options of the batch policy.
        limits: fields of :class:`~sluice.simulation.config.EngineConfig`; ``None`` leaves one as it
            is.

    Raises:
        OptionError: options that the policy has not, or limits that contradict each other.
    """
    engine, controller = config.engine, config.controller
    name = policy or engine.policy
    routed = router or controller.policy
    options = dict(engine.policy_options) if name == engine.policy else {}
    options |= _object("--policy-options", policy_options)
    routing_options = dict(controller.policy_options) if routed == controller.policy else {}
    try:
        batching.make_policy(name, options)
        routing.make_policy(routed, routing_options)
    except ValidationError as error:
        known = ", ".join(batching.POLICIES[name].Options.model_fields) or "none"
        raise OptionError(f"{name}: {_problems(error)}; its options: {known}") from None
    except ValueError as error:
        raise OptionError(str(error)) from error
    given = {field: value for field, value in limits.items() if value is not None}
    return PlannedFleet(
        model,
        _checked(EngineConfig, _limits(engine) | given),
        _checked(
            ClusterConfig,
            {
                "report_interval_s": config.replica.report_interval_s,
                "heartbeat_s": config.replica.heartbeat_s,
                "stale_after_s": controller.stale_after_s,
                "reservation_ttl_s": controller.reservation_ttl_s,
                "reference_ttft_s": controller.reference_ttft_ms / 1e3,
            },
        ),
        name,
        options,
        routed,
        routing_options,
        engine.headroom,
    )


def _limits(engine: ReplicaEngine) -> dict[str, Any]:
    """A replica's limits: those of the simulated engine, overridden by vLLM's arguments."""
    simulated = engine.simulated
    limits: dict[str, Any] = {
        name: getattr(simulated, name)
        for name in ("kv_blocks", "block_tokens", "max_batch_tokens", "max_sequences")
    }
    if engine.kind == "vllm":
        given = {name.replace("_", "-"): value for name, value in engine.vllm_args.items()}
        limits |= {ours: given[name] for name, ours in _VLLM_LIMITS.items() if name in given}
        limits["prefix_cache"] = given.get("enable-prefix-caching", True)
    return limits


def _checked(kind: type[M], values: Mapping[str, Any]) -> M:
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise OptionError(_problems(error)) from None


def _object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{option}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(f'{option}: must be a JSON object such as {{"name": 1}}, got {text!r}')
    return found
