"""Whether vLLM takes engines' configurations: ``python -m sluice.replica.dry_run PID``. Reads a
JSON list of objects with ``engine``, ``role`` and ``here``; writes one of reasons or nulls. A
process of its own, since vLLM reads its environment once."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sluice.replica.config import EngineConfig
from sluice.replica.engine import ConfigurationError
from sluice.replica.processes import end_with_parent
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.local_model import local_model
from sluice.replica.vllm.setup import (
    check_arguments,
    engine_arguments,
    engine_config,
    prepare_environment,
)
from sluice.scheduling.preemption import TaskBounds
from sluice.scheduling.roles import Role

_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def fault(engine: EngineConfig, role: Role, here: bool) -> str | None:
    """Why vLLM refuses this configuration, without loading it; ``None``: it does not. Only
    arguments are checked unless it would run ``here``, and less where its model is elsewhere."""
    if not here:
        try:
            check_arguments(engine.vllm_args)
        except ValueError as error:
            return str(error)
        return None
    settings = SchedulerSettings(
        state_table=Path("/"),
        policy=engine.policy,
        policy_options=engine.policy_options,
        role=role,
        best_effort=engine.best_effort,
        preemption=TaskBounds() if engine.preemption else None,
    )
    try:
        model = str(local_model(engine.cache_dir)) if engine.model == "local" else engine.model
        prepare_environment(model, engine.pin_cpu, engine.preemption)
        arguments = engine_arguments(engine, model, settings, role)
        if _is_here(model):
            vllm_config = engine_config(arguments)
            _look_up(arguments, vllm_config)
    except ValidationError as error:  # of vLLM, whose text shows its whole input
        return "; ".join(each["msg"] for each in error.errors())
    except (ValueError, ConfigurationError) as error:
        return str(error)
    except OSError:
        return None  # of files or the network: the start says so
    except Exception as error:  # such as a KeyError of a registry: the start would end with it, too
        return f"{type(error).__name__}: {error}"
    return None


def _look_up(arguments: Any, vllm_config: Any) -> None:
    """Find what is configured by name. What this vLLM looks up elsewhere is left to the start."""
    resolve = "utils.import_utils:resolve_obj_by_qualname"
    lookups = [
        ("load-format", "model_executor.model_loader:get_model_loader", vllm_config.load_config),
        ("worker-cls", resolve, arguments.worker_cls),
        ("worker-extension-cls", resolve, arguments.worker_extension_cls),
        (
            "tokenizer-mode",
            "tokenizers.registry:TokenizerRegistry.load_tokenizer_cls",
            vllm_config.model_config.tokenizer_mode,
        ),
        (
            "logits-processors",
            "v1.sample.logits_processor:_load_logitsprocs_by_fqcns",
            arguments.logits_processors,
        ),
        (
            "ec-transfer-config",
            "distributed.ec_transfer.ec_connector.factory:ECConnectorFactory.get_connector_class",
            vllm_config.ec_transfer_config,
        ),
    ]
    for option, function, value in lookups:
        if not value or value == "auto":
            continue
        try:
            look_up = pkgutil.resolve_name(f"vllm.{function}")
        except (ImportError, AttributeError):
            continue
        try:
            look_up(value)
        except Exception as error:
            raise ValueError(f"vllm_args: {option}: {error}") from error
    if plugin := arguments.io_processor_plugin:
        from vllm.plugins import IO_PROCESSOR_PLUGINS_GROUP, load_plugins_by_group

        if plugin not in load_plugins_by_group(IO_PROCESSOR_PLUGINS_GROUP):
            raise ValueError(f"vllm_args: io-processor-plugin: {plugin} is not installed")


def _is_here(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    if Path(model).is_dir():
        return True
    if model.startswith(("/", ".", "~")) or "://" in model:
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"
    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def main() -> None:
    """See above. The argument is the process id of the parent."""
    end_with_parent(int(sys.argv[1]))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs there
    own = os.environ.get(_MODEL_RUNNER)
    faults = []
    for each in json.load(sys.stdin):
        if own is None:
            os.environ.pop(_MODEL_RUNNER, None)  # set for an engine before
        faults.append(
            fault(EngineConfig.model_validate(each["engine"]), each["role"], each["here"])
        )
    with answer:
        json.dump(faults, answer)


if __name__ == "__main__":
    main()
