"""State of an inference request before its body is read."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from sluice.protocol.requests import SPEECH, UNSCHEDULED, Endpoint
from sluice.router.request.body import HeldBytes
from sluice.router.tenancy.limits import ANYONE, Client

MAX_CHARACTERS: Final = 128  # maximum recorded characters of an id

_UNPRINTABLE = re.compile(r"[^ -~]")


def noted(text: str) -> str:
    """An id as recorded: at most :data:`MAX_CHARACTERS`, ``?`` for all but printable ASCII."""
    return _UNPRINTABLE.sub("?", text[:MAX_CHARACTERS])


INFERENCE_PATHS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/embeddings": "embeddings",
    "/classify": "classify",
    "/pooling": "pooling",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
BATCH_PATHS = tuple(
    path
    for path, endpoint in INFERENCE_PATHS.items()
    if path.startswith("/v1/") and endpoint not in SPEECH | UNSCHEDULED
)
"""The paths that a batch may be for: its lines are JSON."""


def endpoint_at(path: str) -> Endpoint | None:
    """The endpoint whose API ``path`` speaks; ``None``: OpenAI's or Sluice's own, alike in
    errors."""
    return "messages" if path.startswith("/v1/messages") else INFERENCE_PATHS.get(path)


class Arrival(NamedTuple):
    """The ingress middleware's record of a request, ``arrival`` in the scope's state. ``held``: its
    body's bytes while in flight. ``client_request_id``: the client's own id."""

    request_id: str
    received_s: float
    client: Client = ANYONE
    held: HeldBytes | None = None
    client_request_id: str = ""
