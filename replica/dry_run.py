"""Whether vLLM takes an engine's configuration, told in seconds and before anything is started.

``python -m sluice.replica.dry_run PID`` reads a JSON list of objects with ``engine``, ``role`` and
``here``, and writes a list of the same length: why an engine cannot start, or null. A process of
its own, since vLLM takes seconds to import and reads its environment once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from sluice.replica.config import EngineConfig
from sluice.replica.engine import ConfigurationError
from sluice.replica.parent_watch import end_with_parent
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.local_model import local_model
from sluice.replica.vllm.setup import (
    check_arguments,
    engine_arguments,
    engine_config,
    prepare_environment,
)
from sluice.scheduling.roles import Role

_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def fault(engine: EngineConfig, role: Role, here: bool) -> str | None:
    """Why an engine with this configuration cannot start, as far as vLLM can tell without loading
    it; ``None``: it can. Where it would not run ``here``, only its arguments are checked, and less
    where its model is not on this machine."""
    if not here:
        return _refusal(engine)
    preemption = engine.preemption.granularity != "off"
    if preemption:
        import sluice.replica.preemption.variant  # noqa: F401 - the import registers it
    settings = SchedulerSettings(
        state_table=Path("/"),
        policy=engine.policy,
        policy_options=engine.policy_options,
        role=role,
        best_effort=engine.best_effort,
        preemption=engine.preemption,
    )
    try:
        model = str(local_model(engine.cache_dir)) if engine.model == "local" else engine.model
        prepare_environment(model, engine.pin_cpu, preemption)
        arguments = engine_arguments(engine, model, settings, role)
        if _is_here(model):
            engine_config(arguments)
    except ValidationError as error:  # of vLLM, whose text shows its whole input
        return "; ".join(each["msg"] for each in error.errors())
    except (ValueError, ConfigurationError) as error:
        return str(error)
    except OSError:
        return None  # of files or the network: the start says so
    return None


def _refusal(engine: EngineConfig) -> str | None:
    try:
        check_arguments(engine.vllm_args)
    except ValueError as error:
        return str(error)
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
