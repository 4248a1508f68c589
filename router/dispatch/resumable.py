"""Which calls more than one replica may serve: as a P/D pair, or by resuming after a failure.

Conditions that only the engine knows are not checked here: if its output cannot be resumed, it does
not report the tokens (:attr:`~sluice.protocol.requests.EngineRequest.resumable`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sluice.protocol.requests import EngineRequest
from sluice.router.request.call import Call
from sluice.router.request.prompt_size import PromptSize
from sluice.scheduling.fleet.transfer import prompt_ttft_s
from sluice.scheduling.request.objective import SLO

_WHOLE = ("echo", "prompt_logprobs", "prompt_embeds")
_TEXT = ("text", "input_text", "output_text", "refusal")

NOT_RESUMABLE = (
    "No other replica can resume this stream: several choices, log probabilities, structured "
    "output, penalties or the like depend on more than the tokens that were sent."
)
"""Error message for a stream that cannot be resumed after its replica failed."""


def may_split(call: Call) -> bool:
    """Whether a P/D pair may serve the call. ``O(messages)``.

    Not if the answer includes results of the prefill, nor with media: their features would have to
    be transferred, too.
    """
    body = call.body
    whole = any(_is_set(body.get(name)) for name in _WHOLE)
    return _is_single(call) and not whole and _is_text(body)


def may_resume(call: Call) -> bool:
    """Whether another replica may resume its stream. ``O(1)``."""
    return bool(call.body.get("stream")) and not call.body.get("echo") and _is_single(call)


def may_migrate(call: Call) -> bool:
    """Whether its stream may move to another replica although its own one works. ``O(messages)``.
    Not with media, whose features would have to be transferred, too, nor if its tokens are drawn by
    a seed: the state of the random numbers does not move."""
    body = call.body
    drawn = body.get("seed") is not None and body.get("temperature") != 0
    return may_resume(call) and not drawn and _is_text(body)


def prefill_id_of(request_id: str) -> str:
    """The id of the prefill of a request that a P/D pair serves."""
    return f"{request_id}.prefill"


def prefill_of(
    whole: EngineRequest, kv_transfer_s: float, trace: Mapping[str, str]
) -> EngineRequest:
    """The prefill phase of a request whose first token comes ``kv_transfer_s`` after it. ``trace``:
    its own trace context."""
    return replace(
        whole,
        request_id=prefill_id_of(whole.request_id),
        slo=prompt_slo(whole.slo, kv_transfer_s),
        trace=trace,
        prefill_only=True,
        resumable=False,
        direct_patience_s=None,
    )


def prompt_slo(slo: SLO, kv_transfer_s: float) -> SLO:
    """The SLO of the prefill phase, if the first token comes ``kv_transfer_s`` after it."""
    if slo.ttft_s is None:
        return slo
    return replace(slo, ttft_s=prompt_ttft_s(slo.ttft_s, kv_transfer_s), stages=())


def rest_of(call: Call, tokens: int, slo: SLO) -> Call:
    """The rest of a call whose client has ``tokens`` output tokens: they are part of the prompt.
    ``slo`` is that of the rest."""
    prompt = call.prompt
    left = max(1, call.output_tokens - tokens) if call.output_tokens else 0
    size = PromptSize(prompt.characters, prompt.tokens + tokens)
    return replace(call, slo=slo, prompt=size, output_tokens=left)


def _is_single(call: Call) -> bool:
    """One output of one prompt."""
    body = call.body
    if call.endpoint not in ("chat", "completions") or (body.get("n") or 1) > 1:
        return False
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return call.endpoint == "chat" or not several


def _is_set(value: object) -> bool:
    # With 0 the answer still holds the log probability of the token itself.
    return value is not None and value is not False


def _is_text(body: dict[str, object]) -> bool:
    messages = body.get("messages")
    contents = [m.get("content") for m in messages] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(
        isinstance(p, str) or (isinstance(p, dict) and p.get("type") in _TEXT) for p in parts
    )
