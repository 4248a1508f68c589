"""Prefix hashes of a prompt, see :mod:`sluice.scheduling.fleet.prefix`, from its text or token ids.

The tokens of a prompt depend on more than its text: on the model, the tools, the template. All of
these are hashed before the text, so that prompts share a hash only if their tokens begin alike.
Templates render tools in different places; here they come first, as in some templates, which
predicts fewer shared prefixes.

The hashes are not keyed: only the controller and the replicas receive them. Anything that a client
could learn by probing, it learns from any prefix cache's response times; the field ``cache_salt``
separates prompts here as it does in vLLM's cache.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from sluice.protocol.requests import GENERATING, SPEECH, Endpoint
from sluice.router.request.prompt_size import MEDIA_TOKENS, messages_of
from sluice.scheduling.fleet.prefix import (
    CHUNK_ENDS,
    MAX_CHUNKS,
    NO_PREFIX,
    TOKEN_UNITS,
    PromptPrefix,
)

_SALT = "cache_salt"
_SETTINGS = (
    "model",
    _SALT,
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tool_choice",
    "reasoning",
)
"""Fields that change the rendering of the whole prompt."""

_UNREADABLE = ("prompt_embeds", "truncate_prompt_tokens")
"""Fields with which a prompt does not begin with its text."""

_MEDIUM_UNITS = MEDIA_TOKENS * TOKEN_UNITS


def prefix_of(endpoint: Endpoint, body: dict[str, Any]) -> PromptPrefix:
    """Hash the beginning of a validated body's prompt.

    There are no hashes for a prompt shorter than a chunk, or for a call with several prompts.
    ``O(characters)`` up to the last of :data:`~sluice.scheduling.fleet.prefix.CHUNK_ENDS`.
    """
    if endpoint not in GENERATING - SPEECH or any(body.get(f) is not None for f in _UNREADABLE):
        return NO_PREFIX
    settings = {field: body[field] for field in _SETTINGS if body.get(field) is not None}
    hasher = blake2b(json.dumps([endpoint, settings]).encode(), digest_size=8)
    if endpoint != "completions":
        texts = _chat_texts(messages_of(endpoint, body), body.get("tools"))
        return _of_texts(hasher, list(texts))
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _of_texts(hasher, [prompt])
    return _of_tokens(hasher, prompt) if isinstance(prompt[0], int) else NO_PREFIX


def salted(body: dict[str, Any], owner: str) -> dict[str, Any]:
    """``body`` with a ``cache_salt`` that only ``owner`` can have, derived from the given one: its
    prompts share no KV with other clients. A salt that is not a string is left for the engine to
    refuse."""
    salt = body.get(_SALT)
    if salt is not None and not isinstance(salt, str):
        return body
    text = json.dumps([owner, salt]).encode()
    return {**body, _SALT: blake2b(text, digest_size=16, person=b"sluice-salt").hexdigest()}


def _chat_texts(messages: list[dict[str, Any]], tools: Any) -> Iterator[str | None]:
    """The texts of a conversation in order; ``None`` for a medium."""
    if tools:
        yield json.dumps(tools, ensure_ascii=False)
    for message in messages:
        content = message.get("content")
        rest = {key: value for key, value in message.items() if key not in ("content", "role")}
        # A text with zeros can look like two messages; the only effect is a wrong prediction.
        yield f"\0{message.get('role')}\0{json.dumps(rest, ensure_ascii=False) if rest else ''}\0"
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
            elif part is not None:
                yield None


def _of_texts(hasher: blake2b, texts: list[str | None]) -> PromptPrefix:
    """Hash the texts up to the first medium, whose tokens are not in the body."""
    size = sum(_MEDIUM_UNITS if text is None else len(text) for text in texts)
    hashes: list[int] = []
    position = 0
    for text in texts:
        if text is None or len(hashes) == MAX_CHUNKS:
            break
        begin = 0
        while len(hashes) < MAX_CHUNKS and CHUNK_ENDS[len(hashes)] <= position + len(text):
            end = CHUNK_ENDS[len(hashes)] - position
            hasher.update(text[begin:end].encode())
            hashes.append(_digest(hasher))
            begin = end
        if len(hashes) < MAX_CHUNKS:
            hasher.update(text[begin:].encode())
        position += len(text)
    return PromptPrefix(tuple(hashes), size)


def _of_tokens(hasher: blake2b, ids: list[int]) -> PromptPrefix:
    size = len(ids) * TOKEN_UNITS
    hashes: list[int] = []
    begin = 0
    for end in takewhile(lambda end: end <= size, CHUNK_ENDS):
        chunk = ids[begin // TOKEN_UNITS : end // TOKEN_UNITS]
        hasher.update(array("I", chunk).tobytes())
        hashes.append(_digest(hasher))
        begin = end
    return PromptPrefix(tuple(hashes), size)


def _digest(hasher: blake2b) -> int:
    """63 bits of everything so far; 0 would mean no chunk."""
    return int.from_bytes(hasher.digest(), "big") >> 1 or 1
