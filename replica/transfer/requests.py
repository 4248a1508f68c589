"""Checks of the KV transfer fields in requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import EngineRequest

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Fields of vLLM's API that say where an engine fetches KV, or which KV it gives away. Only engines
may set them: a client that could set them could make an engine connect anywhere, or take the prompt
of another client."""


def check_transfer(request: EngineRequest) -> None:
    """Check the KV transfer fields of a request.

    Raises:
        RequestError: it sets a field that only engines may set, or asks for KV but is not one
            prompt with one answer.
    """
    refuse_transfer_fields(request.body)
    if not request.prefill_only:
        if request.kv_of_request:
            raise RequestError("Only a request for its prompt hands KV over.", None)
        return
    prompt = request.body.get("prompt")
    one_prompt = not isinstance(prompt, list) or len(prompt) < 2 or isinstance(prompt[0], int)
    one_choice = request.body.get("n") in (None, 1)
    if not (request.endpoint in ("chat", "completions") and one_prompt and one_choice):
        raise RequestError(
            "Prefill only is possible for a chat or a completion with one prompt and one choice.",
            None,
        )


def refuse_transfer_fields(body: Mapping[str, Any]) -> None:
    """Refuse a client's body, or its extra arguments, that names KV to fetch or to give away.

    Raises:
        RequestError: it names such a field; the message says which.
    """
    for name in TRANSFER_FIELDS:
        if body.get(name) is not None:
            raise RequestError(f"{name} cannot be set by clients.", name)
