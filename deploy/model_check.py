"""Checks in seconds, before anything starts, that the files that an engine needs are available."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sluice.replica.config import EngineConfig
from sluice.replica.vllm_args import by_option

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DESCRIPTIONS = ("config.json", "params.json")
"""Files by which vLLM knows a model: Hugging Face's, and Mistral's."""

_HUB_TIMEOUT_S = 10.0


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
