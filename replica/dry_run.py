"""Whether vLLM takes engines' configurations: ``python -m sluice.replica.dry_run PID``. Reads a
JSON list of objects with ``engine``, ``role`` and ``here``; writes one of reasons or nulls. A
process of its own, since vLLM reads its environment once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

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
            engine_config(arguments)
    except (ValueError, ConfigurationError) as error:
        return str(error)
    except OSError:
        return None  # of files or the network: the start says so
    except Exception as error:  # the start would end with it, too
        return f"{type(error).__name__}: {error}"
    return None


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
