"""Resuming a stream that another replica began: checks that are common to all engines."""

from __future__ import annotations

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import EngineRequest


def check_resume(request: EngineRequest) -> None:
    """Check the part of the response that a request to resume carries.

    Raises:
        RequestError: it is no stream with one prompt and one choice, or its token counts are
            inconsistent.
    """
    resume = request.resume
    if resume is None:
        return
    body = request.body
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    choices = body.get("n") or 1
    if request.endpoint not in ("chat", "completions") or several or choices != 1:
        raise RequestError("Only a stream with one prompt and one choice can be resumed.", None)
    if not body.get("stream"):
        raise RequestError("Only a stream can be resumed.", "stream")
    if sum(resume.chunks) != len(resume.token_ids) or min(resume.chunks, default=0) < 0:
        raise RequestError(
            f"The chunks of a stream to resume carry {sum(resume.chunks)} tokens, but "
            f"{len(resume.token_ids)} are given.",
            None,
        )
