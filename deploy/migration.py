"""Configurations from what other systems are started with: a command line of ``vllm serve``, and
Ray Serve LLM's ``LLMConfig``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sluice.deploy.config import read_mapping
from sluice.replica.vllm_args import by_option, instead_of, parse_flags

_OWN: Mapping[str, tuple[str, str]] = {
    "model": ("engine", "model"),
    "served-model-name": ("engine", "served_model_name"),
    "host": ("router", "host"),
    "port": ("router", "port"),
    "api-key": ("router", "api_keys"),
    "api-server-count": ("router", "replicas"),
    "shutdown-timeout": ("replica", "drain_timeout_s"),
}
"""vLLM's options with a field of Sluice's own."""

VLLM_KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's server reads its API key from this variable, too."""

_TEXTS = ("model", "served_model_name", "host")
"""Of these fields those that are texts, whatever they look like."""


class Migrated(NamedTuple):
    """A configuration, and a line for each thing that has no counterpart in it."""

    config: dict[str, Any]
    lacking: list[str]


# vLLM.

_IMAGE = re.compile(r"(\S+/)?vllm-openai(-\w+)?(:\S*|@\S*)?")
_VARIABLE = re.compile(r"(?:--env=|-e)?([A-Z][A-Z0-9_]*)=.*", re.DOTALL)


def from_vllm(words: Sequence[str]) -> Migrated:
    """What ``words`` start, a command line with ``vllm serve``, the API server's module or vLLM's
    image, or only what follows these. Raises ValueError: a word belongs to no flag, or there is no
    model; OSError: a file that ``--config`` names cannot be read."""
    begin, rest = _split(words)
    variables = [found[1] for found in map(_VARIABLE.fullmatch, begin) if found]
    lacking = [
        f"{name}: set router.api_keys or router.api_keys_file"
        if name == VLLM_KEY_VARIABLE
        else f"{name}: set it in the environment of Sluice"
        for name in variables
    ]
    lacking += [f"{word}: the shell's variables are not known here" for word in rest if "$" in word]
    model = rest[0] if rest and not rest[0].startswith("-") else None
    flags = parse_flags(rest[1:] if model is not None else rest)
    if isinstance(path := flags.pop("config", None), str):
        flags = by_option(read_mapping(Path(path))) | flags
    if model is not None:
        flags["model"] = model
    if not flags.get("model"):
        raise ValueError(
            "there is no MODEL: it comes first, before the flags of vLLM, or in --model"
        )
    # `vllm serve` is one engine.
    config: dict[str, Any] = {"engine": {}, "replica": {"count": 1}}
    lacking += add_flags(config, flags)
    return Migrated({name: section for name, section in config.items() if section}, lacking)


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What stands before the arguments of vLLM's server, and these."""
    for index, word in enumerate(words):
        served = word == "serve" and (not index or Path(words[index - 1]).name == "vllm")
        if served or word.startswith("vllm.entrypoints.") or _IMAGE.fullmatch(word):
            before, after = words[:index], words[index + 1 :]
            return (before, after) if served else (before, _split(after)[1])
    return (), words


_OPERATOR = re.compile(r"[\n;&|<>]+")


def command_words(text: str) -> list[str]:
    """The words of the command of vLLM in ``text``, a command or a script, with the variables that
    are set before it. Raises ValueError: a quote is open."""
    spaces = r"(?<!\S)#.*$|\\\r?\n|\r?\n(?=\s*-)|(?<=\s)\d+(?=[<>])"
    text = re.sub(spaces, " ", text, flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n;&|<>")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    commands: list[list[str]] = [[]]
    of_file = False
    for word in lexer:
        if not _OPERATOR.fullmatch(word):
            if not of_file:
                commands[-1].append(word)
            of_file = False
        elif not (of_file := word.strip("&")[-1:] in ("<", ">")):
            commands.append([])
    variables: list[str] = []
    for command in commands:
        rest = _split(command)[1]
        if rest and rest is not command:
            return variables + command
        variables += filter(_VARIABLE.fullmatch, command)
    return next(filter(None, commands), [])


def add_flags(config: dict[str, Any], flags: Mapping[str, Any]) -> list[str]:
    """Lay vLLM's ``flags`` over ``config``; a line for each that has no place there. Raises
    ValueError: one has no value."""
    lacking, arguments = [], {}
    for option, value in flags.items():
        if option in _OWN:
            section, field = _OWN[option]
            if isinstance(value, bool):
                raise ValueError(f"--{option} needs a value")
            values = value if isinstance(value, list) else [value]
            if field == "api_keys":
                value = [*map(str, values)]
            elif field in _TEXTS:
                value = str(values[0])
                lacking += [f"--{option} {name}: one name" for name in values[1:]]
            config.setdefault(section, {})[field] = value
        elif (instead := instead_of(option)) is not None:
            lacking.append(f"--{option}: {instead}")
        else:
            arguments[option] = value
    if arguments:
        config.setdefault("engine", {})["vllm_args"] = arguments
    return lacking


# Ray Serve LLM.

_AUTOSCALING = ("min_replicas", "max_replicas", "initial_replicas")

_WHY_NOT: Mapping[str, str] = {
    "accelerator_config": "replicas take GPUs by num_gpus in replica",
    "callback_config": "Sluice calls no code of yours",
    "experimental_configs": "Sluice streams each token, and router.replicas is how many routers",
    "llm_engine": "the engine is vLLM",
    "log_engine_metrics": "/metrics has Sluice's metrics",
    "placement_group_config": "replica.num_gpus and replica.placement_strategy place workers",
    "runtime_env": "set it for the application: the file of `serve deploy` has runtime_env, too",
    "server_cls": "the engine is vLLM",
    "autoscaling_config": "replica.autoscaling scales by what replicas can promise",
    "health_check_period_s": "Sluice sets it",
    "health_check_timeout_s": "Sluice sets it",
    "max_ongoing_requests": "requests wait in the engine by their objectives, and "
    "replica.max_live_requests bounds their number",
    "max_queued_requests": "the classes of router.classes bound how long a request waits",
    "name": "the file's application has the name",
    "ray_actor_options": "set num_cpus, num_gpus and node_labels in replica",
    "request_router_config": "controller.policy chooses replicas",
    "dynamic_lora_loading_path": "engine.adapters_dir is a folder on each node",
    "bucket_uri": "engine.model is a path or an id of the hub",
}
"""Fields of Ray's without a counterpart, and what to do."""


def from_ray(data: Mapping[str, Any], folder: Path) -> Migrated:
    """What ``data`` deploys: an ``LLMConfig``, the arguments of ``build_openai_app`` or
    ``build_pd_openai_app``, or a file of ``serve deploy`` with these. ``folder``: where the files
    are that it names. Raises ValueError: it holds no LLMConfig; OSError."""
    lacking: list[str] = []
    models = [_model(each, folder, lacking) for each in _llm_configs(data, lacking)]
    if not models:
        raise ValueError("there is no LLMConfig: no llm_configs and no model_loading_config")
    if len(models) == 1:
        engine = models[0]["engine"]
        if engine["served_model_name"] == engine["model"]:
            del engine["served_model_name"]
        return Migrated(models[0], lacking)
    named: dict[str, Any] = {}
    for model in models:
        name = model["engine"].pop("served_model_name")
        if name in named:
            raise ValueError(f"two models have the model_id {name}")
        named[name] = model
    return Migrated({"models": named}, lacking)


def _llm_configs(data: Mapping[str, Any], lacking: list[str]) -> list[Any]:
    if "model_loading_config" in data:
        return [data]
    if "applications" in data:
        found = []
        for application in data["applications"]:
            arguments = application.get("args") or {}
            inner = _llm_configs(arguments, lacking)
            if not inner:
                name = application.get("name", application.get("import_path"))
                lacking.append(f"applications: {name} serves no language model")
            found += inner
        return found
    if "prefill_config" in data and "decode_config" in data:
        return [data]
    found = data.get("llm_configs") or []
    if not isinstance(found, list):
        raise ValueError("llm_configs must be a list")
    return found


def _model(given: Any, folder: Path, lacking: list[str]) -> dict[str, Any]:
    """The sections of one model. ``given``: an LLMConfig, a pair of them, or the path of one."""
    if isinstance(given, str):
        given = read_mapping(folder / given)
    if "prefill_config" not in given:
        return _one(given, lacking)
    prefill, decode = (_one(given[f"{role}_config"], lacking) for role in ("prefill", "decode"))
    engine = decode["engine"]
    pools = {}
    for role, model in (("prefill", prefill), ("decode", decode)):
        own = model["engine"].pop("vllm_args", {})
        own.pop("kv-transfer-config", None)  # Sluice sets it between these pools
        pools[role] = model["replica"] | ({"engine": {"vllm_args": own}} if own else {})
        if (drain_s := pools[role].pop("drain_timeout_s", None)) is not None:
            lacking.append(f"{role}_config: set replica.drain_timeout_s, {drain_s}, for both roles")
    return {"engine": engine, "replica": {"pools": pools}}


def _mapping(given: Any, name: str) -> dict[str, Any]:
    """A copy of the field ``name``. Raises ValueError: it is no mapping."""
    if not isinstance(given or {}, Mapping):
        raise ValueError(f"{name} must be a mapping")
    return dict(given or {})


def _one(given: Any, lacking: list[str]) -> dict[str, Any]:
    """The sections of an LLMConfig."""
    rest = _mapping(given, "an LLMConfig")
    loading = _mapping(rest.pop("model_loading_config"), "model_loading_config")
    name = loading.pop("model_id")
    source = loading.pop("model_source", None) or name
    config: dict[str, Any] = {
        "engine": {"model": source, "served_model_name": name},
        "replica": {"count": 1},
    }
    flags = by_option(_mapping(rest.pop("engine_kwargs", None), "engine_kwargs"))
    if isinstance(source, Mapping):
        config["engine"]["model"] = name
        loading |= source
    if (tokenizer := loading.pop("tokenizer_source", None)) is not None:
        flags["tokenizer"] = tokenizer
    lora = _mapping(rest.pop("lora_config", None), "lora_config")
    if (most := lora.pop("max_num_adapters_per_replica", None)) is not None:
        flags.setdefault("max-loras", most)
    lacking += [line.replace("--", f"{name}: engine_kwargs.") for line in add_flags(config, flags)]
    if (accelerator := rest.pop("accelerator_type", None)) is not None:
        config["replica"]["node_labels"] = {"ray.io/accelerator-type": accelerator}
    deployment = _mapping(rest.pop("deployment_config", None), "deployment_config")
    _deploy(config["replica"], deployment)
    for part in (loading, lora, deployment, rest):
        for field, value in part.items():
            if value:
                lacking.append(f"{name}: {field}: {_WHY_NOT.get(field, 'no counterpart')}")
    return config


def _deploy(replica: dict[str, Any], deployment: dict[str, Any]) -> None:
    """Take from Ray's ``deployment_config`` what ``replica`` has, too."""
    scaling = _mapping(deployment.pop("autoscaling_config", None), "autoscaling_config")
    count = deployment.pop("num_replicas", None)
    own = {field: scaling.pop(field) for field in _AUTOSCALING if scaling.get(field) is not None}
    if count == "auto":  # as Ray Serve has it
        own = {"min_replicas": 1, "max_replicas": 100} | own
    if own:
        own.setdefault("max_replicas", max(own.values()))
        replica["autoscaling"] = own
        del replica["count"]
    elif count is not None:
        replica["count"] = count
    if scaling:
        deployment["autoscaling_config"] = scaling
    if (drain_s := deployment.pop("graceful_shutdown_timeout_s", None)) is not None:
        replica["drain_timeout_s"] = drain_s
