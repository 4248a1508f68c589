"""LoRA adapters by vLLM's naming: requests ask for one by its name in place of the model's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sluice.replica.vllm_args import by_option

ADAPTERS_ARGUMENT = "lora-modules"
_FORMS = "a list of 'name=path' or of objects with name and path"


def adapter_names(vllm_args: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the adapters that are loaded at start, as vLLM's argument ``lora-modules`` gives
    them.

    Raises:
        ValueError: it has none of the forms that vLLM accepts.
    """
    given = by_option(vllm_args).get(ADAPTERS_ARGUMENT)
    if given is None:
        return ()
    entries = given if isinstance(given, list | tuple) else [given]
    names = tuple(_name_of(entry) for entry in entries)
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ValueError(f"{ADAPTERS_ARGUMENT} name two adapters alike: {', '.join(doubles)}")
    return names


def _name_of(entry: Any) -> str:
    if isinstance(entry, str) and entry.lstrip().startswith("{"):
        try:
            entry = json.loads(entry)
        except ValueError as error:
            raise ValueError(f"an entry of {ADAPTERS_ARGUMENT} is not JSON: {error}") from None
    if isinstance(entry, str):
        name, _, path = entry.partition("=")
        entry = {"name": name, "path": path}
    if isinstance(entry, Mapping):
        parts = [entry.get(part) for part in ("name", "path")]
        if all(isinstance(part, str) and part for part in parts):
            return str(parts[0])
    raise ValueError(f"{ADAPTERS_ARGUMENT} must be {_FORMS}, got {entry!r}")
